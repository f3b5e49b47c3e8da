// The forward kernel: pull dispatch, FC1 with SwiGLU, FC2 with push, and the ordered reduction, in
// one persistent launch. Warps have fixed roles; tasks are claimed in order, so a CTA that has not
// started holds no work and every wait is for work that some running CTA holds.
#include "epilogue.cuh"
#include "forward.h"
#include "gemm_mainloop.cuh"
#include "mover.cuh"
#include "order.cuh"
#include "persistent.cuh"
#include "push.cuh"
#include "reduce.cuh"
#include "staged.cuh"
#include "task.cuh"

namespace mok::sm90 {
namespace {

MOK_DEVICE int32_t k_steps(int32_t phase, const Geometry& g) {
  return (phase == MOK_PHASE_FC1 ? g.hidden : g.ffn) / kTileK;
}

// ---- Load warp ---------------------------------------------------------------------------------

MOK_DEVICE Readiness task_readiness(const Task& task, const ForwardParams& p) {
  if (task.phase == MOK_PHASE_FC1) return {p.local.rows_ready + task.block, kPieces};
  return {p.local.activations_ready + task.block, static_cast<uint32_t>(p.geometry.fc1_tiles)};
}

// Both operands of a task, K step by K step.
class OperandLoads {
 public:
  OperandLoads() = default;
  MOK_DEVICE OperandLoads(const Task& task, const ForwardParams& p, const ForwardMaps& maps)
      : fc1_(task.phase == MOK_PHASE_FC1), tile_(task.tile) {
    const Geometry& g = p.geometry;
    // A block of few rows leaves the second warpgroup idle; its rows need not be loaded.
    const bool half = task.rows <= kWarpgroupRows;
    bytes_ = half ? kStageBytes - kOperandABytes / 2 : kStageBytes;
    if (fc1_) {
      a_ = half ? &maps.half_rows : &maps.rows;
      b_ = p.fc1_maps + task.expert;
      row_ = task.block % g.row_ring_blocks * kTileM;
    } else {
      a_ = half ? &maps.half_activations : &maps.activations;
      b_ = p.fc2_maps + task.expert;
      row_ = task.block % g.activation_ring_blocks * kTileM;
    }
  }

  MOK_DEVICE void load(int32_t k, uint32_t smem, uint32_t stage) const {
    const uint32_t full = StageRing::full(smem, stage);
    const uint32_t b = StageRing::operand_b(smem, stage);
    barrier_expect(full, bytes_);
    load_tensor_2d(StageRing::operand_a(smem, stage), a_, full, k * kTileK, row_,
                   CachePolicy::kEvictLast);
    if (fc1_) {
      load_tensor_3d(b, b_, full, k * kTileK, tile_ * kTileF, 0, CachePolicy::kNormal);
    } else {
      load_tensor_2d(b, b_, full, k * kTileK, tile_ * kTileN, CachePolicy::kNormal);
    }
  }

