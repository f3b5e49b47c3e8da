// The backward kernel: pull of dY and X, FC2's dgrad with the backward of SwiGLU, FC1's dgrad with
// push, both weight gradients, and the ordered reduction of dX, in one persistent launch. Roles and
// hand-overs are those of the forward kernel.
#include "backward.h"
#include "backward_task.cuh"
#include "gemm_mainloop.cuh"
#include "mover.cuh"
#include "order.cuh"
#include "persistent.cuh"
#include "push.cuh"
#include "reduce.cuh"
#include "staged.cuh"
#include "swiglu_grad.cuh"
#include "task.cuh"
#include "wgrad_epilogue.cuh"

namespace mok::sm90 {
namespace {

// ---- Load warp ---------------------------------------------------------------------------------

// Both operands of a task, K step by K step.
class OperandLoads {
 public:
  OperandLoads() = default;
  MOK_DEVICE OperandLoads(const Task& task, const BackwardParams& p, const BackwardMaps& maps)
      : phase_(task.phase), policy_(CachePolicy::kEvictLast) {
    constexpr int32_t kBlocksM = kTileM / kBoxColumns, kBlocksN = kTileN / kBoxColumns;
    block_ = task.block;
    switch (phase_) {
      case kPhaseRecompute:
        a_ = &maps.hidden_rows;
        b_ = p.fc1_maps + task.expert;
        column_b_ = task.tile * kTileF;
        break;
      case MOK_PHASE_FC1:
        a_ = &maps.grad_output_rows;
        b_ = p.fc2_dgrad_maps + task.expert;
        column_b_ = task.tile * kBlocksN;
        break;
      case MOK_PHASE_FC2:
        a_ = &maps.grad_preact_rows;
        b_ = p.fc1_dgrad_maps + task.expert;
        column_b_ = task.tile * kBlocksN;
        break;
      default: {
        const WgradTile tile(task, p);
        a_ = tile.fc1 ? &maps.grad_preact_columns : &maps.grad_output_columns;
        b_ = tile.fc1 ? &maps.hidden_columns : &maps.activation_columns;
        column_a_ = tile.row * kBlocksM;
        column_b_ = tile.column * kBlocksN;
        block_ = p.local.cuts[task.block].first_block;
        policy_ = CachePolicy::kNormal;
      }
    }
  }

  MOK_DEVICE void load(int32_t k, uint32_t smem, uint32_t stage, const Geometry& g) const {
    const uint32_t full = StageRing::full(smem, stage);
    barrier_expect(full, kStageBytes);
    // The step is 64 columns of the left rows or, in a weight gradient, 64 rows of both rings.
    const bool wgrad = phase_ == MOK_PHASE_WGRAD;
    constexpr int32_t kStepsPerBlock = kTileM / kTileK;
    const int32_t row = wgrad
                            ? ring_row(block_ + k / kStepsPerBlock, g) + k % kStepsPerBlock * kTileK
                            : ring_row(block_, g);
    load_tensor_3d(StageRing::operand_a(smem, stage), a_, full, 0, row, wgrad ? column_a_ : k,
                   policy_);
    // K is along the rows of the weight in a recomputed FC1, and the row elsewhere.
    const bool recompute = phase_ == kPhaseRecompute;
    load_tensor_3d(StageRing::operand_b(smem, stage), b_, full, recompute ? k * kTileK : 0,
                   recompute ? column_b_
                   : wgrad   ? row
                             : k * kTileK,
                   recompute ? 0 : column_b_, CachePolicy::kNormal);
  }

