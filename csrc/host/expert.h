// Tiles of the expert FFN that forward and backward share.
#ifndef MOK_HOST_EXPERT_H_
#define MOK_HOST_EXPERT_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "call.h"
#include "gemm.h"
#include "scalar.h"

namespace mok {

// One thread's packing buffers and FP32 tiles.
struct Scratch {
  Gemm gemm;
  std::vector<float> tile = std::vector<float>(kTile * kTile);
  std::vector<float> gate = std::vector<float>(kTile * kTile);
  std::vector<float> up = std::vector<float>(kTile * kTile);

  float* zeroed(std::vector<float>& t) {
    std::fill(t.begin(), t.end(), 0.0f);
    return t.data();
  }
};

// A range of columns of a tiled dimension.
struct Span {
  int64_t first;
  int32_t size;
};
inline Span tile_span(int32_t tile, int64_t extent) {
  const int64_t first = int64_t{tile} * kTile;
  return {first, int32_t(std::min<int64_t>(kTile, extent - first))};
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// gate and up [kBlockRows, span] of FC1 on `rows` rows of x_ring, rounded to T: what is saved, what
// is recomputed and what no_grad uses are the same bits.
template <typename T>
void fc1_tile(Scratch& scratch, const T* x_rows, int32_t rows, const T* fc1, const MokShape& s,
              const Span& span) {
  const Matrix<T> x{x_rows, s.hidden, 1};
  const Matrix<T> w_gate = Matrix<T>{fc1, s.hidden, 1}.at(span.first, 0).transposed();
  const Matrix<T> w_up = Matrix<T>{fc1, s.hidden, 1}.at(s.ffn + span.first, 0).transposed();
  float* gate = scratch.zeroed(scratch.gate);
  float* up = scratch.zeroed(scratch.up);
  scratch.gemm.accumulate(x, w_gate, rows, span.size, s.hidden, gate, kTile);
  scratch.gemm.accumulate(x, w_up, rows, span.size, s.hidden, up, kTile);
  for (int32_t i = 0; i < rows * kTile; ++i) {
    gate[i] = round_to<T>(gate[i]);
    up[i] = round_to<T>(up[i]);
  }
}

inline bool is_saved(const MokSaved& saved, int32_t block) {
  return (block + int64_t{1}) * kBlockRows <= saved.rows;
}

}  // namespace mok

#endif  // MOK_HOST_EXPERT_H_