 private:
  bool fc1_;
  int32_t tile_;
  uint32_t bytes_;
  const CUtensorMap* a_;
  const CUtensorMap* b_;
  int32_t row_;
};

MOK_DEVICE void load_role(const ForwardParams& p, const ForwardMaps& maps, uint32_t smem) {
  StageCursor stage(1);
  RingCursor<kTaskSlots> slot(1);
  ForwardOrder order(p);
  OperandLoads loads;
  int32_t steps = 0;  // of the task; at first there is none
  while (true) {
    const uint32_t ticket = atomicAdd(&p.local.state->counters.task_ticket, 1u);
    NextTask next;
    for (int32_t k = 0; k < max(steps, 1); ++k) {
      if (k < steps) {
        if (!StageRing::wait_empty(smem, stage, p.dog)) return;
        loads.load(k, smem, stage.slot);
        stage.advance();
      }
      if (k == look_ahead_step(steps)) next = NextTask(ticket, order, p, task_readiness);
    }
    const Task task = next.task;
    if (!TaskRing::publish(smem, task, slot, p.dog) || task.phase == kNoTask) return;
    if (!next.ready) {
      const Readiness flag = task_readiness(task, p);
      const WaitSite site = task.phase == MOK_PHASE_FC1 ? kWaitRows : kWaitActivations;
      if (!wait_loadable(flag.counter, flag.target, p.dog, site, task.block)) return;
    }
    loads = OperandLoads(task, p, maps);
    steps = k_steps(task.phase, p.geometry);
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
  while (true) {
    const Task task = TaskRing::next(smem, slot, p.dog);
    if (task.phase == kNoTask) return;
    const bool fc1 = task.phase == MOK_PHASE_FC1;
    float prob[2] = {0.0f, 0.0f};
    if (fc1) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const int32_t row = accumulator_row(h);
        if (row < task.rows) prob[h] = rows[int64_t{task.block} * kBlockRows + row].prob;
      }
    }
    const bool has_rows = warpgroup * kWarpgroupRows < task.rows;
    multiply_tile<Major::kK, Major::kK>(acc, k_steps(task.phase, g), has_rows, smem, warpgroup,
                                        stage, p.dog);
    if (!has_rows) continue;
    const PlainPairs plain{acc};
    if (!fc1) {
      stage_tile<LinearRows, kTileN>(half, staging, p.dog, plain);
      continue;
    }
    if (task.block < p.saved_blocks) {
      stage_tile<SwizzledBoxes, kTileN>(half, staging, p.dog, plain);
    }
    // Computed before the wait inside stage_tile, to overlap with the store of pre-activations.
    const SwiGluPairs activations(acc, prob);
    stage_tile<SwizzledBoxes, kTileF>(half, staging, p.dog, activations);
  }
}

// ---- Store warp --------------------------------------------------------------------------------

MOK_DEVICE bool store_fc1(const Task& task, const ForwardParams& p, const ForwardMaps& maps,
                          const StagedTile& staged) {
  const Geometry& g = p.geometry;
  const int32_t column = task.tile * kTileF;
  const int32_t boxes = min(kTileF, g.ffn - column) / kBoxColumns;
  if (task.block < p.saved_blocks) {
    const bool ok = staged.drain(p.dog, [&](int32_t h, uint32_t data) {
      const int32_t row = task.block * kTileM + h * kWarpgroupRows;
      store_gate_and_up(&maps.half_preact, data, boxes, column, g.ffn, row);
    });
    if (!ok) return false;
  }
  if (task.block >= g.activation_ring_blocks) {  // FC2 has read what was here before
    const int32_t last = p.local.blocks[task.block - g.activation_ring_blocks].group;
    if (!wait_progress(p.peers.progress[g.rank] + g.rank, p.local.state->epoch, last + 1, p.dog,
                       kWaitActivationRing, task.block)) {
      return false;
    }
    acquire_for_copies();
  }
  const bool ok = staged.drain(p.dog, [&](int32_t h, uint32_t data) {
    store_boxes(&maps.half_activations, data, boxes, column,
                task.block % g.activation_ring_blocks * kTileM + h * kWarpgroupRows);
  });
  if (!ok) return false;
  finish_bulk_stores();
  __syncwarp();
  if (threadIdx.x % 32 == 0) release_add(p.local.activations_ready + task.block, 1);
  return true;
}

MOK_DEVICE void store_role(const ForwardParams& p, const ForwardMaps& maps, uint32_t smem) {
  RingCursor<kTaskSlots> slot(0);
  uint32_t full_parity = 0;
  while (true) {
    const Task task = TaskRing::next(smem, slot, p.dog);
    if (task.phase == kNoTask) return;
    const StagedTile staged{smem, task.rows > kWarpgroupRows ? 2 : 1, full_parity};
    if (task.phase == MOK_PHASE_FC1) {
      if (!store_fc1(task, p, maps, staged)) return;
    } else {
      if (!push_rows(task, p, staged)) return;
      report_progress(task, p);
    }
  }
}

// ---- Kernel ------------------------------------------------------------------------------------

// Whether FC1 has read the rows that lay in the block's ring slot before.
MOK_DEVICE bool row_slot_free(int32_t block, const ForwardParams& p) {
  const int32_t before = block - p.geometry.row_ring_blocks;
  return before < 0 || load_relaxed(p.local.activations_ready + before) >= p.geometry.fc1_tiles;
}

__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p,
                   const __grid_constant__ ForwardMaps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const int32_t warp = warp_uniform(threadIdx.x / 32);
  const int32_t warpgroup = warp / 4;
  if (!begin_kernel(p, smem)) return;

  if (warpgroup < kMathWarpgroups) {
    grow_registers<kMathRegisters>();
    math_role(p, smem, warpgroup);
    reduce_tokens(p);
  } else {
    shrink_registers<kFeedRegisters>();
    if (warp == kLoadWarp) {
      acquire_tensor_maps(p.fc1_maps, p.geometry.local_experts);
      acquire_tensor_maps(p.fc2_maps, p.geometry.local_experts);
      __syncwarp();
      if (threadIdx.x % 32 == 0) load_role(p, maps, smem);
      __syncwarp();
    } else if (warp == kStoreWarp) {
      store_role(p, maps, smem);
    } else {
      const PulledMatrix hidden[1] = {{p.peers.hidden, p.row_ring}};
      mover_role(p, p.geometry.row_ring_blocks, hidden,
                 [&](int32_t block) { return row_slot_free(block, p); });
    }
    wait_bulk_done();
  }
  end_kernel(p);
}

}  // namespace

cudaError_t load_forward_kernel() { return load_persistent(forward_kernel); }

cudaError_t launch_forward(const ForwardParams& params, const ForwardMaps& maps, int32_t ctas,
                           cudaStream_t stream) {
  return launch_persistent(forward_kernel, params, maps, ctas, stream);
}

}  // namespace mok::sm90
