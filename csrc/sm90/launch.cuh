// Kernels that follow each other closely: a kernel may start while the one before it ends, and
// waits for its results itself (programmatic dependent launch).
#ifndef MOK_SM90_LAUNCH_CUH_
#define MOK_SM90_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "ptx.cuh"

namespace mok::sm90 {

// Until this returns, nothing that earlier kernels of the stream wrote may be read.
MOK_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// From when all CTAs have called this, the next kernel's CTAs may take free SMs.
MOK_DEVICE void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Loads kernels now. CUDA would load each at its first launch, and may then wait for the device to
// be idle: which it never is while a kernel there waits for what this launch is to compute.
template <typename... Kernels>
cudaError_t load_kernels(Kernels... kernels) {
  cudaError_t error = cudaSuccess;
  const auto load = [&error](auto kernel) {
    cudaFuncAttributes unused;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&unused, kernel);
  };
  (load(kernels), ...);
  return error;
}

// Launches a kernel that begins with wait_for_previous_kernel.
template <typename... Params, typename... Args>
cudaError_t launch_overlapped(void (*kernel)(Params...), int32_t ctas, int32_t threads,
                              int32_t shared_bytes, cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace mok::sm90

#endif  // MOK_SM90_LAUNCH_CUH_