 private:
  int32_t phase_;
  CachePolicy policy_;
  const CUtensorMap* a_;
  const CUtensorMap* b_;
  int32_t block_;         // the first one
  int32_t column_a_ = 0;  // in column blocks
  int32_t column_b_;
};

// Pre-activations of the tile, a chunk of columns to a stage.
MOK_DEVICE bool load_chunks(const Task& task, const BackwardParams& p, const BackwardMaps& maps,
                            uint32_t smem, StageCursor& stage) {
  const Geometry& g = p.geometry;
  const bool saved = task.block < p.saved_blocks;
  if (!saved && !wait_loadable(p.local.activations_ready + task.block, g.fc1_tiles, p.dog,
                               kWaitActivations, task.block)) {
    return false;
  }
  const CUtensorMap* map = saved ? &maps.saved_preact : &maps.preact;
  const int32_t row = saved ? task.block * kTileM : ring_row(task.block, g);
  const int32_t halves = task.rows > kWarpgroupRows ? 2 : 1;
  for (int32_t c = 0; c < num_chunks(task, g); ++c) {
    if (!StageRing::wait_empty(smem, stage, p.dog)) return false;
    const uint32_t full = StageRing::full(smem, stage.slot);
    const int32_t column = task.tile * kTileN + c * kBoxColumns;
    barrier_expect(full, halves * 2 * kBoxBytes);
    for (int32_t h = 0; h < halves; ++h) {
      const uint32_t half = chunk_half(StageRing::operand_a(smem, stage.slot), h);
      load_tensor_2d(half + kGateBox * kBoxBytes, map, full, column, row + h * kWarpgroupRows,
                     CachePolicy::kEvictFirst);
      load_tensor_2d(half + kUpBox * kBoxBytes, map, full, g.ffn + column, row + h * kWarpgroupRows,
                     CachePolicy::kEvictFirst);
    }
    stage.advance();
  }
  return true;
}

MOK_DEVICE void load_role(const BackwardParams& p, const BackwardMaps& maps, uint32_t smem) {
  StageCursor stage(1);
  RingCursor<kTaskSlots> slot(1);
  BackwardOrder order(p);
  OperandLoads loads;
  Task task{kNoTask};
  int32_t steps = 0;
  while (true) {
    const uint32_t ticket = atomicAdd(&p.local.state->counters.task_ticket, 1u);
    NextTask next;
    for (int32_t k = 0; k < max(steps, 1); ++k) {
      if (k < steps) {
        if (!StageRing::wait_empty(smem, stage, p.dog)) return;
        loads.load(k, smem, stage.slot, p.geometry);
        stage.advance();
      }
      if (k == look_ahead_step(steps)) next = NextTask(ticket, order, p, task_readiness);
    }
    if (task.phase == MOK_PHASE_FC1 && !load_chunks(task, p, maps, smem, stage)) return;
    task = next.task;
    if (!TaskRing::publish(smem, task, slot, p.dog) || task.phase == kNoTask) return;
    if (!next.ready) {
      const Readiness flag = task_readiness(task, p);
      const bool rows = task.phase == kPhaseRecompute || task.phase == MOK_PHASE_FC1;
      const WaitSite site = rows ? kWaitRows : kWaitGrads;
      if (!wait_loadable(flag.counter, flag.target, p.dog, site, task.block)) return;
    }
    loads = OperandLoads(task, p, maps);
    steps = k_steps(task, p);
  }
}

// ---- Math warpgroups ---------------------------------------------------------------------------

// The math side of one warpgroup.
class MathRole {
 public:
  MOK_DEVICE MathRole(const BackwardParams& p, uint32_t smem, int32_t warpgroup)
      : p_(p), smem_(smem), warpgroup_(warpgroup) {}

  MOK_DEVICE void run() {
    RingCursor<kTaskSlots> slot(0);
    float acc[128];
    while (true) {
      const Task task = TaskRing::next(smem_, slot, p_.dog);
      const bool has_rows = warpgroup_ * kWarpgroupRows < task.rows;
      switch (task.phase) {
        case kNoTask:
          return;
        case kPhaseRecompute:
          multiply_tile<Major::kK, Major::kK>(acc, k_steps(task, p_), has_rows, smem_, warpgroup_,
                                              stage_, p_.dog);
          if (has_rows) stage_accumulators<SwizzledBoxes>(acc);
          break;
        case MOK_PHASE_WGRAD:
          wgrad(acc, task);
          break;
        default:
          multiply_tile<Major::kK, Major::kMN>(acc, k_steps(task, p_), has_rows, smem_, warpgroup_,
                                               stage_, p_.dog);
          if (task.phase == MOK_PHASE_FC1) {
            swiglu_grad(acc, task, has_rows);
          } else if (has_rows) {
            stage_accumulators<LinearRows>(acc);
          }
      }
    }
  }

