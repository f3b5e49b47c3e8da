// Parameters of the forward kernel and its launch.
#ifndef MOK_SM90_FORWARD_H_
#define MOK_SM90_FORWARD_H_

#include <cuda_runtime.h>

#include "call.h"

namespace mok::sm90 {

struct ForwardParams : CallParams {
  const CUtensorMap* fc1_maps;  // [L] in device memory; box: 64 of K, 128 of F, gate and up
  const CUtensorMap* fc2_maps;  // [L] box: 64 of K, 256 of H
  uint8_t* row_ring;            // [ring_blocks * kBlockRows, H] BF16
  int32_t saved_blocks;         // row blocks whose pre-activations are kept
};

// Tensor maps of boxes of 64 columns: 128 rows for a row block, 64 for what a warpgroup has of it.
struct ForwardMaps {
  CUtensorMap rows;  // of the row ring
  CUtensorMap half_rows;
  CUtensorMap activations;  // of the activation ring
  CUtensorMap half_activations;
  CUtensorMap half_preact;  // of the saved pre-activations; unused if none are
};

cudaError_t launch_forward(const ForwardParams& params, const ForwardMaps& maps, int32_t ctas,
                           cudaStream_t stream);

// Before the first launch on a device.
cudaError_t load_forward_kernel();

}  // namespace mok::sm90

#endif  // MOK_SM90_FORWARD_H_
