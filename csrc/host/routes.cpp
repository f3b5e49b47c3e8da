// Routes from the dense map of Megatron's router.
#include <algorithm>

#include "error.h"
#include "scalar.h"

namespace mok {
namespace {

template <typename T>
MokStatus convert(const MokRouteMapArgs& args) {
  const T* probs = static_cast<const T*>(args.probs);
  for (int64_t t = 0; t < args.tokens; ++t) {
    int32_t* ids = args.expert_ids + t * args.topk;
    float* route_probs = args.route_probs + t * args.topk;
    int32_t routes = 0;
    for (int64_t e = 0; e < args.experts; ++e) {
      if (!args.routing_map[t * args.experts + e]) continue;
      if (routes < args.topk) {
        ids[routes] = int32_t(e);
        route_probs[routes] = to_float(probs[t * args.experts + e]);
      }
      ++routes;
    }
    if (routes > args.topk) {
      return fail(MOK_ERR_INVALID_ARGUMENT, "token " + std::to_string(t) + " has " +
                                                std::to_string(routes) + " routes; topk is " +
                                                std::to_string(args.topk));
    }
    std::fill(ids + routes, ids + args.topk, -1);
    std::fill(route_probs + routes, route_probs + args.topk, 0.0f);
  }
  return MOK_OK;
}

}  // namespace
}  // namespace mok

extern "C" MokStatus mok_routes_from_map(const MokRouteMapArgs* args) {
  switch (args->probs_dtype) {
    case MOK_PROBS_F32:
      return mok::convert<float>(*args);
    case MOK_PROBS_BF16:
      return mok::convert<mok::Bf16>(*args);
    case MOK_PROBS_F64:
      return mok::convert<double>(*args);
  }
  return mok::fail(MOK_ERR_INVALID_ARGUMENT, "probs_dtype is none of MokProbsDtype");
}
