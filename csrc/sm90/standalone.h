// Dispatch and combine as kernels of their own, and the schedule as data.
#ifndef MOK_SM90_STANDALONE_H_
#define MOK_SM90_STANDALONE_H_

#include <cuda_runtime.h>

#include "call.h"

struct MokWorkspace;

namespace mok::sm90 {

// Neither kernel touches rows of blocks beyond `capacity`, whether or not the call has such.
struct DispatchParams : CallParams {
  int32_t capacity;      // row blocks
  uint8_t* rows;         // [capacity * kBlockRows, H] BF16
  float* row_probs;      // [capacity * kBlockRows] or NULL
  int32_t* expert_rows;  // [L]
};
cudaError_t launch_dispatch(const DispatchParams& params, int32_t ctas, cudaStream_t stream);

// CallParams.grad_probs, where it is not NULL, takes row_probs.
struct CombineParams : CallParams {
  int32_t capacity;
  const uint8_t* rows;     // as dispatch writes them
  const float* row_probs;  // [capacity * kBlockRows], or NULL
};
cudaError_t launch_combine(const CombineParams& params, int32_t ctas, cudaStream_t stream);

// After launch_schedule: waits for the tables and copies them to the host. Throws Error.
void export_schedule(const MokWorkspace& ws, const CallParams& params, MokScheduleArgs& args);

// Before the first launch on a device: loads what the functions above, and mok_routes_from_map,
// launch.
cudaError_t load_dispatch_kernel();
cudaError_t load_combine_kernel();
cudaError_t load_export_kernels();
cudaError_t load_routes_kernels();

}  // namespace mok::sm90

#endif  // MOK_SM90_STANDALONE_H_
