// What the persistent kernels share around their roles: how they are launched and begin, and how
// the load warp looks ahead.
#ifndef MOK_SM90_PERSISTENT_CUH_
#define MOK_SM90_PERSISTENT_CUH_

#include "epilogue.cuh"
#include "gemm_mainloop.cuh"
#include "launch.cuh"
#include "task.cuh"

namespace mok::sm90 {

// Prepares shared memory and waits for the tables of the call. False: there is nothing to do.
MOK_DEVICE bool begin_kernel(const CallParams& p, uint32_t smem) {
  if (threadIdx.x == 0) {
    StageRing::init(smem);
    TaskRing::init(smem);
    StagingHalf::init(smem);
    fence_barrier_init();
    fence_proxy_shared();
  }
  wait_for_previous_kernel();
  return rows_have_arrived(p);
}

// By every thread after its role. A CTA that gave up must not leave while copies into its shared
// memory are in flight.
MOK_DEVICE void end_kernel(const CallParams& p) {
  settle_failure(p.dog);
  if (load_relaxed(p.dog.abort) == 0) return;
  const uint64_t start = global_nanoseconds();
  while (global_nanoseconds() - start < 100'000) __nanosleep(1000);
}

// Maps of weights and gradients are in global memory, where the host may have replaced them since
// the last call.
MOK_DEVICE void acquire_tensor_maps(const CUtensorMap* maps, int32_t count) {
  for (int32_t i = threadIdx.x % 32; i < count; i += 32) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(maps + i)
                 : "memory");
  }
}

// The flag that the operands of a task wait for.
struct Readiness {
  const uint32_t* counter;
  uint32_t target;
};

// A task looked up ahead of its turn, so that neither the ticket nor the flag costs time later.
struct NextTask {
  Task task;
  bool ready;  // its operands may be loaded

  NextTask() = default;
  // readiness(task, p): what its operands wait for.
  template <typename Order, typename Params, typename Ready>
  MOK_DEVICE NextTask(uint32_t ticket, Order& order, const Params& p, Ready readiness)
      : task(order.decode(static_cast<int32_t>(ticket), p)), ready(false) {
    if (task.phase == kNoTask) return;
    const Readiness flag = readiness(task, p);
    ready = load_relaxed(flag.counter) >= flag.target;
    if (ready) acquire_for_copies();
  }
};

// The step of a task of `steps` K steps at which the load warp looks up the next task: all stages
// are filled, and the math warps are still at the end of the task before. Step 0 where there are
// none. Written so that the look-up is compiled in one place only.
MOK_DEVICE int32_t look_ahead_step(int32_t steps) { return max(min(kStages, steps), 1) - 1; }

// Before the first launch on a device.
template <typename Params, typename Maps>
cudaError_t load_persistent(void (*kernel)(Params, Maps)) {
  const cudaError_t error = load_kernels(kernel);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              SharedPlan::kBytes);
}

template <typename Params, typename Maps>
cudaError_t launch_persistent(void (*kernel)(Params, Maps), const Params& params, const Maps& maps,
                              int32_t ctas, cudaStream_t stream) {
  return launch_overlapped(kernel, ctas, kThreads, SharedPlan::kBytes, stream, params, maps);
}

}  // namespace mok::sm90

#endif  // MOK_SM90_PERSISTENT_CUH_