 private:
  MOK_DEVICE StagingHalf half() const { return StagingHalf(smem_, warpgroup_); }

  template <typename Layout>
  MOK_DEVICE void stage_accumulators(const float (&acc)[128]) {
    if (slices_pending_) {  // copies out of the staging tile by this warpgroup
      wait_bulk_read();
      sync_threads(1 + warpgroup_, 32 * kMathWarps / kMathWarpgroups);
      slices_pending_ = false;
    }
    stage_tile<Layout, kTileN>(half(), staging_, p_.dog, PlainPairs{acc});
  }

  MOK_DEVICE GradRows grad_rows(const Task& task) const {
    const MokRow* table = p_.peers.rows[p_.geometry.rank] + int64_t{task.block} * kBlockRows;
    GradRows rows;
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = accumulator_row(h);
      rows.prob[h] = row < task.rows ? table[row].prob : 0.0f;
    }
    return rows;
  }

  MOK_DEVICE void swiglu_grad(float (&acc)[128], const Task& task, bool has_rows) {
    GradRows rows = grad_rows(task);
    const int32_t chunks = num_chunks(task, p_.geometry);
#pragma unroll 1
    for (int32_t c = 0; c < chunks; ++c) {
      math_wait_barrier(StageRing::full(smem_, stage_.slot), stage_.parity, p_.dog);
      if (has_rows) {
        move_chunk_to_front(acc, c);
        swiglu_grad_chunk(acc, rows,
                          chunk_half(StageRing::operand_a(smem_, stage_.slot), warpgroup_));
        if (c == chunks - 1) write_prob_parts(task, rows);
        fence_proxy_shared();
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(StageRing::chunk_done(smem_, stage_.slot));
      stage_.advance();
    }
  }

  // This tile's part of the gradients of the rows' probs.
  MOK_DEVICE void write_prob_parts(const Task& task, const GradRows& rows) const {
    const Geometry& g = p_.geometry;
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      float sum = rows.grad_prob[h];
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
      const int32_t row = accumulator_row(h);
      if (threadIdx.x % 4 == 0) {
        const int64_t at = int64_t{ring_row(task.block, g)} + row;
        p_.rings.prob_parts[at * g.fc2_dgrad_tiles + task.tile] = sum;
      }
    }
  }

  MOK_DEVICE void wgrad(float (&acc)[128], const Task& task) {
    const WgradTile tile(task, p_);
    const CutInfo cut = p_.local.cuts[task.block];
    if (tile.wanted) {
      multiply_tile<Major::kMN, Major::kMN>(acc, task.rows, true, smem_, warpgroup_, stage_,
                                            p_.dog);
    }
    // Every load of the task has landed: both warpgroups have the same stages.
    if (threadIdx.x == 0) release_add(p_.local.group_released + task.group, 1);
    if (cut.index > 0) {
      const uint32_t before = cut.index * p_.geometry.wgrad_tiles() * kMathWarps;
      const uint32_t* added = p_.local.cuts_added + task.expert;
      math_wait_until([=] { return load_relaxed(added) >= before; }, p_.dog);
      acquire_for_copies();
    }
    if (tile.wanted) write_grad(acc, task, tile, p_.accumulate || cut.index > 0);
    if (cut.more != 0) {
      finish_bulk_stores();
      __syncwarp();
      if (threadIdx.x % 32 == 0) release_add(p_.local.cuts_added + task.expert, 1);
    }
  }

  MOK_DEVICE void write_grad(const float (&acc)[128], const Task& task, const WgradTile& tile,
                             bool add) {
    const int32_t warp = threadIdx.x / 32;
    const CUtensorMap* map = (tile.fc1 ? p_.fc1_grad_maps : p_.fc2_grad_maps) + task.expert;
    const uint32_t buffers = half().data + warp % 4 * kSliceBuffers * kSliceBytes;
    // The store warp may still copy the tile that was staged last.
    math_wait_barrier(half().free, staging_.parity, p_.dog);
    const int32_t row = tile.row * kTileM + warp * 16;
    write_grad_rows(acc, map, buffers, row, tile.column * kTileN, add);
    slices_pending_ = true;
  }

