// A weight-gradient tile leaves the accumulators in FP32, added to or replacing what is in memory.
// Adding is done by the L2 cache: one rounding for each element and cut, and nothing is read here.
#ifndef MOK_SM90_WGRAD_EPILOGUE_CUH_
#define MOK_SM90_WGRAD_EPILOGUE_CUH_

#include "layout.cuh"
#include "ptx.cuh"

namespace mok::sm90 {

// Writes the 16 rows of this warp, from row `first_row` and column `first_column` of the gradient.
// `buffers`: this warp's, in shared memory. Copies out of them may be pending on return.
MOK_DEVICE void write_grad_rows(const float (&acc)[128], const CUtensorMap* map, uint32_t buffers,
                                int32_t first_row, int32_t first_column, bool add) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t row = lane / 4;
  const uint32_t line = row % 4 * 2 + row / 4;  // the order of rows in the map's boxes
#pragma unroll
  for (int32_t s = 0; s < kTileN / kSliceColumns; ++s) {
    const uint32_t buffer = buffers + s % kSliceBuffers * kSliceBytes;
    wait_bulk_read<kSliceBuffers - 1>();
    __syncwarp();
#pragma unroll
    for (int32_t j = 0; j < kSliceColumns / 8; ++j) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const int32_t i = 4 * (s * (kSliceColumns / 8) + j) + 2 * h;
        const uint32_t unit = (j * 2 + lane % 4 / 2) ^ line;  // 16 bytes, swizzled
        store_shared_float2(buffer + (h * 8 + line) * 128 + unit * 16 + lane % 2 * 8, acc[i],
                            acc[i + 1]);
      }
    }
    fence_proxy_shared();
    __syncwarp();
    if (elect_one()) {
      const int32_t column_block = first_column / kSliceColumns + s;
      if (add) {
        add_tensor_5d(map, buffer, first_row / 8, column_block);
      } else {
        store_tensor_5d(map, buffer, first_row / 8, column_block);
      }
    }
    commit_bulk_group();
  }
}

}  // namespace mok::sm90

#endif  // MOK_SM90_WGRAD_EPILOGUE_CUH_
