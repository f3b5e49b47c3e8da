// Push combine: finished rows go to their slots at the ranks that own the tokens.
#ifndef MOK_SM90_PUSH_CUH_
#define MOK_SM90_PUSH_CUH_

#include "staged.cuh"
#include "task.cuh"

namespace mok::sm90 {

// Counts a tile whose rows have been pushed. Whoever completes a step, and all steps before it,
// tells all ranks.
MOK_DEVICE void report_progress(const Task& task, const CallParams& p) {
  const Geometry& g = p.geometry;
  const CallState& state = *p.local.state;
  const int32_t lane = threadIdx.x % 32;
  const int32_t last_group = state.num_groups - 1;
  int32_t step = task.group;
  while (step >= last_group && task.tile >= panel_first_tile(step - last_group + 1, g.fc2_tiles)) {
    ++step;
  }
  for (; step < last_group + num_panels(g.fc2_tiles); ++step) {
    const int32_t group = min(step, last_group);
    const int32_t panel = step - last_group;
    const int32_t tiles =
        panel < 0 ? g.fc2_tiles
                  : panel_first_tile(panel + 1, g.fc2_tiles) - panel_first_tile(panel, g.fc2_tiles);
    const int32_t blocks = p.local.group_first_block[group + 1] - p.local.group_first_block[group];
    const uint32_t target = blocks * tiles + (step > 0 ? 1 : 0);
    bool complete = false;
    if (lane == 0) {
      complete = release_add_fetch(p.local.step_done + step, 1) + 1 == target;
      if (complete) acquire_fence_gpu();
    }
    if (!__shfl_sync(~0u, complete, 0)) return;
    for (int32_t r = lane; r < g.num_ranks; r += 32) {
      release_store(p.peers.progress[r] + g.rank, progress_word(state.epoch, step + 1));
    }
    __syncwarp();
  }
}

// Pushes rows to their slots at their owners, each with one store of the warp. A bulk copy for each
// row would be slower: they queue with the operand loads of the next tile. Followed by
// report_progress.
MOK_DEVICE bool push_rows(const Task& task, const CallParams& p, const StagedTile& staged) {
  const Geometry& g = p.geometry;
  const int32_t lane = threadIdx.x % 32;
  const int64_t row_bytes = int64_t{g.hidden} * 2;
  const int32_t bytes = min(kTileN, g.hidden - task.tile * kTileN) * 2;
  constexpr int32_t kQuarters = kTileM / 32;
  uint64_t slot[kQuarters];  // of rows lane, lane + 32, ...
#pragma unroll
  for (int32_t i = 0; i < kQuarters; ++i) {
    const int32_t r = i * 32 + lane;
    if (r >= task.rows) continue;
    const MokRow row = p.peers.rows[g.rank][int64_t{task.block} * kBlockRows + r];
    slot[i] = reinterpret_cast<uint64_t>(
        p.peers.slots[row.rank] + (int64_t{row.token} * g.topk + route_slot(row)) * row_bytes +
        task.tile * kTileN * 2);
  }
  const bool ok = staged.drain(p.dog, [&](int32_t h, uint32_t data) {
#pragma unroll 1
    for (int32_t i = 0; i < kWarpgroupRows / 32; ++i) {
      const int32_t rows = min(32, task.rows - h * kWarpgroupRows - i * 32);
      const uint32_t source = data + i * 32 * kStagingPitch + lane * 16;
      constexpr int32_t kBatch = 8;
#pragma unroll 1
      for (int32_t r = 0; r < rows; r += kBatch) {
        uint4 v[kBatch];
#pragma unroll
        for (int32_t j = 0; j < kBatch; ++j) {
          v[j] = load_shared_uint4(source + (r + j) * kStagingPitch);
        }
#pragma unroll
        for (int32_t j = 0; j < kBatch; ++j) {
          const uint64_t to = __shfl_sync(~0u, slot[0], r + j) + lane * 16;
          if (r + j < rows && lane * 16 < bytes) *reinterpret_cast<uint4*>(to) = v[j];
        }
      }
#pragma unroll
      for (int32_t q = 0; q + 1 < kQuarters; ++q) slot[q] = slot[q + 1];  // without unrolling i
    }
  });
  fence_proxy_global();
  __syncwarp();
  return ok;
}

}  // namespace mok::sm90

#endif  // MOK_SM90_PUSH_CUH_
