// The C ABI of the Hopper engine: argument checks, and errors as status codes.
#include <new>

#include "layout.cuh"
#include "workspace.h"

namespace {

thread_local std::string last_error;

}  // namespace

MokStatus mok::sm90::fail(MokStatus status, const std::string& what) {
  last_error = what;
  return status;
}

namespace {

using mok::sm90::Error;
using mok::sm90::fail;

MokStatus not_there(const char* what) {
  return fail(MOK_ERR_UNSUPPORTED, std::string("the Hopper engine has no ") + what + " yet");
}

// Runs `body`, which throws Error, on the workspace's device.
template <typename Body>
MokStatus guarded(MokWorkspace* ws, const Body& body) {
  if (ws == nullptr) return fail(MOK_ERR_INVALID_ARGUMENT, "workspace is NULL");
  if (!ws->poisoned.empty()) {
    return fail(MOK_ERR_POISONED, "an earlier call on this workspace failed: " + ws->poisoned);
  }
  const std::string fault = fault_message(*ws);
  if (!fault.empty()) {
    ws->poisoned = fault;
    return fail(MOK_ERR_TIMEOUT, fault);
  }
  try {
    // Also where the caller's thread has the device already: a thread's first call must be one of
    // the runtime, since the driver calls that encode tensor maps do not make its context current.
    mok::sm90::check_cuda(cudaSetDevice(ws->device), "choosing the workspace's device");
    body();
    return MOK_OK;
  } catch (const Error& error) {
    if (error.status != MOK_ERR_INVALID_ARGUMENT) ws->poisoned = error.what;
    return fail(error.status, error.what);
  } catch (const std::exception& error) {
    ws->poisoned = error.what();
    return fail(MOK_ERR_SYSTEM, error.what());
  }
}

[[noreturn]] void refuse(const std::string& why) { throw Error{MOK_ERR_INVALID_ARGUMENT, why}; }

void require_pointer(const void* pointer, const char* name) {
  if (pointer == nullptr) refuse(std::string(name) + " is NULL");
}

// Rows are copied in units of 16 bytes.
void require_matrix(const void* pointer, const char* name) {
  require_pointer(pointer, name);
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
    refuse(std::string(name) + " is not aligned to 16 bytes");
  }
}

void check_routes(const MokWorkspace& ws, const MokRoutes& routes) {
  if (routes.tokens < 0 || routes.tokens > ws.shape.max_tokens) {
    refuse("routes.tokens is " + std::to_string(routes.tokens) +
           "; the workspace was made for at most " + std::to_string(ws.shape.max_tokens));
  }
  if (routes.tokens == 0) return;
  require_pointer(routes.expert_ids, "routes.expert_ids");
  require_pointer(routes.probs, "routes.probs");
}

void check_weights(const MokWorkspace& ws, const MokWeights& weights) {
  require_pointer(weights.fc1, "weights.fc1");
  require_pointer(weights.fc2, "weights.fc2");
  for (int32_t i = 0; i < ws.geometry.local_experts; ++i) {
    const std::string of = " of local expert " + std::to_string(i);
    require_matrix(weights.fc1[i], ("fc1" + of).c_str());
    require_matrix(weights.fc2[i], ("fc2" + of).c_str());
  }
}

void check_saved(const MokSaved& saved) {
  if (saved.rows < 0 || saved.rows % mok::kBlockRows != 0) {
    refuse("saved.rows is " + std::to_string(saved.rows) + "; it must be a multiple of 128");
  }
  if (saved.rows > 0) require_matrix(saved.preact, "saved.preact");
}

mok::sm90::ScheduleParams schedule_params(const MokWorkspace& ws, const MokRoutes& routes,
                                          mok::sm90::Op op) {
  // Ranks must also cut groups alike, which depends on their number of CTAs.
  const int32_t tagged = static_cast<int32_t>(op) | ws.geometry.min_group_blocks << 8;
  return {ws.geometry, ws.local,      ws.peers,          ws.dog,
          tagged,      routes.tokens, routes.expert_ids, routes.probs};
}

const char* check(const MokShape& shape) {
  if (const char* why = mok::check_shape(shape)) return why;
  if (shape.dtype != MOK_BF16) return "the CUDA engine computes in BF16: dtype must be MOK_BF16";
  return nullptr;
}

