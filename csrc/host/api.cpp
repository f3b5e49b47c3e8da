// The C ABI of the host engine: argument checks, and errors as status codes.
#include <new>

#include "../schedule/messages.h"
#include "error.h"
#include "ops.h"

namespace {

thread_local std::string last_error;

}  // namespace

MokStatus mok::fail(MokStatus status, const std::string& what) {
  last_error = what;
  return status;
}

namespace {

using mok::fail;

// Runs `body`, which throws mok::Error. After anything but an invalid argument the workspace is
// poisoned: ranks are no longer at the same call.
template <typename Body>
MokStatus guarded(MokWorkspace* ws, const Body& body) {
  if (ws == nullptr) return fail(MOK_ERR_INVALID_ARGUMENT, "workspace is NULL");
  if (!ws->poisoned.empty()) {
    return fail(MOK_ERR_POISONED, "an earlier call on this workspace failed: " + ws->poisoned);
  }
  try {
    body();
    return MOK_OK;
  } catch (const mok::Error& error) {
    if (error.status != MOK_ERR_INVALID_ARGUMENT) ws->poisoned = error.what();
    return fail(error.status, error.what());
  } catch (const std::exception& error) {
    ws->poisoned = error.what();
    return fail(MOK_ERR_SYSTEM, error.what());
  }
}

// Names the first missing pointer, or returns "".
struct Pointer {
  const char* name;
  const void* value;
};
std::string missing(std::initializer_list<Pointer> pointers) {
  for (const Pointer& p : pointers) {
    if (p.value == nullptr) return std::string(p.name) + " is NULL";
  }
  return "";
}

std::string missing_weights(const MokWorkspace& ws, const MokWeights& weights) {
  const std::string lists = missing({{"weights.fc1", weights.fc1}, {"weights.fc2", weights.fc2}});
  if (!lists.empty()) return lists;
  for (int32_t i = 0; i < mok::local_experts(ws.shape); ++i) {
    if (weights.fc1[i] == nullptr || weights.fc2[i] == nullptr) {
      return "weights of local expert " + std::to_string(i) + " are NULL";
    }
  }
  return "";
}

std::string bad_saved(const MokSaved& saved) {
  if (saved.rows < 0 || saved.rows % mok::kBlockRows != 0) {
    return "saved.rows is " + std::to_string(saved.rows) + "; it must be a multiple of 128";
  }
  return saved.rows > 0 ? missing({{"saved.preact", saved.preact}}) : "";
}

// Of dispatch and combine; `rows` has room for so many.
std::string bad_rows(int64_t capacity, const void* rows, const MokWorkspace& ws) {
  const std::string problem = mok::bad_capacity_text(ws.max_blocks, capacity);
  return problem.empty() && capacity > 0 ? missing({{"rows", rows}}) : problem;
}

std::string first_of(std::initializer_list<std::string> reasons) {
  for (const std::string& reason : reasons) {
    if (!reason.empty()) return reason;
  }
  return "";
}

// The pointers of a call with tokens; without tokens they may be anything.
std::string missing_tokens(const MokRoutes& routes, std::initializer_list<Pointer> pointers) {
  if (routes.tokens <= 0) return "";
  return first_of({missing({{"routes.expert_ids", routes.expert_ids}}), missing(pointers)});
}

}  // namespace

