// The store warp's side of the staging tile.
#ifndef MOK_SM90_STAGED_CUH_
#define MOK_SM90_STAGED_CUH_

#include "epilogue.cuh"
#include "layout.cuh"
#include "sync.cuh"

namespace mok::sm90 {

// Hands the staged halves of a tile to `copy_half(half, shared address)`, one after the other, and
// gives the staging tile back.
struct StagedTile {
  uint32_t smem;
  int32_t halves;         // that hold real rows
  uint32_t& full_parity;  // bit h: of half h's full barrier

  template <typename CopyHalf>
  MOK_DEVICE bool drain(const Watchdog& dog, CopyHalf copy_half) const {
    const int32_t lane = threadIdx.x % 32;
#pragma unroll 1
    for (int32_t h = 0; h < halves; ++h) {
      const StagingHalf half(smem, h);
      if (!wait_barrier(half.full, full_parity >> h & 1, dog, kWaitStagingFull)) return false;
      full_parity ^= 1u << h;
      copy_half(h, half.data);
    }
    commit_bulk_group();
    wait_bulk_read();
    __syncwarp();
    if (lane < halves) barrier_arrive(StagingHalf(smem, lane).free);
    return true;
  }
};

// Stores boxes of a half whose columns lie before F; `first_column` is that of box 0 in the matrix.
MOK_DEVICE void store_boxes(const CUtensorMap* map, uint32_t data, int32_t boxes,
                            int32_t first_column, int32_t row) {
  if (!elect_one()) return;
  for (int32_t i = 0; i < boxes; ++i) {
    store_tensor_2d(map, data + i * kBoxBytes, first_column + i * kBoxColumns, row);
  }
}

// Stores a half of an FC1 tile to a matrix of pre-activations [rows, 2F].
MOK_DEVICE void store_gate_and_up(const CUtensorMap* map, uint32_t data, int32_t boxes,
                                  int32_t first_column, int32_t ffn, int32_t row) {
  store_boxes(map, data, boxes, first_column, row);
  store_boxes(map, data + kTileF / kBoxColumns * kBoxBytes, boxes, ffn + first_column, row);
}

}  // namespace mok::sm90

#endif  // MOK_SM90_STAGED_CUH_
