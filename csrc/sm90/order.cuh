// Which task a ticket stands for.
#ifndef MOK_SM90_ORDER_CUH_
#define MOK_SM90_ORDER_CUH_

#include "backward.h"
#include "task.cuh"

namespace mok::sm90 {

MOK_DEVICE void describe_block(Task& task, const CallParams& p) {
  const BlockInfo block = p.local.blocks[task.block];
  task.expert = block.expert;
  task.rows = block.rows;
  task.group = block.group;
}

// Finds the tile that a ticket stands for. Order, that of build_segments without dispatch and
// reduction: step s has the FC1 tiles of group s, then the FC2 tiles of group s - 1. Blocks are
// fastest, so that consecutive tiles share weights; in FC1 of the first group tiles are, so that it
// can start on few rows. Tickets of one CTA only grow, so the step is found by moving forward.
class ForwardOrder {
 public:
  MOK_DEVICE explicit ForwardOrder(const CallParams& p)
      : first_block_(p.local.group_first_block), num_groups_(p.local.state->num_groups) {
    if (num_groups_ > 0) end_ = first_block_[1];
  }

  MOK_DEVICE Task decode(int32_t ticket, const CallParams& p) {
    const Geometry& g = p.geometry;
    while (step_ <= num_groups_ && ticket >= g.fc1_tiles * end_ + g.fc2_tiles * begin_) {
      ++step_;
      before_ = begin_;
      begin_ = end_;
      if (step_ < num_groups_) end_ = first_block_[step_ + 1];
    }
    Task task{kNoTask, 0, 0, 0, 0, 0};
    if (step_ > num_groups_) return task;
    int32_t left = ticket - g.fc1_tiles * begin_ - g.fc2_tiles * before_;
    const int32_t blocks = end_ - begin_;
    if (left < blocks * g.fc1_tiles) {
      task.phase = MOK_PHASE_FC1;
      task.block = begin_ + (step_ == 0 ? left / g.fc1_tiles : left % blocks);
      task.tile = step_ == 0 ? left % g.fc1_tiles : left / blocks;
    } else {
      left -= blocks * g.fc1_tiles;
      task.phase = MOK_PHASE_FC2;
      task.block = before_ + left % (begin_ - before_);
      task.tile = left / (begin_ - before_);
    }
    describe_block(task, p);
    return task;
  }

 private:
  const int32_t* first_block_;  // of every group
  int32_t num_groups_;
  int32_t step_ = 0;
  // Blocks before_ .. begin_ - 1 are group step_ - 1, begin_ .. end_ - 1 group step_.
  int32_t before_ = 0;
  int32_t begin_ = 0;
  int32_t end_ = 0;
};

// Phases of backward: MOK_PHASE_FC1 is FC2's dgrad, MOK_PHASE_FC2 FC1's dgrad, MOK_PHASE_WGRAD a
// tile of a weight gradient over one cut, and this one FC1 again where nothing was saved.
constexpr int32_t kPhaseRecompute = 0x10;

// The order of backward: step s has group s recomputed and through FC2's dgrad, then FC1's dgrad
// and the weight gradients of group s - 1. So every tile finds its operands done long before, and
// the weight gradients of the last group hide the combine. Tasks of the weight gradients have the
// cut in place of the block and its K steps in place of the rows.
class BackwardOrder {
 public:
  MOK_DEVICE explicit BackwardOrder(const BackwardParams& p)
      : num_groups_(p.local.state->num_groups) {
    if (num_groups_ > 0) end_ = p.local.group_first_block[1];
  }

  MOK_DEVICE Task decode(int32_t ticket, const BackwardParams& p) {
    const Geometry& g = p.geometry;
    Task task{kNoTask, 0, 0, 0, 0, 0};
    while (step_ <= num_groups_) {
      int32_t left = ticket - first_ticket_;
      const int32_t first_unsaved = max(begin_, p.saved_blocks);
      const int32_t unsaved = max(end_ - first_unsaved, 0);
      const int32_t blocks = end_ - begin_;
      const int32_t before = begin_ - before_;
      if (left < unsaved * g.fc1_tiles) {
        return block_task(kPhaseRecompute, first_unsaved + left % unsaved, left / unsaved, p);
      }
      left -= unsaved * g.fc1_tiles;
      if (left < blocks * g.fc2_dgrad_tiles) {
        // In the first group tiles are fastest, so that it can start on few rows.
        if (step_ == 0) {
          return block_task(MOK_PHASE_FC1, begin_ + left / g.fc2_dgrad_tiles,
                            left % g.fc2_dgrad_tiles, p);
        }
        return block_task(MOK_PHASE_FC1, begin_ + left % blocks, left / blocks, p);
      }
      left -= blocks * g.fc2_dgrad_tiles;
      if (left < before * g.fc2_tiles) {
        return block_task(MOK_PHASE_FC2, before_ + left % before, left / before, p);
      }
      left -= before * g.fc2_tiles;
      if (left < (cuts_end_ - cuts_begin_) * g.wgrad_tiles()) {
        task.phase = MOK_PHASE_WGRAD;
        task.block = cuts_begin_ + left / g.wgrad_tiles();
        task.tile = left % g.wgrad_tiles();
        task.group = step_ - 1;
        task.expert = p.local.cuts[task.block].expert;
        task.rows = p.local.cuts[task.block].k_steps;
        return task;
      }
      first_ticket_ = ticket - (left - (cuts_end_ - cuts_begin_) * g.wgrad_tiles());
      ++step_;
      before_ = begin_;
      begin_ = end_;
      cuts_begin_ = cuts_end_;
      if (step_ <= num_groups_) cuts_end_ = p.local.group_first_cut[step_];
      if (step_ < num_groups_) end_ = p.local.group_first_block[step_ + 1];
    }
    return task;
  }

 private:
  MOK_DEVICE static Task block_task(int32_t phase, int32_t block, int32_t tile,
                                    const BackwardParams& p) {
    Task task{phase, block, tile, 0, 0, 0};
    describe_block(task, p);
    return task;
  }

  int32_t num_groups_;
  int32_t step_ = 0;
  int32_t first_ticket_ = 0;  // of the step
  // Blocks before_ .. begin_ - 1 are group step_ - 1, begin_ .. end_ - 1 group step_.
  int32_t before_ = 0;
  int32_t begin_ = 0;
  int32_t end_ = 0;
  // Cuts of group step_ - 1.
  int32_t cuts_begin_ = 0;
  int32_t cuts_end_ = 0;
};

}  // namespace mok::sm90

#endif  // MOK_SM90_ORDER_CUH_