  const BackwardParams& p_;
  const uint32_t smem_;
  const int32_t warpgroup_;
  StageCursor stage_{0};
  RingCursor<1> staging_{1};
  bool slices_pending_ = false;
};

// ---- Store warp --------------------------------------------------------------------------------

MOK_DEVICE bool wait_slot_free(int32_t block, const BackwardParams& p) {
  if (!wait_until([&] { return slot_free(block, p); }, p.dog, kWaitGradRing, block,
                  p.dog.inner_wait_ns)) {
    return false;
  }
  acquire_for_copies();
  return true;
}

// Recomputed pre-activations, to where their gradients will go.
MOK_DEVICE bool store_preact(const Task& task, const BackwardParams& p, const BackwardMaps& maps,
                             const StagedTile& staged) {
  const Geometry& g = p.geometry;
  const int32_t column = task.tile * kTileF;
  const int32_t boxes = min(kTileF, g.ffn - column) / kBoxColumns;
  if (!wait_slot_free(task.block, p)) return false;
  const bool ok = staged.drain(p.dog, [&](int32_t h, uint32_t data) {
    const int32_t row = ring_row(task.block, g) + h * kWarpgroupRows;
    store_gate_and_up(&maps.preact, data, boxes, column, g.ffn, row);
  });
  if (!ok) return false;
  finish_bulk_stores();
  __syncwarp();
  if (threadIdx.x % 32 == 0) release_add(p.local.activations_ready + task.block, 1);
  return true;
}

// Gradients of pre-activations, and activations. `chunk_parity`: a bit for each stage.
MOK_DEVICE bool store_chunks(const Task& task, const BackwardParams& p, const BackwardMaps& maps,
                             uint32_t smem, StageCursor& stage, uint32_t& chunk_parity) {
  const Geometry& g = p.geometry;
  const int32_t halves = task.rows > kWarpgroupRows ? 2 : 1;
  if (!wait_slot_free(task.block, p)) return false;
  for (int32_t c = 0; c < num_chunks(task, g); ++c) {
    if (!wait_barrier(StageRing::chunk_done(smem, stage.slot), chunk_parity >> stage.slot & 1,
                      p.dog, kWaitChunkFull)) {
      return false;
    }
    chunk_parity ^= 1u << stage.slot;
    if (elect_one()) {
      const int32_t column = task.tile * kTileN + c * kBoxColumns;
      for (int32_t h = 0; h < halves; ++h) {
        const uint32_t half = chunk_half(StageRing::operand_a(smem, stage.slot), h);
        const int32_t row = ring_row(task.block, g) + h * kWarpgroupRows;
        store_tensor_2d(&maps.preact, half + kGateBox * kBoxBytes, column, row);
        store_tensor_2d(&maps.preact, half + kUpBox * kBoxBytes, g.ffn + column, row);
        store_tensor_2d(&maps.activations, half + kActivationBox * kBoxBytes, column, row);
      }
    }
    commit_bulk_group();
    wait_bulk_read();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(StageRing::empty(smem, stage.slot), kMathWarps);
    stage.advance();
  }
  finish_bulk_stores();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    release_add(p.local.grads_ready + task.block, 1);
    release_add(p.local.group_grads_ready + task.group, 1);
  }
  return true;
}

// Sums the parts of each row's gradient of its prob, in the order of the tiles, and pushes it.
MOK_DEVICE void push_grad_probs(const Task& task, const BackwardParams& p) {
  const Geometry& g = p.geometry;
  for (int32_t r = threadIdx.x % 32; r < task.rows; r += 32) {
    const float* parts =
        p.rings.prob_parts + (int64_t{ring_row(task.block, g)} + r) * g.fc2_dgrad_tiles;
    float sum = 0.0f;
    for (int32_t t = 0; t < g.fc2_dgrad_tiles; ++t) sum = __fadd_rn(sum, __ldcg(parts + t));
    const MokRow row = p.peers.rows[g.rank][int64_t{task.block} * kBlockRows + r];
    p.peers.prob_slots[row.rank][int64_t{row.token} * g.topk + route_k(row)] = sum;
  }
  __syncwarp();
}

