// Parameters of the backward kernel and its launch.
#ifndef MOK_SM90_BACKWARD_H_
#define MOK_SM90_BACKWARD_H_

#include <cuda_runtime.h>

#include "call.h"

namespace mok::sm90 {

// Rings of grad_ring_blocks row blocks, in this rank's private memory. Two more are reached through
// tensor maps alone: [rows, 2F] of pre-activations where they are recomputed, which their gradients
// replace, and [rows, F] of activations times probs.
struct BackwardRings {
  uint8_t* hidden;       // [rows, H] BF16
  uint8_t* grad_output;  // [rows, H] BF16
  float* prob_parts;     // [rows, fc2_dgrad_tiles] gradients of probs from each tile
};

// Which local experts have a gradient to be written, a bit each.
struct ExpertSet {
  uint32_t words[MOK_MAX_EXPERTS / 32];

  MOK_HD bool contains(int32_t expert) const { return words[expert / 32] >> expert % 32 & 1; }
  void insert(int32_t expert) { words[expert / 32] |= 1u << expert % 32; }
};

struct BackwardParams : CallParams {
  BackwardRings rings;
  int32_t saved_blocks;  // row blocks whose pre-activations were kept
  bool accumulate;       // weight gradients are added to what is there
  ExpertSet fc1_wanted;
  ExpertSet fc2_wanted;
  // [L] each, in device memory.
  const CUtensorMap* fc1_maps;        // as in forward, to recompute
  const CUtensorMap* fc1_dgrad_maps;  // W1 [2F, H]: boxes of 64 of K = 2F, 4 blocks of H
  const CUtensorMap* fc2_dgrad_maps;  // W2 [H, F]: boxes of 64 of K = H, 4 blocks of F
  const CUtensorMap* fc1_grad_maps;   // see make_grad_map
  const CUtensorMap* fc2_grad_maps;
};

// Maps of the rings. "rows": boxes of 128 rows and one column block, operands with K along the
// columns. "columns": 64 rows and two (left operand) or four (right) column blocks, operands with K
// along the rows.
struct BackwardMaps {
  CUtensorMap hidden_rows;
  CUtensorMap hidden_columns;
  CUtensorMap grad_output_rows;
  CUtensorMap grad_output_columns;
  CUtensorMap grad_preact_rows;
  CUtensorMap grad_preact_columns;
  CUtensorMap activation_columns;
  // Boxes of 64 rows and 64 columns.
  CUtensorMap preact;  // of the ring
  CUtensorMap saved_preact;
  CUtensorMap activations;
};

cudaError_t launch_backward(const BackwardParams& params, const BackwardMaps& maps, int32_t ctas,
                            cudaStream_t stream);

// Writes zeros to `count` floats each of the gradients of experts that got no rows.
struct EmptyGrads {
  static constexpr int32_t kMax = 256;
  float* grads[kMax];  // NULL: skipped
  int32_t first_expert;
  int32_t num_experts;
  int64_t count;
};
cudaError_t launch_zero_empty(const EmptyGrads& grads, const LocalTables& local,
                              cudaStream_t stream);

// Before the first launch on a device: loads what the functions above launch.
cudaError_t load_backward_kernels();

}  // namespace mok::sm90

#endif  // MOK_SM90_BACKWARD_H_
