// Task order of the host engine: which task a ticket stands for. (The Hopper engine cuts groups of
// its own, see sm90/task.cuh; the rules below hold there too.)
//
// Tickets are claimed in order, and a task waits only for tasks with smaller tickets (and for
// peers), so the lowest unfinished task can always run, however few workers there are.
//
// Groups are runs of `group_blocks` consecutive row blocks. Forward: dispatch and FC1 of a group
// come before FC2 of the group before it, so that FC2 rarely waits. Backward: likewise, then the
// weight gradients of every cut that ended one more group earlier. A cut is a fixed number of
// blocks of one expert; its tasks add to the gradient in the order of cuts, so the bits do not
// depend on rings.
#ifndef MOK_SCHEDULE_SEGMENTS_H_
#define MOK_SCHEDULE_SEGMENTS_H_

#include "tables.h"

namespace mok {

// How an engine cuts the work into tasks. Tile counts depend on H, F and dtype alone.
struct TaskShape {
  int32_t fc1_tiles;     // tiles of F in FC1 (and in FC2's dgrad)
  int32_t fc2_tiles;     // tiles of H in FC2 (and in FC1's dgrad)
  int32_t wgrad_tiles;   // tiles of dW1 and dW2 of one expert
  int32_t group_blocks;  // row blocks of a group
  int32_t cut_blocks;    // row blocks of a weight-gradient cut
};

// Row blocks that the rings must hold so that no task waits for a larger ticket: dispatch runs at
// most two groups ahead of FC2, and in backward the oldest cut may begin cut_blocks - 1 earlier.
MOK_HD int64_t min_ring_blocks(const TaskShape& t, MokDirection direction) {
  const int64_t groups = int64_t{3} * t.group_blocks;
  return direction == MOK_FORWARD ? groups : groups + t.cut_blocks;
}

// Bound on the number of segments for `blocks` blocks of `num_local` experts.
MOK_HD int64_t max_segments(const TaskShape& t, int64_t blocks, int32_t num_local) {
  return 3 * ceil_div(blocks, t.group_blocks) + ceil_div(blocks, t.cut_blocks) + 2 * num_local + 1;
}

// Appends segments to `out` while there is room, and counts them all.
struct SegmentWriter {
  MokSegment* out;
  int32_t capacity;
  int32_t num_segments;
  int32_t num_tickets;

  MOK_HD void add(MokPhase phase, int32_t first_block, int32_t num_blocks, int32_t num_tiles,
                  int32_t expert, int32_t cut) {
    // Tasks of a wgrad segment walk its blocks themselves.
    const int32_t tickets = phase == MOK_PHASE_WGRAD ? num_tiles : num_blocks * num_tiles;
    if (tickets == 0) return;
    if (num_segments < capacity) {
      out[num_segments] =
          MokSegment{phase, num_tickets, first_block, num_blocks, 0, num_tiles, expert, cut};
    }
    ++num_segments;
    num_tickets += tickets;
  }
};

// Weight-gradient cuts in block order; remembers where it stopped.
struct CutCursor {
  int32_t expert;
  int32_t cut;

  // Emits every cut that ends at or before block `end`. Experts without rows get one empty cut,
  // which writes zeros where gradients are not accumulated.
  MOK_HD void emit_until(int32_t end, const int32_t* block_offsets, int32_t num_local,
                         const TaskShape& t, SegmentWriter& w) {
    while (expert < num_local) {
      const int32_t expert_end = block_offsets[expert + 1];
      const int32_t first = block_offsets[expert] + cut * t.cut_blocks;
      int32_t last = first + t.cut_blocks;
      if (last > expert_end) last = expert_end;
      if (last > end) return;
      w.add(MOK_PHASE_WGRAD, first, last - first, t.wgrad_tiles, expert, cut);
      ++cut;
      if (last == expert_end) {
        ++expert;
        cut = 0;
      }
    }
  }
};

// reduce_tiles: ranges of tokens that the final reduction is cut into.
MOK_HD void build_segments(const int32_t* block_offsets, int32_t num_local, const TaskShape& t,
                           MokDirection direction, int32_t reduce_tiles, SegmentWriter& w) {
  const int32_t blocks = block_offsets[num_local];
  const int32_t groups = int32_t(ceil_div(blocks, t.group_blocks));
  CutCursor cuts{0, 0};
  for (int32_t g = 0; g <= groups; ++g) {
    const int32_t first = g * t.group_blocks;
    if (g < groups) {
      const int32_t n = first + t.group_blocks <= blocks ? t.group_blocks : blocks - first;
      w.add(MOK_PHASE_DISPATCH, first, n, 1, -1, 0);
      w.add(MOK_PHASE_FC1, first, n, t.fc1_tiles, -1, 0);
    }
    if (g > 0) {
      const int32_t before = first - t.group_blocks;
      const int32_t n = first <= blocks ? t.group_blocks : blocks - before;
      w.add(MOK_PHASE_FC2, before, n, t.fc2_tiles, -1, 0);
      if (direction == MOK_BACKWARD) cuts.emit_until(before, block_offsets, num_local, t, w);
    }
  }
  if (direction == MOK_BACKWARD) cuts.emit_until(blocks, block_offsets, num_local, t, w);
  w.add(MOK_PHASE_REDUCE, 0, 1, reduce_tiles, -1, 0);
}

// The segment of `ticket`, searching forward from `cursor` (tickets of one worker only grow).
MOK_HD int32_t find_segment(const MokSegment* segments, int32_t num_segments, int32_t ticket,
                            int32_t cursor) {
  while (cursor + 1 < num_segments && segments[cursor + 1].first_ticket <= ticket) ++cursor;
  return cursor;
}

}  // namespace mok

#endif  // MOK_SCHEDULE_SEGMENTS_H_
