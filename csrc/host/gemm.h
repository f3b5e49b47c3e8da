// A blocked FP32 matrix product on tiles, for operands of any element type and orientation.
#ifndef MOK_HOST_GEMM_H_
#define MOK_HOST_GEMM_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "scalar.h"

namespace mok {

// A matrix in memory; strides in elements, so that a transpose is a swap of strides.
template <typename T>
struct Matrix {
  const T* data;
  int64_t row_stride;
  int64_t col_stride;

  Matrix at(int64_t row, int64_t col) const {
    return {data + row * row_stride + col * col_stride, row_stride, col_stride};
  }
  Matrix transposed() const { return {data, col_stride, row_stride}; }
};

constexpr int kMicroRows = 8;
constexpr int kMicroCols = 16;

// c[8, 16] += a_panel[k, 8]^T b_panel[k, 16], k ascending.
void gemm_micro_kernel(const float* a_panel, const float* b_panel, int k, float* c, int64_t ldc);

// Packs operands into panels and keeps the scratch for it; one per thread.
class Gemm {
 public:
  // c[m, n] += a[m, k] b[k, n]. Every element adds its products in ascending k, one rounding each,
  // whatever m and n are: results do not depend on how the work is cut into tiles. c has room for m
  // and n rounded up to the micro tile, and ldc is a multiple of kMicroCols.
  template <typename T, typename U>
  void accumulate(const Matrix<T>& a, const Matrix<U>& b, int m, int n, int64_t k, float* c,
                  int64_t ldc) {
    const int row_panels = (m + kMicroRows - 1) / kMicroRows;
    const int col_panels = (n + kMicroCols - 1) / kMicroCols;
    a_pack_.resize(size_t(row_panels) * kMicroRows * kDepth);
    b_pack_.resize(size_t(col_panels) * kMicroCols * kDepth);
    for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
      const int depth = int(std::min<int64_t>(kDepth, k - k0));
      pack<kMicroRows>(a.at(0, k0), m, depth, a_pack_.data());
      pack<kMicroCols>(b.at(k0, 0).transposed(), n, depth, b_pack_.data());
      for (int j = 0; j < col_panels; ++j) {
        const float* b_panel = b_pack_.data() + size_t(j) * kMicroCols * depth;
        for (int i = 0; i < row_panels; ++i) {
          const float* a_panel = a_pack_.data() + size_t(i) * kMicroRows * depth;
          gemm_micro_kernel(a_panel, b_panel, depth,
                            c + i * kMicroRows * ldc + int64_t{j} * kMicroCols, ldc);
        }
      }
    }
  }

 private:
  static constexpr int kDepth = 256;

  // Panels of `width` rows of m[rows, depth], each stored depth-major; missing rows are zero.
  template <int width, typename T>
  static void pack(const Matrix<T>& m, int rows, int depth, float* out) {
    for (int first = 0; first < rows; first += width, out += int64_t{width} * depth) {
      const int valid = std::min(width, rows - first);
      if (valid < width) std::memset(out, 0, sizeof(float) * width * depth);
      if (m.row_stride == 1) {
        for (int d = 0; d < depth; ++d) {
          const T* source = m.data + first + d * m.col_stride;
          for (int i = 0; i < valid; ++i) out[d * width + i] = to_float(source[i]);
        }
      } else {
        for (int i = 0; i < valid; ++i) {
          const T* source = m.data + (first + i) * m.row_stride;
          for (int d = 0; d < depth; ++d) out[d * width + i] = to_float(source[d * m.col_stride]);
        }
      }
    }
  }

  std::vector<float> a_pack_;
  std::vector<float> b_pack_;
};

}  // namespace mok

#endif  // MOK_HOST_GEMM_H_
