// The C ABI of the Hopper engine: argument checks, and errors as status codes.
#include <algorithm>
#include <new>
#include <vector>

#include "../schedule/messages.h"
#include "layout.cuh"
#include "standalone.h"
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

// Runs `body`, which throws Error, on the workspace's device.
template <typename Body>
MokStatus guarded(MokWorkspace* ws, const Body& body) {
  if (ws == nullptr) return fail(MOK_ERR_INVALID_ARGUMENT, "workspace is NULL");
  if (!ws->poisoned.empty()) {
    return fail(MOK_ERR_POISONED, "an earlier call on this workspace failed: " + ws->poisoned);
  }
  const std::string fault = ws->faults.fault_message(ws->shape);
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
    refuse(mok::bad_tokens_text(ws.shape, routes.tokens));
  }
  if (routes.tokens == 0) return;
  require_pointer(routes.expert_ids, "routes.expert_ids");
}

void require_probs(const MokRoutes& routes) {
  if (routes.tokens > 0) require_pointer(routes.probs, "routes.probs");
}

// Of dispatch and combine; `rows` has room for so many.
void check_rows(const MokWorkspace& ws, int64_t capacity, const void* rows) {
  const std::string problem = mok::bad_capacity_text(ws.geometry.max_blocks, capacity);
  if (!problem.empty()) refuse(problem);
  if (capacity > 0) require_matrix(rows, "rows");
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

void check_grads(const MokWorkspace& ws, const MokWeightGrads& grads) {
  require_pointer(grads.fc1, "weight_grads.fc1");
  require_pointer(grads.fc2, "weight_grads.fc2");
  for (int32_t i = 0; i < ws.geometry.local_experts; ++i) {
    const std::string of = " of local expert " + std::to_string(i);
    if (grads.fc1[i] != nullptr) require_matrix(grads.fc1[i], ("gradient of fc1" + of).c_str());
    if (grads.fc2[i] != nullptr) require_matrix(grads.fc2[i], ("gradient of fc2" + of).c_str());
  }
}

mok::sm90::ScheduleParams schedule_params(MokWorkspace& ws, const MokRoutes& routes, mok::Op op) {
  // Ranks must also cut groups alike, which depends on their number of CTAs.
  const int32_t tagged = static_cast<int32_t>(op) | ws.geometry.min_group_blocks << 8;
  return {ws.geometry, ws.local,      ws.peers,          ws.dog,      ws.faults.refused_call(),
          tagged,      routes.tokens, routes.expert_ids, routes.probs};
}

// Begins a call: the tables that its kernels work on.
void start_schedule(MokWorkspace& ws, const MokRoutes& routes, mok::Op op, cudaStream_t stream) {
  mok::sm90::check_cuda(launch_schedule(schedule_params(ws, routes, op), stream),
                        "launching the schedule");
}

// Reports the first call since the last report that a rank refused.
void report_refused_call(MokWorkspace& ws) {
  const std::string refusal = ws.faults.take_refusal(ws.shape);
  if (!refusal.empty()) refuse(refusal);
}

// Runs a call. Where `check` throws, the peers are told that this rank refuses. That an earlier
// call was refused is reported after this one has been launched: so the ranks stay in step. Never
// this one: whether the device is there by now is chance.
template <typename Check, typename Run>
MokStatus collective(MokWorkspace* ws, mok::Op op, const MokRoutes& routes, void* stream,
                     const Check& check, const Run& run) {
  return guarded(ws, [&] {
    try {
      check_routes(*ws, routes);
      check();
    } catch (const Error&) {
      if (ws->shape.ep_size > 1) {
        const bool fits = routes.tokens >= 0 && routes.tokens <= ws->shape.max_tokens;
        mok::sm90::ScheduleParams params = schedule_params(*ws, routes, op);
        params.tokens = fits ? mok::kRefusedArgument : mok::kRefusedTokens;
        mok::sm90::check_cuda(launch_refusal(params, static_cast<cudaStream_t>(stream)),
                              "telling the peers of a refused call");
      }
      throw;
    }
    const std::string refusal = ws->faults.take_refusal(ws->shape);
    run();
    if (!refusal.empty()) refuse(refusal);
  });
}

const char* check(const MokShape& shape) {
  if (const char* why = mok::check_shape(shape)) return why;
  if (shape.dtype != MOK_BF16) return "the CUDA engine computes in BF16: dtype must be MOK_BF16";
  return nullptr;
}

// Puts a [T, H] matrix where peers pull it from; `staged`: its place at each rank. Alone, a rank
// pulls from the matrix itself.
void stage_matrix(const MokWorkspace& ws, const uint8_t* (&staged)[MOK_MAX_RANKS],
                  const void* matrix, int32_t tokens, cudaStream_t stream) {
  const int64_t bytes = int64_t{tokens} * ws.shape.hidden * 2;
  if (ws.shape.ep_size == 1) {
    staged[0] = static_cast<const uint8_t*>(matrix);
  } else if (bytes > 0) {
    mok::sm90::check_cuda(cudaMemcpyAsync(const_cast<uint8_t*>(staged[ws.shape.ep_rank]), matrix,
                                          bytes, cudaMemcpyDeviceToDevice, stream),
                          "staging a matrix for the peers");
  }
}

// fc1 of all experts, then fc2 of all.
std::vector<const void*> pointers(const MokWorkspace& ws, const void* const* fc1,
                                  const void* const* fc2) {
  const int32_t n = ws.geometry.local_experts;
  std::vector<const void*> all(fc1, fc1 + n);
  all.insert(all.end(), fc2, fc2 + n);
  return all;
}

// Maps of both weights of all local experts. DDP may move parameters, so every call looks them up.
struct WeightMaps {
  const CUtensorMap* fc1;
  const CUtensorMap* fc2;
};

// make_fc1(data), make_fc2(data): the map of one matrix.
template <typename MakeFc1, typename MakeFc2>
WeightMaps find_maps(const MokWorkspace& ws, mok::sm90::MapSets& sets,
                     const std::vector<const void*>& matrices, cudaStream_t stream,
                     const MakeFc1& make_fc1, const MakeFc2& make_fc2) {
  const int32_t n = ws.geometry.local_experts;
  const CUtensorMap* maps = sets.find(matrices, stream, [&] {
    std::vector<CUtensorMap> made;
    for (int32_t i = 0; i < n; ++i) made.push_back(make_fc1(matrices[i]));
    for (int32_t i = n; i < 2 * n; ++i) made.push_back(make_fc2(matrices[i]));
    return made;
  });
  return {maps, maps + n};
}

WeightMaps forward_weight_maps(MokWorkspace& ws, const MokWeights& weights, cudaStream_t stream) {
  using namespace mok::sm90;
  const int64_t h = ws.shape.hidden, f = ws.shape.ffn;
  return find_maps(
      ws, ws.weight_maps, pointers(ws, weights.fc1, weights.fc2), stream,
      [&](const void* w) { return make_fc1_map(w, h, f); },
      [&](const void* w) { return make_matrix_map(w, h, f, kTileN); });
}

WeightMaps dgrad_weight_maps(MokWorkspace& ws, const MokWeights& weights, cudaStream_t stream) {
  using namespace mok::sm90;
  constexpr int32_t kBlocks = kTileN / kBoxColumns;
  const int64_t h = ws.shape.hidden, f = ws.shape.ffn;
  return find_maps(
      ws, ws.dgrad_maps, pointers(ws, weights.fc1, weights.fc2), stream,
      [&](const void* w) { return make_block_map(w, 2 * f, h, kTileK, kBlocks); },
      [&](const void* w) { return make_block_map(w, h, f, kTileK, kBlocks); });
}

WeightMaps weight_grad_maps(MokWorkspace& ws, const MokWeightGrads& grads, cudaStream_t stream) {
  using namespace mok::sm90;
  const int64_t h = ws.shape.hidden, f = ws.shape.ffn;
  std::vector<const void*> matrices = pointers(ws, reinterpret_cast<const void* const*>(grads.fc1),
                                               reinterpret_cast<const void* const*>(grads.fc2));
  for (const void*& grad : matrices) {
    if (grad == nullptr) grad = ws.memory.get();  // never written through, but must be an address
  }
  return find_maps(
      ws, ws.grad_maps, matrices, stream, [&](const void* g) { return make_grad_map(g, 2 * f, h); },
      [&](const void* g) { return make_grad_map(g, h, f); });
}

// In boxes of what a warpgroup has of a row block.
CUtensorMap saved_preact_map(const MokWorkspace& ws, const MokSaved& saved) {
  return mok::sm90::make_matrix_map(saved.preact, saved.rows, 2 * int64_t{ws.shape.ffn},
                                    mok::sm90::kWarpgroupRows);
}

mok::sm90::CallParams call_params(const MokWorkspace& ws, const MokRoutes& routes) {
  mok::sm90::CallParams params{};
  params.geometry = ws.geometry;
  params.local = ws.local;
  params.peers = ws.peers;
  params.dog = ws.dog;
  params.tokens = routes.tokens;
  params.expert_ids = routes.expert_ids;
  return params;
}

void run_forward(MokWorkspace& ws, const MokForwardArgs& args) {
  using namespace mok::sm90;
  const auto stream = static_cast<cudaStream_t>(args.stream);
  ForwardParams params{call_params(ws, args.routes)};
  stage_matrix(ws, params.peers.hidden, args.hidden, args.routes.tokens, stream);
  const WeightMaps maps = forward_weight_maps(ws, args.weights, stream);
  start_schedule(ws, args.routes, mok::Op::kForward, stream);
  params.fc1_maps = maps.fc1;
  params.fc2_maps = maps.fc2;
  params.row_ring = ws.row_ring;
  params.saved_blocks = static_cast<int32_t>(args.saved.rows / mok::kBlockRows);
  params.addend = static_cast<const uint8_t*>(args.addend);
  params.output = static_cast<uint8_t*>(args.output);
  ForwardMaps forward_maps = ws.forward_maps;
  if (args.saved.rows > 0) forward_maps.half_preact = saved_preact_map(ws, args.saved);
  check_cuda(launch_forward(params, forward_maps, ws.ctas, stream), "launching the forward kernel");
}

// Gradients that are not added to must also be written for experts that no token was routed to.
// `count`: floats of each.
void zero_empty_grads(const MokWorkspace& ws, float* const* grads, int64_t count,
                      cudaStream_t stream) {
  using namespace mok::sm90;
  for (int32_t first = 0; first < ws.geometry.local_experts; first += EmptyGrads::kMax) {
    EmptyGrads batch{};
    batch.first_expert = first;
    batch.num_experts = std::min(EmptyGrads::kMax, ws.geometry.local_experts - first);
    batch.count = count;
    std::copy_n(grads + first, batch.num_experts, batch.grads);
    check_cuda(launch_zero_empty(batch, ws.local, stream), "zeroing gradients");
  }
}

void run_backward(MokWorkspace& ws, const MokBackwardArgs& args) {
  using namespace mok::sm90;
  const auto stream = static_cast<cudaStream_t>(args.stream);
  const int32_t experts = ws.geometry.local_experts;
  const MokWeightGrads& grads = args.weight_grads;
  BackwardParams params{call_params(ws, args.routes)};
  stage_matrix(ws, params.peers.hidden, args.hidden, args.routes.tokens, stream);
  stage_matrix(ws, params.peers.grad_output, args.grad_output, args.routes.tokens, stream);
  params.output = static_cast<uint8_t*>(args.grad_hidden);
  params.grad_probs = args.grad_probs;
  params.rings = ws.backward_rings;
  params.saved_blocks = static_cast<int32_t>(args.saved.rows / mok::kBlockRows);
  params.accumulate = grads.accumulate != 0;
  for (int32_t i = 0; i < experts; ++i) {
    if (grads.fc1[i] != nullptr) params.fc1_wanted.insert(i);
    if (grads.fc2[i] != nullptr) params.fc2_wanted.insert(i);
  }
  params.fc1_maps = forward_weight_maps(ws, args.weights, stream).fc1;
  const WeightMaps dgrad = dgrad_weight_maps(ws, args.weights, stream);
  params.fc1_dgrad_maps = dgrad.fc1;
  params.fc2_dgrad_maps = dgrad.fc2;
  const WeightMaps wgrad = weight_grad_maps(ws, grads, stream);
  params.fc1_grad_maps = wgrad.fc1;
  params.fc2_grad_maps = wgrad.fc2;
  BackwardMaps maps = ws.backward_maps;
  if (args.saved.rows > 0) maps.saved_preact = saved_preact_map(ws, args.saved);
  start_schedule(ws, args.routes, mok::Op::kBackward, stream);
  if (!params.accumulate) {
    const int64_t matrix = int64_t{ws.shape.hidden} * ws.shape.ffn;
    zero_empty_grads(ws, grads.fc1, 2 * matrix, stream);
    zero_empty_grads(ws, grads.fc2, matrix, stream);
  }
  check_cuda(launch_backward(params, maps, ws.ctas, stream), "launching the backward kernel");
}

void run_schedule(MokWorkspace& ws, MokScheduleArgs& args) {
  using namespace mok::sm90;
  start_schedule(ws, args.routes, mok::Op::kSchedule, static_cast<cudaStream_t>(args.stream));
  export_schedule(ws, call_params(ws, args.routes), args);
  report_refused_call(ws);  // the device has been waited for
}

void run_dispatch(MokWorkspace& ws, const MokDispatchArgs& args) {
  using namespace mok::sm90;
  const auto stream = static_cast<cudaStream_t>(args.stream);
  DispatchParams params{call_params(ws, args.routes)};
  stage_matrix(ws, params.peers.hidden, args.hidden, args.routes.tokens, stream);
  params.capacity = static_cast<int32_t>(args.capacity / mok::kBlockRows);
  params.rows = static_cast<uint8_t*>(args.rows);
  params.row_probs = args.row_probs;
  params.expert_rows = args.expert_rows;
  start_schedule(ws, args.routes, mok::Op::kDispatch, stream);
  check_cuda(launch_await_rows(params, stream), "waiting for the row table");
  check_cuda(launch_dispatch(params, ws.ctas, stream), "launching the dispatch kernel");
}

void run_combine(MokWorkspace& ws, const MokCombineArgs& args) {
  using namespace mok::sm90;
  const auto stream = static_cast<cudaStream_t>(args.stream);
  CombineParams params{call_params(ws, args.routes)};
  params.addend = static_cast<const uint8_t*>(args.addend);
  params.output = static_cast<uint8_t*>(args.output);
  params.capacity = static_cast<int32_t>(args.capacity / mok::kBlockRows);
  params.rows = static_cast<const uint8_t*>(args.rows);
  params.row_probs = args.row_probs;
  params.grad_probs = args.route_probs;
  start_schedule(ws, args.routes, mok::Op::kCombine, stream);
  check_cuda(launch_await_rows(params, stream), "waiting for the row table");
  check_cuda(launch_combine(params, ws.ctas, stream), "launching the combine kernel");
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

MokStatus mok_check(MokWorkspace* ws) {
  return guarded(ws, [&] { report_refused_call(*ws); });
}

MokStatus mok_schedule(MokWorkspace* ws, MokScheduleArgs* args) {
  const auto check = [&] {
    require_probs(args->routes);
    const std::string problem =
        mok::small_row_capacity_text(ws->geometry.max_blocks, args->row_capacity);
    if (!problem.empty()) refuse(problem);
    require_pointer(args->counts, "counts");
    require_pointer(args->block_offsets, "block_offsets");
    require_pointer(args->rows, "rows");
    require_pointer(args->segments, "segments");
  };
  return collective(ws, mok::Op::kSchedule, args->routes, args->stream, check,
                    [&] { run_schedule(*ws, *args); });
}

MokStatus mok_dispatch(MokWorkspace* ws, const MokDispatchArgs* args) {
  const auto check = [&] {
    if (args->row_probs != nullptr) require_probs(args->routes);
    check_rows(*ws, args->capacity, args->rows);
    require_pointer(args->expert_rows, "expert_rows");
    if (args->routes.tokens > 0) require_matrix(args->hidden, "hidden");
  };
  return collective(ws, mok::Op::kDispatch, args->routes, args->stream, check,
                    [&] { run_dispatch(*ws, *args); });
}

MokStatus mok_combine(MokWorkspace* ws, const MokCombineArgs* args) {
  const auto check = [&] {
    check_rows(*ws, args->capacity, args->rows);
    if (args->route_probs != nullptr && args->capacity > 0) {
      require_pointer(args->row_probs, "row_probs");
    }
    if (args->routes.tokens == 0) return;
    require_matrix(args->output, "output");
    if (args->addend != nullptr) require_matrix(args->addend, "addend");
    if (args->row_probs != nullptr) require_pointer(args->route_probs, "route_probs");
  };
  return collective(ws, mok::Op::kCombine, args->routes, args->stream, check,
                    [&] { run_combine(*ws, *args); });
}

MokStatus mok_forward(MokWorkspace* ws, const MokForwardArgs* args) {
  const auto check = [&] {
    require_probs(args->routes);
    check_weights(*ws, args->weights);
    check_saved(args->saved);
    if (args->routes.tokens > 0) {
      require_matrix(args->hidden, "hidden");
      require_matrix(args->output, "output");
      if (args->addend != nullptr) require_matrix(args->addend, "addend");
    }
  };
  return collective(ws, mok::Op::kForward, args->routes, args->stream, check,
                    [&] { run_forward(*ws, *args); });
}

MokStatus mok_backward(MokWorkspace* ws, const MokBackwardArgs* args) {
  const auto check = [&] {
    require_probs(args->routes);
    check_weights(*ws, args->weights);
    check_saved(args->saved);
    check_grads(*ws, args->weight_grads);
    if (args->routes.tokens > 0) {
      require_matrix(args->hidden, "hidden");
      require_matrix(args->grad_output, "grad_output");
      require_matrix(args->grad_hidden, "grad_hidden");
      require_pointer(args->grad_probs, "grad_probs");
    }
  };
  return collective(ws, mok::Op::kBackward, args->routes, args->stream, check,
                    [&] { run_backward(*ws, *args); });
}

}  // extern "C"
