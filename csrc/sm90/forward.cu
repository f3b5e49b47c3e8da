// The forward kernel: pull dispatch, FC1 with SwiGLU, FC2 with push, and the ordered reduction, in one
// persistent launch. Warps have fixed roles; tasks are claimed in order, so a CTA that has not
// started holds no work and every wait is for work that some running CTA holds.
#include "forward.h"

#include "epilogue.cuh"
#include "gemm_mainloop.cuh"
#include "mover.cuh"
#include "reduce.cuh"
#include "task.cuh"

namespace mok::sm90 {
namespace {

MOK_DEVICE int32_t k_steps(int32_t phase, const Geometry& g) {
  return (phase == MOK_PHASE_FC1 ? g.hidden : g.ffn) / kTileK;
}

// ---- Load warp ---------------------------------------------------------------------------------

// The flag that a task's left operand waits for.
struct Readiness {
  const uint32_t* counter;
  uint32_t target;
};

MOK_DEVICE Readiness task_readiness(const Task& task, const ForwardParams& p) {
  if (task.phase == MOK_PHASE_FC1) return {p.local.rows_ready + task.block, kPieces};
  return {p.local.activations_ready + task.block, static_cast<uint32_t>(p.geometry.fc1_tiles)};
}

// A task looked up ahead of its turn, so that neither the ticket nor the flag costs time later.
struct NextTask {
  Task task;
  bool ready;

  MOK_DEVICE NextTask(uint32_t ticket, int32_t num_blocks, const ForwardParams& p)
      : task(decode_forward(static_cast<int32_t>(ticket), num_blocks, p.geometry)), ready(false) {
    if (task.phase == kNoTask) return;
    const BlockInfo block = p.local.blocks[task.block];
    task.expert = block.expert;
    task.rows = block.rows;
    const Readiness flag = task_readiness(task, p);
    ready = load_relaxed(flag.counter) >= flag.target;
    if (ready) acquire_for_copies();
  }
};

MOK_DEVICE void load_role(const ForwardParams& p, const CUtensorMap* row_map,
                          const CUtensorMap* activation_map, uint32_t smem) {
  const Geometry& g = p.geometry;
  uint32_t* tickets = &p.local.state->counters.task_ticket;
  const int32_t num_blocks = p.local.state->num_blocks;
  StageCursor stage(1);
  RingCursor<kTaskSlots> slot(1);
  NextTask next(atomicAdd(tickets, 1u), num_blocks, p);
  while (true) {
    const Task task = next.task;
    if (!TaskRing::publish(smem, task, slot, p.dog) || task.phase == kNoTask) return;
    if (!next.ready) {
      const Readiness flag = task_readiness(task, p);
      if (!wait_counter(flag.counter, flag.target, p.dog,
                        task.phase == MOK_PHASE_FC1 ? kWaitRows : kWaitActivations, task.block)) {
        return;
      }
      acquire_for_copies();
    }
    const uint32_t ticket = atomicAdd(tickets, 1u);
    const bool fc1 = task.phase == MOK_PHASE_FC1;
    const CUtensorMap* map_a = fc1 ? row_map : activation_map;
    const CUtensorMap* map_b = (fc1 ? p.fc1_maps : p.fc2_maps) + task.expert;
    const int32_t row = task.block % g.ring_blocks * kTileM;
    const int32_t steps = k_steps(task.phase, g);
    for (int32_t k = 0; k < steps; ++k) {
      if (!wait_barrier(StageRing::empty(smem, stage.slot), stage.parity, p.dog, kWaitStageEmpty)) {
        return;
      }
      const uint32_t full = StageRing::full(smem, stage.slot);
      barrier_expect(full, kStageBytes);
      load_tensor_2d(StageRing::operand_a(smem, stage.slot), map_a, full, k * kTileK, row);
      if (fc1) {
        load_tensor_3d(StageRing::operand_b(smem, stage.slot), map_b, full, k * kTileK,
                       task.tile * kTileF, 0);
      } else {
        load_tensor_2d(StageRing::operand_b(smem, stage.slot), map_b, full, k * kTileK,
                       task.tile * kTileN);
      }
      stage.advance();
      if (k == min(kStages, steps) - 1) next = NextTask(ticket, num_blocks, p);
    }
  }
}

// Weight maps are in global memory, where the host may have replaced them since the last call.
MOK_DEVICE void acquire_tensor_maps(const CUtensorMap* maps, int32_t count) {
  for (int32_t i = threadIdx.x % 32; i < count; i += 32) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(maps + i)
                 : "memory");
  }
}

// ---- Math warpgroups ---------------------------------------------------------------------------

