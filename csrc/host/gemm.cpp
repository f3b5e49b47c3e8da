#include "gemm.h"

namespace mok {
namespace {

using Vector = float __attribute__((vector_size(kMicroCols * sizeof(float)), aligned(4)));

}  // namespace

// One binary for all x86-64 machines: the loader picks the widest version that the CPU has.
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "fma", "default")))
#endif
void gemm_micro_kernel(const float* a_panel, const float* b_panel, int k, float* c, int64_t ldc) {
  Vector sum[kMicroRows];
#pragma GCC unroll 8
  for (int i = 0; i < kMicroRows; ++i) sum[i] = *reinterpret_cast<const Vector*>(c + i * ldc);
  for (int d = 0; d < k; ++d) {
    const Vector b = *reinterpret_cast<const Vector*>(b_panel + d * kMicroCols);
#pragma GCC unroll 8
    for (int i = 0; i < kMicroRows; ++i) sum[i] += a_panel[d * kMicroRows + i] * b;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kMicroRows; ++i) *reinterpret_cast<Vector*>(c + i * ldc) = sum[i];
}

}  // namespace mok
