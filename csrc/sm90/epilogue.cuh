// From accumulators to the staging tile in shared memory, from which the store warp copies rows.
#ifndef MOK_SM90_EPILOGUE_CUH_
#define MOK_SM90_EPILOGUE_CUH_

#include "layout.cuh"
#include "sync.cuh"

namespace mok::sm90 {

// Hand-over of one warpgroup's half of the staging tile.
struct StagingHalf {
  uint32_t data;  // shared address
  uint32_t full;  // barriers
  uint32_t free;

  MOK_DEVICE StagingHalf(uint32_t smem, int32_t warpgroup)
      : data(smem + SharedPlan::kStaging + warpgroup * kStagingHalfBytes),
        full(smem + SharedPlan::kStagingFull + warpgroup * 8),
        free(smem + SharedPlan::kStagingFree + warpgroup * 8) {}

  MOK_DEVICE static void init(uint32_t smem) {
    for (int32_t i = 0; i < kMathWarpgroups; ++i) {
      barrier_init(StagingHalf(smem, i).full, kMathWarps / kMathWarpgroups);
      barrier_init(StagingHalf(smem, i).free, 1);
    }
  }
};

// The row of the tile, of all math warps' rows, that the thread's accumulators with this h are of.
MOK_DEVICE int32_t accumulator_row(int32_t h) {
  return threadIdx.x / 32 * 16 + h * 8 + threadIdx.x % 32 / 4;
}

// Where 8 columns of a row go: as linear rows, to be pushed one by one.
struct LinearRows {
  MOK_DEVICE static uint32_t offset(uint32_t row, uint32_t column8) {
    return row * kStagingPitch + column8 * 16;
  }
};

// As boxes of 64 columns in 128-byte swizzle, for tensor stores.
struct SwizzledBoxes {
  MOK_DEVICE static uint32_t offset(uint32_t row, uint32_t column8) {
    return column8 / 8 * kBoxBytes + row * 128 + (column8 % 8 ^ row % 8) * 16;
  }
};

// Stages `kColumns` columns of the warpgroup's half and tells the store warp. pair(j, h) yields, as
// packed BF16, columns 8 j + 2 (lane % 4) and the next of the warp's row 8 h + lane / 4. `cursor`
// counts uses of the half.
template <typename Layout, int32_t kColumns, typename Pair>
MOK_DEVICE void stage_tile(const StagingHalf& half, RingCursor<1>& cursor, const Watchdog& dog,
                           Pair pair) {
  math_wait_barrier(half.free, cursor.parity, dog);
  cursor.advance();
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t first_row = threadIdx.x / 32 % 4 * 16 + lane % 8;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
#pragma unroll
    for (int32_t j = 0; j < kColumns / 8; j += 4) {
      store_matrix_x4(half.data + Layout::offset(first_row + h * 8, j + lane / 8), pair(j, h),
                      pair(j + 1, h), pair(j + 2, h), pair(j + 3, h));
    }
  }
  fence_proxy_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(half.full);
}

// The accumulators themselves.
struct PlainPairs {
  const float (&acc)[128];
  MOK_DEVICE uint32_t operator()(int32_t j, int32_t h) const {
    return pack_bf16(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
  }
};

// 1 + exp(-x), the denominator of the sigmoid. The clamp keeps the product of two finite, so that
// they can share a reciprocal; silu is closer to 0 than 1e-16 where it acts.
MOK_DEVICE float sigmoid_denominator(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kClamp = 60.0f;
  return 1.0f + exp2_approx(fminf(x * -kLog2E, kClamp));
}

// scale * silu(x) of two values, silu(x) = x / (1 + exp(-x)).
MOK_DEVICE float2 scaled_silu2(float x, float y, float scale) {
  const float a = sigmoid_denominator(x);
  const float b = sigmoid_denominator(y);
  const float r = scale * reciprocal_approx(a * b);
  return make_float2(x * (r * b), y * (r * a));
}

// prob * silu(gate) * up, with gate in columns 0..127 of the tile and up in 128..255, so that both
// are in one thread. They are rounded to BF16 first: forward, recomputed and saved ones then agree.
struct SwiGluPairs {
  uint32_t pairs[32];

  // prob: of rows lane / 4 and 8 + lane / 4.
  MOK_DEVICE SwiGluPairs(const float (&acc)[128], const float (&prob)[2]) {
#pragma unroll
    for (int32_t i = 0; i < 32; ++i) {  // i = 2 j + h
      // Nothing is moved across this. Otherwise ptxas packs all results at the end, and spills.
      if (i % 16 == 0) __syncwarp();
      const uint32_t gate = pack_bf16(acc[2 * i], acc[2 * i + 1]);
      const uint32_t up = pack_bf16(acc[64 + 2 * i], acc[64 + 2 * i + 1]);
      const float2 s = scaled_silu2(bf16_low(gate), bf16_high(gate), prob[i % 2]);
      pairs[i] = pack_bf16(s.x * bf16_low(up), s.y * bf16_high(up));
    }
  }
  MOK_DEVICE uint32_t operator()(int32_t j, int32_t h) const { return pairs[2 * j + h]; }
};

}  // namespace mok::sm90

#endif  // MOK_SM90_EPILOGUE_CUH_