MOK_DEVICE void math_role(const ForwardParams& p, uint32_t smem, int32_t warpgroup) {
  const Geometry& g = p.geometry;
  const MokRow* rows = p.peers.rows[g.rank];
  const StagingHalf half(smem, warpgroup);
  StageCursor stage(0);
  RingCursor<kTaskSlots> slot(0);
  RingCursor<1> staging(1);
  float acc[128];
#pragma unroll
  for (int32_t i = 0; i < 128; ++i) acc[i] = 0.0f;
  while (true) {
    const Task task = TaskRing::next(smem, slot, p.dog);
    if (task.phase == kNoTask) return;
    const bool fc1 = task.phase == MOK_PHASE_FC1;
    float prob[2] = {0.0f, 0.0f};
    if (fc1) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const int32_t row = threadIdx.x / 32 * 16 + h * 8 + threadIdx.x % 32 / 4;
        if (row < task.rows) prob[h] = rows[int64_t{task.block} * kBlockRows + row].prob;
      }
    }
    const bool has_rows = warpgroup * kWarpgroupRows < task.rows;
    multiply_tile(acc, k_steps(task.phase, g), has_rows, smem, warpgroup, stage, p.dog);
    if (!has_rows) continue;
    const PlainPairs plain{acc};
    if (!fc1 || task.block < p.saved_blocks) stage_tile<kTileN>(half, staging, p.dog, plain);
    if (fc1) stage_tile<kTileF>(half, staging, p.dog, SwiGluPairs{acc, {prob[0], prob[1]}});
  }
}

// ---- Store warp --------------------------------------------------------------------------------

// Copies staged rows out, half by half as they are staged, and gives the staging tile back.
struct StagedRows {
  uint32_t smem;
  int32_t halves;         // that hold real rows
  uint32_t& full_parity;  // bit h: of half h's full barrier

  // copy(row, shared address of the row), by one lane for each row.
  template <typename Copy>
  MOK_DEVICE bool drain(const Watchdog& dog, Copy copy) const {
    const int32_t lane = threadIdx.x % 32;
    for (int32_t h = 0; h < halves; ++h) {
      const StagingHalf half(smem, h);
      if (!wait_barrier(half.full, full_parity >> h & 1, dog, kWaitStagingFull)) return false;
      full_parity ^= 1u << h;
#pragma unroll
      for (int32_t i = 0; i < kWarpgroupRows; i += 32) {
        copy(h * kWarpgroupRows + i + lane, half.rows + (i + lane) * kStagingPitch);
      }
    }
    commit_bulk_group();
    wait_bulk_read();
    __syncwarp();
    if (lane < halves) barrier_arrive(StagingHalf(smem, lane).free);
    return true;
  }
};

MOK_DEVICE bool store_fc1(const Task& task, const ForwardParams& p, const StagedRows& staged) {
  const Geometry& g = p.geometry;
  const int32_t first_column = task.tile * kTileF;
  const int32_t bytes = min(kTileF, g.ffn - first_column) * 2;
  const int64_t row_bytes = int64_t{g.ffn} * 2;
  if (task.block < p.saved_blocks) {
    uint8_t* gate = p.preact + int64_t{task.block} * kBlockRows * 2 * row_bytes + first_column * 2;
    if (!staged.drain(p.dog, [&](int32_t row, uint32_t source) {
          uint8_t* destination = gate + row * 2 * row_bytes;
          store_bulk(destination, source, bytes);
          store_bulk(destination + row_bytes, source + kTileF * 2, bytes);
        })) {
      return false;
    }
  }
  const int32_t group = task.block / g.group_blocks;
  const int32_t ring_groups = g.ring_blocks / g.group_blocks;
  if (group >= ring_groups) {  // FC2 has read what was here before
    if (!wait_progress(p.peers.progress[g.rank] + g.rank, p.local.state->epoch,
                       group - ring_groups + 1, p.dog, kWaitActivationRing, task.block)) {
      return false;
    }
    acquire_for_copies();
  }
  uint8_t* activations = p.activation_ring +
                         int64_t{task.block % g.ring_blocks} * kBlockRows * row_bytes +
                         first_column * 2;
  if (!staged.drain(p.dog, [&](int32_t row, uint32_t source) {
        store_bulk(activations + row * row_bytes, source, bytes);
      })) {
    return false;
  }
  finish_bulk_stores();
  __syncwarp();
  if (threadIdx.x % 32 == 0) release_add(p.local.activations_ready + task.block, 1);
  return true;
}

// Counts a stored FC2 tile. Whoever completes a group, and all groups before it, tells all ranks.
MOK_DEVICE void report_progress(const Task& task, const ForwardParams& p) {
  const Geometry& g = p.geometry;
  const CallState& state = *p.local.state;
  const int32_t lane = threadIdx.x % 32;
  for (int32_t group = task.block / g.group_blocks; group < state.num_groups; ++group) {
    const int32_t blocks = min(g.group_blocks, state.num_blocks - group * g.group_blocks);
    const uint32_t target = blocks * g.fc2_tiles + (group > 0 ? 1 : 0);
    bool complete = false;
    if (lane == 0) {
      complete = acquire_release_add(p.local.group_done + group, 1) + 1 == target;
    }
    if (!__shfl_sync(~0u, complete, 0)) return;
    for (int32_t r = lane; r < g.num_ranks; r += 32) {
      release_store(p.peers.progress[r] + g.rank, progress_word(state.epoch, group + 1));
    }
    __syncwarp();
  }
}

