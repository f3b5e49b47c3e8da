// The matrix multiply of a tile: a ring of operand stages between the load warp and two math
// warpgroups, each of which accumulates 64 x 256 in registers.
#ifndef MOK_SM90_GEMM_MAINLOOP_CUH_
#define MOK_SM90_GEMM_MAINLOOP_CUH_

#include "layout.cuh"
#include "sync.cuh"

namespace mok::sm90 {

using StageCursor = RingCursor<kStages>;

struct StageRing {
  MOK_DEVICE static void init(uint32_t smem) {
    for (int32_t i = 0; i < kStages; ++i) {
      barrier_init(full(smem, i), 1);
      barrier_init(empty(smem, i), kMathWarps);
      barrier_init(chunk_done(smem, i), kMathWarps);
    }
  }
  MOK_DEVICE static uint32_t operand_a(uint32_t smem, uint32_t stage) {
    return smem + SharedPlan::kOperands + stage * kStageBytes;
  }
  MOK_DEVICE static uint32_t operand_b(uint32_t smem, uint32_t stage) {
    return operand_a(smem, stage) + kOperandABytes;
  }
  MOK_DEVICE static uint32_t full(uint32_t smem, uint32_t stage) {
    return smem + SharedPlan::kStageFull + stage * 8;
  }
  MOK_DEVICE static uint32_t empty(uint32_t smem, uint32_t stage) {
    return smem + SharedPlan::kStageEmpty + stage * 8;
  }
  MOK_DEVICE static bool wait_empty(uint32_t smem, const RingCursor<kStages>& cursor,
                                    const Watchdog& dog) {
    return wait_barrier(empty(smem, cursor.slot), cursor.parity, dog, kWaitStageEmpty);
  }
  // The math warps have put results into a stage that holds a chunk; the store warp empties it.
  MOK_DEVICE static uint32_t chunk_done(uint32_t smem, uint32_t stage) {
    return smem + SharedPlan::kChunkDone + stage * 8;
  }
};

// How an operand lies in a stage. K-major: its rows (left) or columns (right) of 64 K after each
// other. MN-major: 64 K, each with 64 rows or columns contiguous, block after block.
enum class Major { kK, kMN };

// Descriptor of an operand in 128-byte swizzle: lines of 128 bytes, 8 to an atom of 1024 bytes. PTX
// ISA, "Asynchronous warpgroup level matrix instructions", matrix descriptor.
template <Major kMajor>
MOK_DEVICE uint64_t operand_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kStride = uint64_t{1024 >> 4} << 32;
  // From one block of 64 rows or columns to the next; unused where K is contiguous.
  constexpr uint64_t kLeading = uint64_t{kMajor == Major::kK ? 1 : kBoxBytes >> 4} << 16;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | kLeading | kStride | kSwizzle128;
}

// From one multiply to the next, 16 of K, in units of the descriptor.
MOK_DEVICE constexpr uint64_t descriptor_step(Major major) {
  return (major == Major::kK ? 16 * 2 : 16 * 128) >> 4;
}

// Waits for the next stage and starts its multiplies. Returns the stage, which they still read.
template <Major kMajorA, Major kMajorB, bool kFirst>
MOK_DEVICE uint32_t multiply_step(float (&acc)[128], uint32_t smem, int32_t warpgroup,
                                  StageCursor& cursor, const Watchdog& dog) {
  math_wait_barrier(StageRing::full(smem, cursor.slot), cursor.parity, dog);
  // Without this the compiler moves every descriptor into uniform registers between multiplies.
  const uint32_t stage = warp_uniform(cursor.slot);
  const uint64_t a = operand_descriptor<kMajorA>(StageRing::operand_a(smem, stage) +
                                                 warpgroup * (kOperandABytes / kMathWarpgroups));
  const uint64_t b = operand_descriptor<kMajorB>(StageRing::operand_b(smem, stage));
  constexpr uint64_t kStepA = descriptor_step(kMajorA);
  constexpr uint64_t kStepB = descriptor_step(kMajorB);
  constexpr bool kTransposeA = kMajorA == Major::kMN;
  constexpr bool kTransposeB = kMajorB == Major::kMN;
  wgmma_fence();
#pragma unroll
  for (int32_t i = 0; i < kTileK / 16; ++i) {
    if (kFirst && i == 0) {
      wgmma_m64n256k16_first<kTransposeA, kTransposeB>(acc, a, b);
    } else {
      wgmma_m64n256k16<kTransposeA, kTransposeB>(acc, a + i * kStepA, b + i * kStepB);
    }
  }
  wgmma_commit();
  cursor.advance();
  return stage;
}

// Multiplies `k_steps` stages into `acc`, replacing what it held. One multiply stays in flight
// while the stage before is given back. A warpgroup without real rows only takes part in the
// barriers: the tensor cores are then left to the other, and the tile takes half the time. Failed
// waits are not acted on here: math warps leave at the next task.
template <Major kMajorA, Major kMajorB>
MOK_DEVICE void multiply_tile(float (&acc)[128], int32_t k_steps, bool has_rows, uint32_t smem,
                              int32_t warpgroup, StageCursor& cursor, const Watchdog& dog) {
  const bool leader = threadIdx.x % 32 == 0;
  if (!has_rows) {
    for (int32_t k = 0; k < k_steps; ++k) {
      math_wait_barrier(StageRing::full(smem, cursor.slot), cursor.parity, dog);
      if (leader) barrier_arrive(StageRing::empty(smem, cursor.slot));
      cursor.advance();
    }
    return;
  }
  uint32_t previous = multiply_step<kMajorA, kMajorB, true>(acc, smem, warpgroup, cursor, dog);
#pragma unroll 1
  for (int32_t k = 1; k < k_steps; ++k) {
    const uint32_t current =
        multiply_step<kMajorA, kMajorB, false>(acc, smem, warpgroup, cursor, dog);
    wgmma_wait<1>();
    if (leader) barrier_arrive(StageRing::empty(smem, previous));
    previous = current;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int32_t i = 0; i < 128; ++i) asm volatile("" : "+f"(acc[i])::"memory");
  if (leader) barrier_arrive(StageRing::empty(smem, previous));
}

}  // namespace mok::sm90

#endif  // MOK_SM90_GEMM_MAINLOOP_CUH_
