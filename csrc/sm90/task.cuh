// Tasks of the persistent kernels, and how the load warp hands them on.
#ifndef MOK_SM90_TASK_CUH_
#define MOK_SM90_TASK_CUH_

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

// Every rank's entries of the row table must be here before anything reads it. False where there is
// nothing to do because the call was refused, or failed.
MOK_DEVICE bool rows_have_arrived(const CallParams& p) {
  bool ok = !aborted(p.dog, kWaitPeerRows, -1) && !p.local.state->refused;
  if (ok && p.geometry.num_ranks > 1 && threadIdx.x < p.geometry.num_ranks) {
    ok = wait_epoch(&p.peers.flags[p.geometry.rank]->rows[threadIdx.x], p.local.state->epoch, p.dog,
                    kWaitPeerRows, threadIdx.x, p.dog.inner_wait_ns);
    acquire_fence();
  }
  return __syncthreads_and(ok);
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
    const bool ok =
        math_wait_barrier(smem + SharedPlan::kTaskFull + cursor.slot * 8, cursor.parity, dog);
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
