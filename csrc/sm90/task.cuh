// Tasks of the forward kernel: which one a ticket stands for, and how the load warp hands them on.
#ifndef MOK_SM90_TASK_CUH_
#define MOK_SM90_TASK_CUH_

#include "forward.h"
#include "layout.cuh"
#include "sync.cuh"

namespace mok::sm90 {

// One output tile. Packs into 16 bytes, so that it crosses shared memory in one access.
struct Task {
  int32_t phase;   // MokPhase; kNoTask ends every role
  int32_t block;   // row block
  int32_t tile;    // column tile
  int32_t expert;  // local
  int32_t rows;    // of the block that are not padding
  int32_t group;

  MOK_DEVICE int4 pack() const {
    return make_int4(phase | rows << 8 | expert << 16, block, tile, group);
  }
  MOK_DEVICE static Task unpack(int4 v) {
    const int32_t x = warp_uniform(v.x);
    return Task{x & 0xff,         warp_uniform(v.y), warp_uniform(v.z),
                x >> 16 & 0x7fff, x >> 8 & 0xff,     warp_uniform(v.w)};
  }
};
static_assert(kBlockRows <= 0xff && MOK_MAX_EXPERTS <= 0x7fff, "fields of a packed task");
constexpr int32_t kNoTask = 0xff;

// Finds the tile that a ticket stands for. Order, that of build_segments without dispatch and
// reduction: step s has the FC1 tiles of group s, then the FC2 tiles of group s - 1. Blocks are
// fastest, so that consecutive tiles share weights; in FC1 of the first group tiles are, so that it
// can start on few rows. Tickets of one CTA only grow, so the step is found by moving forward.
class TicketDecoder {
 public:
  MOK_DEVICE TicketDecoder(const ForwardParams& p)
      : first_block_(p.local.group_first_block), num_groups_(p.local.state->num_groups) {
    if (num_groups_ > 0) end_ = first_block_[1];
  }

  // All but what describe_block adds.
  MOK_DEVICE Task decode(int32_t ticket, const Geometry& g) {
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

MOK_DEVICE void describe_block(Task& task, const ForwardParams& p) {
  const BlockInfo block = p.local.blocks[task.block];
  task.expert = block.expert;
  task.rows = block.rows;
  task.group = block.group;
}

// The load warp publishes tasks here; math and store warps read each once.
struct TaskRing {
  static constexpr uint32_t kReaders = kMathWarps + 1;

  MOK_DEVICE static void init(uint32_t smem) {
    for (int32_t i = 0; i < kTaskSlots; ++i) {
      barrier_init(smem + SharedPlan::kTaskFull + i * 8, 1);
      barrier_init(smem + SharedPlan::kTaskEmpty + i * 8, kReaders);
    }
  }

  // By one thread. `cursor` starts with parity 1: empty slots count as released.
  MOK_DEVICE static bool publish(uint32_t smem, const Task& task, RingCursor<kTaskSlots>& cursor,
                                 const Watchdog& dog) {
    if (!wait_barrier(smem + SharedPlan::kTaskEmpty + cursor.slot * 8, cursor.parity, dog,
                      kWaitTaskEmpty)) {
      return false;
    }
    store_shared_int4(smem + SharedPlan::kTasks + cursor.slot * 16, task.pack());
    barrier_arrive(smem + SharedPlan::kTaskFull + cursor.slot * 8);
    cursor.advance();
    return true;
  }

  // By a whole warp. A wait that fails reads as the end of the tasks.
  MOK_DEVICE static Task next(uint32_t smem, RingCursor<kTaskSlots>& cursor, const Watchdog& dog) {
    const bool ok = wait_barrier(smem + SharedPlan::kTaskFull + cursor.slot * 8, cursor.parity, dog,
                                 kWaitTaskFull);
    int4 packed = load_shared_int4(smem + SharedPlan::kTasks + cursor.slot * 16);
    if (!ok) packed.x = kNoTask;
    const Task task = Task::unpack(packed);
    if (threadIdx.x % 32 == 0) barrier_arrive(smem + SharedPlan::kTaskEmpty + cursor.slot * 8);
    cursor.advance();
    return task;
  }
};

}  // namespace mok::sm90

#endif  // MOK_SM90_TASK_CUH_
