// Tasks of the forward kernel: which one a ticket stands for, and how the load warp hands them on.
#ifndef MOK_SM90_TASK_CUH_
#define MOK_SM90_TASK_CUH_

#include "call.h"
#include "layout.cuh"
#include "sync.cuh"

namespace mok::sm90 {

// One output tile. 16 bytes, so that it crosses shared memory in one access.
struct Task {
  int32_t phase;   // MokPhase; kNoTask ends every role
  int32_t block;   // row block
  int32_t tile;    // column tile
  int32_t expert;  // local
  int32_t rows;    // of the block that are not padding

  MOK_DEVICE int4 pack() const { return make_int4(phase | rows << 8, block, tile, expert); }
  MOK_DEVICE static Task unpack(int4 v) {
    return Task{warp_uniform(v.x & 0xff), warp_uniform(v.y), warp_uniform(v.z), warp_uniform(v.w),
                warp_uniform(v.x >> 8)};
  }
};
constexpr int32_t kNoTask = 0xff;

// Ticket order of the forward tiles, the order of build_segments without dispatch and reduction:
// FC1(0), then for every group FC1(g + 1) before FC2(g). Blocks are fastest, so that consecutive
// tiles share weights; in FC1 of the first group tiles are, so that it can start on few rows.
// Groups before the last are full, so a ticket is decoded by division, without a table.
MOK_DEVICE Task decode_forward(int32_t ticket, int32_t num_blocks, const Geometry& g) {
  Task task{kNoTask, 0, 0, 0, 0};
  if (ticket >= num_blocks * (g.fc1_tiles + g.fc2_tiles)) return task;
  const int32_t groups = (num_blocks + g.group_blocks - 1) / g.group_blocks;
  const int32_t last_blocks = num_blocks - (groups - 1) * g.group_blocks;
  const int32_t first_blocks = groups == 1 ? last_blocks : g.group_blocks;

  task.phase = MOK_PHASE_FC1;
  if (ticket < first_blocks * g.fc1_tiles) {
    task.block = ticket / g.fc1_tiles;
    task.tile = ticket % g.fc1_tiles;
    return task;
  }
  int32_t left = ticket - first_blocks * g.fc1_tiles;
  int32_t group = 0;  // of the FC2 tiles in this step; FC1 is one ahead
  if (groups > 1) {
    const int32_t per_step = g.group_blocks * (g.fc1_tiles + g.fc2_tiles);
    group = min(left / per_step, groups - 2);
    left -= group * per_step;
    const int32_t fc1_blocks = group == groups - 2 ? last_blocks : g.group_blocks;
    if (left < fc1_blocks * g.fc1_tiles) {
      task.block = (group + 1) * g.group_blocks + left % fc1_blocks;
      task.tile = left / fc1_blocks;
      return task;
    }
    left -= fc1_blocks * g.fc1_tiles;
    if (left >= g.group_blocks * g.fc2_tiles) {
      left -= g.group_blocks * g.fc2_tiles;
      ++group;
    }
  }
  task.phase = MOK_PHASE_FC2;
  const int32_t blocks = group == groups - 1 ? last_blocks : g.group_blocks;
  task.block = group * g.group_blocks + left % blocks;
  task.tile = left / blocks;
  return task;
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
    const bool ok = wait_barrier(smem + SharedPlan::kTaskFull + cursor.slot * 8, cursor.parity,
                                 dog, kWaitTaskFull);
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
