// Backward of SwiGLU on the accumulators of FC2's dgrad, chunk by chunk in operand stages.
#ifndef MOK_SM90_SWIGLU_GRAD_CUH_
#define MOK_SM90_SWIGLU_GRAD_CUH_

#include "epilogue.cuh"
#include "layout.cuh"
#include "ptx.cuh"

namespace mok::sm90 {

// Boxes of one warpgroup's half of a chunk.
enum ChunkBox : uint32_t { kGateBox, kUpBox, kActivationBox };

MOK_DEVICE uint32_t chunk_half(uint32_t stage, int32_t warpgroup) {
  return stage + warpgroup * kHalfChunkBytes;
}

// 1 / (1 + exp(-x)) of two values.
MOK_DEVICE float2 sigmoid2(float x, float y) {
  const float a = sigmoid_denominator(x);
  const float b = sigmoid_denominator(y);
  const float r = reciprocal_approx(a * b);
  return make_float2(r * b, r * a);
}

// What one element of a row yields, from the gradient of its unweighted activation `grad`.
struct SwiGluGrad {
  float gate;  // gradients
  float up;
  float activation;  // times the row's prob, as FC2 had it

  MOK_DEVICE SwiGluGrad(float x, float sigmoid, float u, float grad, float prob, float& grad_prob) {
    const float silu = x * sigmoid;
    const float plain = silu * u;
    grad_prob = __fmaf_rn(grad, plain, grad_prob);
    activation = plain * prob;
    const float weighted = grad * prob;
    up = weighted * silu;
    gate = weighted * u * __fmaf_rn(silu, 1.0f - sigmoid, sigmoid);
  }
};

// The rows lane / 4 and lane / 4 + 8 of a warp's 16.
struct GradRows {
  float prob[2];            // 0 of padding, of which all else is 0, too
  float grad_prob[2] = {};  // sums over the thread's columns, in order
};

// Moves a chunk of the accumulators to the first one's place, so that the code for one chunk serves
// all: four copies of it would not fit the instruction cache.
MOK_DEVICE void move_chunk_to_front(float (&acc)[128], int32_t chunk) {
  switch (chunk) {
    case 1:
#pragma unroll
      for (int32_t i = 0; i < 32; ++i) acc[i] = acc[32 + i];
      break;
    case 2:
#pragma unroll
      for (int32_t i = 0; i < 32; ++i) acc[i] = acc[64 + i];
      break;
    case 3:
#pragma unroll
      for (int32_t i = 0; i < 32; ++i) acc[i] = acc[96 + i];
      break;
    default:
      break;
  }
}
static_assert(kChunksPerTile == 4 && kBoxColumns / 2 == 32, "accumulators of a chunk");

// The first chunk of the accumulators: replaces gate and up in the half chunk at `half` by their
// gradients and writes the activations beside them.
MOK_DEVICE void swiglu_grad_chunk(const float (&acc)[128], GradRows& rows, uint32_t half) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t first_row = threadIdx.x / 32 % 4 * 16 + lane % 8;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
#pragma unroll
    for (int32_t j = 0; j < 8; j += 4) {
      const uint32_t at = half + SwizzledBoxes::offset(first_row + h * 8, j + lane / 8);
      const uint4 gates = load_matrix_x4(at + kGateBox * kBoxBytes);
      const uint4 ups = load_matrix_x4(at + kUpBox * kBoxBytes);
      const uint32_t gate[4] = {gates.x, gates.y, gates.z, gates.w};
      const uint32_t up[4] = {ups.x, ups.y, ups.z, ups.w};
      uint32_t grad_gate[4], grad_up[4], activation[4];
#pragma unroll
      for (int32_t m = 0; m < 4; ++m) {
        const int32_t i = 4 * (j + m) + 2 * h;
        const uint32_t x = gate[m], u = up[m];
        const float2 s = sigmoid2(bf16_low(x), bf16_high(x));
        const SwiGluGrad low(bf16_low(x), s.x, bf16_low(u), acc[i], rows.prob[h],
                             rows.grad_prob[h]);
        const SwiGluGrad high(bf16_high(x), s.y, bf16_high(u), acc[i + 1], rows.prob[h],
                              rows.grad_prob[h]);
        grad_gate[m] = pack_bf16(low.gate, high.gate);
        grad_up[m] = pack_bf16(low.up, high.up);
        activation[m] = pack_bf16(low.activation, high.activation);
      }
      store_matrix_x4(at + kGateBox * kBoxBytes, grad_gate[0], grad_gate[1], grad_gate[2],
                      grad_gate[3]);
      store_matrix_x4(at + kUpBox * kBoxBytes, grad_up[0], grad_up[1], grad_up[2], grad_up[3]);
      store_matrix_x4(at + kActivationBox * kBoxBytes, activation[0], activation[1], activation[2],
                      activation[3]);
    }
  }
}

}  // namespace mok::sm90

#endif  // MOK_SM90_SWIGLU_GRAD_CUH_