MOK_DEVICE void store_role(const BackwardParams& p, const BackwardMaps& maps, uint32_t smem) {
  RingCursor<kTaskSlots> slot(0);
  StageCursor stage(0);
  uint32_t full_parity = 0;
  uint32_t chunk_parity = 0;
  while (true) {
    const Task task = TaskRing::next(smem, slot, p.dog);
    if (task.phase == kNoTask) return;
    stage.advance_by(k_steps(task, p));
    const StagedTile staged{smem, task.rows > kWarpgroupRows ? 2 : 1, full_parity};
    if (task.phase == kPhaseRecompute) {
      if (!store_preact(task, p, maps, staged)) return;
    } else if (task.phase == MOK_PHASE_FC1) {
      if (!store_chunks(task, p, maps, smem, stage, chunk_parity)) return;
    } else if (task.phase == MOK_PHASE_FC2) {
      if (!push_rows(task, p, staged)) return;
      if (task.tile == 0) push_grad_probs(task, p);
      report_progress(task, p);
      if (threadIdx.x % 32 == 0) release_add(p.local.group_released + task.group, 1);
    }
  }
}

// ---- Kernel ------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p,
                    const __grid_constant__ BackwardMaps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const int32_t warp = warp_uniform(threadIdx.x / 32);
  const int32_t warpgroup = warp / 4;
  if (!begin_kernel(p, smem)) return;

  const int32_t experts = p.geometry.local_experts;
  if (warpgroup < kMathWarpgroups) {
    grow_registers<kMathRegisters>();
    acquire_tensor_maps(p.fc1_grad_maps, experts);
    acquire_tensor_maps(p.fc2_grad_maps, experts);
    __syncwarp();
    MathRole(p, smem, warpgroup).run();
    reduce_tokens(p);
  } else {
    shrink_registers<kFeedRegisters>();
    if (warp == kLoadWarp) {
      acquire_tensor_maps(p.fc1_maps, experts);
      acquire_tensor_maps(p.fc1_dgrad_maps, experts);
      acquire_tensor_maps(p.fc2_dgrad_maps, experts);
      __syncwarp();
      if (threadIdx.x % 32 == 0) load_role(p, maps, smem);
      __syncwarp();
    } else if (warp == kStoreWarp) {
      store_role(p, maps, smem);
    } else {
      const PulledMatrix pulled[2] = {{p.peers.grad_output, p.rings.grad_output},
                                      {p.peers.hidden, p.rings.hidden}};
      mover_role(p, p.geometry.grad_ring_blocks, pulled,
                 [&](int32_t block) { return slot_free(block, p); });
    }
  }
  wait_bulk_done();
  end_kernel(p);
}

// Block y zeroes one gradient if its expert has no rows.
__global__ void zero_empty_kernel(const __grid_constant__ EmptyGrads args, LocalTables local) {
  const int32_t expert = args.first_expert + blockIdx.y;
  float* grad = args.grads[blockIdx.y];
  if (grad == nullptr || local.expert_first_cut[expert + 1] != local.expert_first_cut[expert]) {
    return;
  }
  auto* to = reinterpret_cast<float4*>(grad);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < args.count / 4;
       i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

}  // namespace

cudaError_t load_backward_kernels() {
  const cudaError_t error = load_kernels(zero_empty_kernel);
  return error == cudaSuccess ? load_persistent(backward_kernel) : error;
}

cudaError_t launch_backward(const BackwardParams& params, const BackwardMaps& maps, int32_t ctas,
                            cudaStream_t stream) {
  return launch_persistent(backward_kernel, params, maps, ctas, stream);
}

cudaError_t launch_zero_empty(const EmptyGrads& grads, const LocalTables& local,
                              cudaStream_t stream) {
  zero_empty_kernel<<<dim3(32, grads.num_experts), 512, 0, stream>>>(grads, local);
  return cudaGetLastError();
}

}  // namespace mok::sm90