extern "C" {

int32_t mok_abi_version(void) { return MOK_ABI_VERSION; }
const char* mok_engine(void) { return "host"; }
const char* mok_last_error(void) { return last_error.c_str(); }

MokStatus mok_layout(const MokShape* shape, const MokOptions* options, MokLayout* layout) {
  if (const char* why = mok::check_shape(*shape)) return fail(MOK_ERR_INVALID_ARGUMENT, why);
  const mok::TaskShape t = mok::make_task_shape(*shape, mok::choose_workers(*shape, *options));
  const int64_t blocks = mok::max_blocks(*shape);
  const int64_t ring = std::min(blocks, mok::min_ring_blocks(t, MOK_BACKWARD)) * mok::kBlockRows;
  const int64_t row_bytes =
      (2 * int64_t{shape->hidden} + 3 * int64_t{shape->ffn}) * mok::dtype_bytes(shape->dtype) +
      t.fc1_tiles * int64_t{sizeof(float)};
  layout->peer_bytes = mok::make_peer_layout(*shape).bytes;
  layout->local_bytes = ring * row_bytes + 4 * (3 * blocks + mok::local_experts(*shape));
  layout->max_rows = blocks * mok::kBlockRows;
  return MOK_OK;
}

MokStatus mok_workspace_create(const MokWorkspaceDesc* desc, MokWorkspace** workspace) {
  if (const char* why = mok::check_shape(desc->shape)) return fail(MOK_ERR_INVALID_ARGUMENT, why);
  for (int32_t r = 0; r < desc->shape.ep_size; ++r) {
    if (desc->peers[r] == nullptr) {
      return fail(MOK_ERR_INVALID_ARGUMENT, "peer segment " + std::to_string(r) + " is NULL");
    }
  }
  try {
    *workspace = new MokWorkspace(*desc);
    return MOK_OK;
  } catch (const std::bad_alloc&) {
    return fail(MOK_ERR_SYSTEM, "out of memory for the workspace's rings");
  }
}

void mok_workspace_destroy(MokWorkspace* workspace) { delete workspace; }

MokStatus mok_check(MokWorkspace* ws) {
  return guarded(ws, [] {});  // calls report everything themselves
}

MokStatus mok_schedule(MokWorkspace* ws, MokScheduleArgs* args) {
  return guarded(ws, [&] {
    const std::string refusal =
        first_of({missing_tokens(args->routes, {{"routes.probs", args->routes.probs}}),
                  mok::small_row_capacity_text(ws->max_blocks, args->row_capacity),
                  missing({{"counts", args->counts},
                           {"block_offsets", args->block_offsets},
                           {"rows", args->rows},
                           {"segments", args->segments}})});
    mok::Call call(*ws, mok::Op::kSchedule, args->routes, nullptr, nullptr, refusal);
    mok::run_schedule(call, *args);
  });
}

MokStatus mok_dispatch(MokWorkspace* ws, const MokDispatchArgs* args) {
  return guarded(ws, [&] {
    const std::string refusal = first_of(
        {missing_tokens(args->routes, {{"hidden", args->hidden}}),
         bad_rows(args->capacity, args->rows, *ws), missing({{"expert_rows", args->expert_rows}}),
         args->row_probs ? missing_tokens(args->routes, {{"routes.probs", args->routes.probs}})
                         : ""});
    mok::Call call(*ws, mok::Op::kDispatch, args->routes, args->hidden, nullptr, refusal);
    mok::run_dispatch(call, *args);
  });
}

MokStatus mok_combine(MokWorkspace* ws, const MokCombineArgs* args) {
  return guarded(ws, [&] {
    const std::string refusal = first_of(
        {missing_tokens(args->routes, {{"output", args->output}}),
         bad_rows(args->capacity, args->rows, *ws),
         args->row_probs ? missing_tokens(args->routes, {{"route_probs", args->route_probs}}) : "",
         args->route_probs && args->capacity > 0 ? missing({{"row_probs", args->row_probs}}) : ""});
    mok::Call call(*ws, mok::Op::kCombine, args->routes, nullptr, nullptr, refusal);
    mok::run_combine(call, *args);
  });
}

MokStatus mok_forward(MokWorkspace* ws, const MokForwardArgs* args) {
  return guarded(ws, [&] {
    const std::string refusal =
        first_of({missing_tokens(args->routes, {{"routes.probs", args->routes.probs},
                                                {"hidden", args->hidden},
                                                {"output", args->output}}),
                  missing_weights(*ws, args->weights), bad_saved(args->saved)});
    mok::Call call(*ws, mok::Op::kForward, args->routes, args->hidden, nullptr, refusal);
    mok::run_forward(call, *args);
  });
}

MokStatus mok_backward(MokWorkspace* ws, const MokBackwardArgs* args) {
  return guarded(ws, [&] {
    const std::string refusal =
        first_of({missing_tokens(args->routes, {{"routes.probs", args->routes.probs},
                                                {"hidden", args->hidden},
                                                {"grad_output", args->grad_output},
                                                {"grad_hidden", args->grad_hidden},
                                                {"grad_probs", args->grad_probs}}),
                  missing_weights(*ws, args->weights), bad_saved(args->saved),
                  missing({{"weight_grads.fc1", args->weight_grads.fc1},
                           {"weight_grads.fc2", args->weight_grads.fc2}})});
    mok::Call call(*ws, mok::Op::kBackward, args->routes, args->hidden, args->grad_output, refusal);
    mok::run_backward(call, *args);
  });
}

}  // extern "C"