void run_forward(MokWorkspace& ws, const MokForwardArgs& args) {
  using namespace mok::sm90;
  const auto stream = static_cast<cudaStream_t>(args.stream);
  PeerTables peers = ws.peers;
  const int64_t hidden_bytes = int64_t{args.routes.tokens} * ws.shape.hidden * 2;
  if (ws.shape.ep_size == 1) {
    peers.hidden[0] = static_cast<const uint8_t*>(args.hidden);
  } else if (hidden_bytes > 0) {
    check_cuda(cudaMemcpyAsync(const_cast<uint8_t*>(peers.hidden[ws.shape.ep_rank]), args.hidden,
                               hidden_bytes, cudaMemcpyDeviceToDevice, stream),
               "staging hidden states");
  }
  const WeightMaps& maps = ws.weight_maps(args.weights);
  check_cuda(launch_schedule(schedule_params(ws, args.routes, Op::kForward), stream),
             "launching the schedule");
  ForwardParams params{};
  params.geometry = ws.geometry;
  params.local = ws.local;
  params.peers = peers;
  params.dog = ws.dog;
  params.fc1_maps = maps.fc1;
  params.fc2_maps = maps.fc2;
  params.row_ring = ws.row_ring;
  params.saved_blocks = static_cast<int32_t>(args.saved.rows / mok::kBlockRows);
  params.tokens = args.routes.tokens;
  params.expert_ids = args.routes.expert_ids;
  params.addend = static_cast<const uint8_t*>(args.addend);
  params.output = static_cast<uint8_t*>(args.output);
  ForwardMaps forward_maps = ws.forward_maps;
  if (args.saved.rows > 0) {
    forward_maps.store_preact = make_matrix_map(args.saved.preact, args.saved.rows,
                                                2 * int64_t{ws.shape.ffn}, kWarpgroupRows);
  }
  check_cuda(launch_forward(params, forward_maps, ws.ctas, stream), "launching the forward kernel");
}

}  // namespace

extern "C" {

int32_t mok_abi_version(void) { return MOK_ABI_VERSION; }
const char* mok_engine(void) { return "sm90"; }
const char* mok_last_error(void) { return last_error.c_str(); }

MokStatus mok_layout(const MokShape* shape, const MokOptions* options, MokLayout* layout) {
  if (const char* why = check(*shape)) return fail(MOK_ERR_INVALID_ARGUMENT, why);
  int32_t ctas = options->workers;
  if (ctas <= 0) {
    int32_t device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&ctas, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess) return fail(MOK_ERR_SYSTEM, cudaGetErrorString(error));
  }
  layout->peer_bytes = mok::sm90::make_segment_layout(*shape).bytes;
  layout->local_bytes = mok::sm90::make_local_layout(mok::sm90::make_geometry(*shape, ctas)).bytes;
  layout->max_rows = mok::max_blocks(*shape) * mok::kBlockRows;
  return MOK_OK;
}

MokStatus mok_workspace_create(const MokWorkspaceDesc* desc, MokWorkspace** workspace) {
  if (const char* why = check(desc->shape)) return fail(MOK_ERR_INVALID_ARGUMENT, why);
  for (int32_t r = 0; r < desc->shape.ep_size; ++r) {
    if (desc->peers[r] == nullptr) {
      return fail(MOK_ERR_INVALID_ARGUMENT, "peer segment " + std::to_string(r) + " is NULL");
    }
  }
  try {
    *workspace = new MokWorkspace(*desc);
    return MOK_OK;
  } catch (const Error& error) {
    return fail(error.status, error.what);
  } catch (const std::bad_alloc&) {
    return fail(MOK_ERR_SYSTEM, "out of host memory");
  }
}

void mok_workspace_destroy(MokWorkspace* workspace) { delete workspace; }

MokStatus mok_schedule(MokWorkspace*, MokScheduleArgs*) { return not_there("schedule as data"); }
MokStatus mok_dispatch(MokWorkspace*, const MokDispatchArgs*) {
  return not_there("dispatch alone");
}
MokStatus mok_combine(MokWorkspace*, const MokCombineArgs*) { return not_there("combine alone"); }
MokStatus mok_backward(MokWorkspace*, const MokBackwardArgs*) { return not_there("backward"); }

MokStatus mok_forward(MokWorkspace* ws, const MokForwardArgs* args) {
  return guarded(ws, [&] {
    check_routes(*ws, args->routes);
    check_weights(*ws, args->weights);
    check_saved(args->saved);
    if (args->routes.tokens > 0) {
      require_matrix(args->hidden, "hidden");
      require_matrix(args->output, "output");
      if (args->addend != nullptr) require_matrix(args->addend, "addend");
    }
    run_forward(*ws, *args);
  });
}

}  // extern "C"
