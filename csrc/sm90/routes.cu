// Routes from the dense map of Megatron's router: one warp compacts the row of one token.
#include <cuda_bf16.h>

#include "error.h"
#include "launch.cuh"
#include "standalone.h"

namespace mok::sm90 {
namespace {

constexpr int32_t kWarps = 8;

__device__ float to_float(float value) { return value; }
__device__ float to_float(double value) { return static_cast<float>(value); }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    routes_kernel(const __grid_constant__ MokRouteMapArgs args) {
  const int32_t lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (token >= args.tokens) return;
  const uint8_t* map = args.routing_map + token * args.experts;
  const T* probs = static_cast<const T*>(args.probs) + token * args.experts;
  int32_t* ids = args.expert_ids + token * args.topk;
  float* route_probs = args.route_probs + token * args.topk;
  int32_t routes = 0;
#pragma unroll 4
  for (int32_t first = 0; first < args.experts; first += 32) {
    const int32_t expert = first + lane;
    const bool routed = expert < args.experts && map[expert] != 0;
    const uint32_t all = __ballot_sync(~0u, routed);
    const int32_t k = routes + __popc(all & ((1u << lane) - 1));
    if (routed && k < args.topk) {
      ids[k] = expert;
      route_probs[k] = to_float(probs[expert]);
    }
    routes += __popc(all);
  }
  for (int32_t k = routes + lane; k < args.topk; k += 32) {
    ids[k] = -1;
    route_probs[k] = 0.0f;
  }
}

template <typename T>
void launch(const MokRouteMapArgs& args) {
  const int32_t blocks = (args.tokens + kWarps - 1) / kWarps;
  if (blocks == 0) return;
  routes_kernel<T><<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(args.stream)>>>(args);
}

}  // namespace

cudaError_t load_routes_kernels() {
  return load_kernels(routes_kernel<float>, routes_kernel<__nv_bfloat16>, routes_kernel<double>);
}

}  // namespace mok::sm90

extern "C" MokStatus mok_routes_from_map(const MokRouteMapArgs* args) {
  using namespace mok::sm90;
  switch (args->probs_dtype) {
    case MOK_PROBS_F32:
      launch<float>(*args);
      break;
    case MOK_PROBS_BF16:
      launch<__nv_bfloat16>(*args);
      break;
    case MOK_PROBS_F64:
      launch<double>(*args);
      break;
    default:
      return fail(MOK_ERR_INVALID_ARGUMENT, "probs_dtype is none of MokProbsDtype");
  }
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return MOK_OK;
  return fail(MOK_ERR_SYSTEM,
              std::string("launching routes_from_map: ") + cudaGetErrorString(error));
}
