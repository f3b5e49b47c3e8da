#include "workspace.h"

#include <sched.h>

#include <algorithm>

namespace mok {
namespace {

int32_t available_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

MokOptions with_defaults(MokOptions options) {
  if (options.first_wait_ms <= 0) options.first_wait_ms = 10 * 60 * 1000;
  if (options.inner_wait_ms <= 0) options.inner_wait_ms = 60 * 1000;
  return options;
}

std::unique_ptr<std::atomic<int32_t>[]> make_counters(int64_t n) {
  return std::unique_ptr<std::atomic<int32_t>[]>(new std::atomic<int32_t>[n]());
}

}  // namespace

int32_t choose_workers(const MokShape& shape, const MokOptions& options) {
  // The ranks of a host engine share one machine.
  return options.workers > 0 ? options.workers : std::max(1, available_cpus() / shape.ep_size);
}

TaskShape make_task_shape(const MokShape& s, int32_t workers) {
  TaskShape t{};
  t.fc1_tiles = int32_t(ceil_div(s.ffn, kTile));
  t.fc2_tiles = int32_t(ceil_div(s.hidden, kTile));
  t.wgrad_tiles =
      int32_t(ceil_div(2 * int64_t{s.ffn}, kTile) + ceil_div(s.ffn, kTile)) * t.fc2_tiles;
  t.group_blocks = std::max(1, int32_t(ceil_div(2 * int64_t{workers}, t.fc1_tiles)));
  t.cut_blocks = 8;
  return t;
}

}  // namespace mok

MokWorkspace::MokWorkspace(const MokWorkspaceDesc& desc)
    : shape(desc.shape),
      options(mok::with_defaults(desc.options)),
      workers(mok::choose_workers(desc.shape, desc.options)),
      tasks(mok::make_task_shape(desc.shape, workers)),
      layout(mok::make_peer_layout(desc.shape)),
      max_blocks(mok::max_blocks(desc.shape)) {
  for (int32_t r = 0; r < shape.ep_size; ++r) {
    peers.push_back(static_cast<std::byte*>(desc.peers[r]));
  }
  rings.blocks = std::min(max_blocks, mok::min_ring_blocks(tasks, MOK_BACKWARD));
  const int64_t rows = rings.blocks * mok::kBlockRows;
  const int64_t bytes = mok::dtype_bytes(shape.dtype);
  // Left uninitialised on purpose: whatever reads past the written rows would show.
  rings.hidden.reset(new std::byte[rows * shape.hidden * bytes]);
  rings.grad_output.reset(new std::byte[rows * shape.hidden * bytes]);
  rings.act.reset(new std::byte[rows * shape.ffn * bytes]);
  rings.grad_preact.reset(new std::byte[rows * 2 * shape.ffn * bytes]);
  rings.grad_prob_parts.reset(new float[rows * tasks.fc1_tiles]);
  counters.dispatched = mok::make_counters(max_blocks);
  counters.fc1 = mok::make_counters(max_blocks);
  counters.fc2 = mok::make_counters(max_blocks);
  counters.wgrad = mok::make_counters(mok::local_experts(shape));
}