MOK_DEVICE bool store_fc2(const Task& task, const ForwardParams& p, const StagedRows& staged) {
  const Geometry& g = p.geometry;
  const int32_t lane = threadIdx.x % 32;
  const int64_t row_bytes = int64_t{g.hidden} * 2;
  const int32_t bytes = min(kTileN, g.hidden - task.tile * kTileN) * 2;
  uint8_t* destination[kTileM / 32];
#pragma unroll
  for (int32_t i = 0; i < kTileM / 32; ++i) {
    const int32_t r = i * 32 + lane;
    if (r >= task.rows) continue;
    const MokRow row = p.peers.rows[g.rank][int64_t{task.block} * kBlockRows + r];
    destination[i] = p.peers.slots[row.rank] + (int64_t{row.token} * g.topk + row.k) * row_bytes +
                     task.tile * kTileN * 2;
  }
  if (!staged.drain(p.dog, [&](int32_t row, uint32_t source) {
        uint8_t* to = nullptr;
#pragma unroll
        for (int32_t i = 0; i < kTileM / 32; ++i) {
          if (row / 32 == i) to = destination[i];
        }
        if (row < task.rows) store_bulk(to, source, bytes);
      })) {
    return false;
  }
  finish_bulk_stores();
  __syncwarp();
  report_progress(task, p);
  return true;
}

MOK_DEVICE void store_role(const ForwardParams& p, uint32_t smem) {
  RingCursor<kTaskSlots> slot(0);
  uint32_t full_parity = 0;
  while (true) {
    const Task task = TaskRing::next(smem, slot, p.dog);
    if (task.phase == kNoTask) return;
    const StagedRows staged{smem, task.rows > kWarpgroupRows ? 2 : 1, full_parity};
    const bool ok = task.phase == MOK_PHASE_FC1 ? store_fc1(task, p, staged)
                                                : store_fc2(task, p, staged);
    if (!ok) return;
  }
}

// ---- Kernel ------------------------------------------------------------------------------------

// Every rank's entries of the row table must be here before anything reads it.
MOK_DEVICE bool rows_have_arrived(const ForwardParams& p) {
  bool ok = load_relaxed(p.dog.abort) == 0;
  if (ok && p.geometry.num_ranks > 1 && threadIdx.x < p.geometry.num_ranks) {
    ok = wait_epoch(&p.peers.flags[p.geometry.rank]->rows[threadIdx.x], p.local.state->epoch, p.dog,
                    kWaitPeerRows, threadIdx.x, p.dog.inner_wait_ns);
    acquire_fence();
  }
  return __syncthreads_and(ok);
}

__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p,
                   const __grid_constant__ CUtensorMap row_map,
                   const __grid_constant__ CUtensorMap activation_map) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const int32_t warp = warp_uniform(threadIdx.x / 32);
  const int32_t warpgroup = warp / 4;
  if (threadIdx.x == 0) {
    StageRing::init(smem);
    TaskRing::init(smem);
    StagingHalf::init(smem);
    MoverChunks::init(smem);
    fence_barrier_init();
    fence_proxy_shared();
  }
  if (!rows_have_arrived(p)) return;

  if (warpgroup < kMathWarpgroups) {
    grow_registers<kMathRegisters>();
    math_role(p, smem, warpgroup);
    reduce_tokens<8>(p);
  } else {
    shrink_registers<kFeedRegisters>();
    if (warp == kLoadWarp) {
      acquire_tensor_maps(p.fc1_maps, p.geometry.local_experts);
      acquire_tensor_maps(p.fc2_maps, p.geometry.local_experts);
      __syncwarp();
      if (threadIdx.x % 32 == 0) load_role(p, &row_map, &activation_map, smem);
      __syncwarp();
    } else if (warp == kStoreWarp) {
      store_role(p, smem);
    } else if (dispatch_rows(p, smem, warp - kFirstMover)) {
      reduce_tokens<4>(p);
    }
    wait_bulk_done();
  }
  if (load_relaxed(p.dog.abort) != 0) drain_after_abort();
}

}  // namespace

cudaError_t launch_forward(const ForwardParams& params, const CUtensorMap& row_map,
                           const CUtensorMap& activation_map, int32_t ctas, cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(
      forward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedPlan::kBytes);
  if (error != cudaSuccess) return error;
  forward_kernel<<<ctas, kThreads, SharedPlan::kBytes, stream>>>(params, row_map, activation_map);
  return cudaGetLastError();
}

}  // namespace mok::sm90
