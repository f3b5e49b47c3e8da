// From accumulators to the staging tile in shared memory, from which the store warp copies rows.
#ifndef MOK_SM90_EPILOGUE_CUH_
#define MOK_SM90_EPILOGUE_CUH_

#include "layout.cuh"
#include "sync.cuh"

namespace mok::sm90 {

// Hand-over of one warpgroup's half of the staging tile.
struct StagingHalf {
  uint32_t rows;  // shared address of the warpgroup's first row
  uint32_t full;  // barriers
  uint32_t free;

  MOK_DEVICE StagingHalf(uint32_t smem, int32_t warpgroup)
      : rows(smem + SharedPlan::kStaging + warpgroup * kWarpgroupRows * kStagingPitch),
        full(smem + SharedPlan::kStagingFull + warpgroup * 8),
        free(smem + SharedPlan::kStagingFree + warpgroup * 8) {}

  MOK_DEVICE static void init(uint32_t smem) {
    for (int32_t i = 0; i < kMathWarpgroups; ++i) {
      barrier_init(StagingHalf(smem, i).full, kMathWarps / kMathWarpgroups);
      barrier_init(StagingHalf(smem, i).free, 1);
    }
  }
};

// Writes 16 rows x `kColumns` of packed BF16 pairs at byte column `first_byte` of the staging rows.
// pair(j, h): columns 8 j + 2 (lane % 4) and the next, of row 8 h + lane / 4.
template <int32_t kColumns, typename Pair>
MOK_DEVICE void stage_columns(uint32_t warp_rows, int32_t first_byte, Pair pair) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const uint32_t row = warp_rows + (h * 8 + lane % 8) * kStagingPitch + first_byte;
#pragma unroll
    for (int32_t j = 0; j < kColumns / 8; j += 4) {
      store_matrix_x4(row + (j + lane / 8) * 16, pair(j, h), pair(j + 1, h), pair(j + 2, h),
                      pair(j + 3, h));
    }
  }
}

// Stages what `pair` yields and tells the store warp. `cursor` counts uses of the half.
template <int32_t kColumns, typename Pair>
MOK_DEVICE void stage_tile(const StagingHalf& half, RingCursor<1>& cursor, const Watchdog& dog,
                           Pair pair) {
  wait_barrier(half.free, cursor.parity, dog, kWaitStagingFree);
  cursor.advance();
  const uint32_t warp = threadIdx.x / 32 % 4;
  stage_columns<kColumns>(half.rows + warp * 16 * kStagingPitch, 0, pair);
  fence_proxy_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(half.full);
}

// The accumulators themselves.
struct PlainPairs {
  const float (&acc)[128];
  MOK_DEVICE uint32_t operator()(int32_t j, int32_t h) const {
    return pack_bf16(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
  }
};

MOK_DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// prob * silu(gate) * up, with gate in columns 0..127 of the tile and up in 128..255, so that both
// are in one thread. They are rounded to BF16 first: forward, recomputed and saved ones then agree.
struct SwiGluPairs {
  const float (&acc)[128];
  float prob[2];  // of rows lane / 4 and 8 + lane / 4

  MOK_DEVICE uint32_t operator()(int32_t j, int32_t h) const {
    const uint32_t gate = pack_bf16(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
    const uint32_t up = pack_bf16(acc[64 + 4 * j + 2 * h], acc[64 + 4 * j + 2 * h + 1]);
    return pack_bf16(prob[h] * (silu(bf16_low(gate)) * bf16_low(up)),
                     prob[h] * (silu(bf16_high(gate)) * bf16_high(up)));
  }
};

}  // namespace mok::sm90

#endif  // MOK_SM90_EPILOGUE_CUH_
