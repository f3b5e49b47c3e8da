#include "layout.cuh"
#include "standalone.h"
#include "workspace.h"

namespace mok::sm90 {

void check_cuda(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch that asks would report it
  throw Error{MOK_ERR_SYSTEM, std::string(doing) + ": " + cudaGetErrorString(error)};
}

SegmentLayout make_segment_layout(const MokShape& shape) {
  SegmentLayout at{};
  at.base = make_peer_layout(shape);
  at.progress = align_up(at.base.bytes, 256);
  at.bytes = align_up(at.progress + 8 * int64_t{shape.ep_size}, 256);
  return at;
}

Geometry make_geometry(const MokShape& s, int32_t ctas) {
  Geometry g{};
  g.num_ranks = s.ep_size;
  g.rank = s.ep_rank;
  g.num_experts = s.num_experts;
  g.local_experts = local_experts(s);
  g.topk = s.topk;
  g.hidden = s.hidden;
  g.ffn = s.ffn;
  g.max_tokens = s.max_tokens;
  g.max_blocks = static_cast<int32_t>(max_blocks(s));
  g.max_chunks = static_cast<int32_t>(align_up(ceil_div(s.max_tokens, chunk_tokens(s.topk)), 4));
  g.max_cuts = g.max_blocks / kCutBlocks + g.local_experts;
  g.fc1_tiles = static_cast<int32_t>(ceil_div(s.ffn, kTileF));
  g.fc2_tiles = static_cast<int32_t>(ceil_div(s.hidden, kTileN));
  g.fc2_dgrad_tiles = static_cast<int32_t>(ceil_div(s.ffn, kTileN));
  g.fc1_wgrad_tiles = static_cast<int32_t>(ceil_div(2 * int64_t{s.ffn}, kTileM)) * g.fc2_tiles;
  g.fc2_wgrad_tiles = static_cast<int32_t>(ceil_div(s.hidden, kTileM)) * g.fc2_dgrad_tiles;
  // Two waves of FC1 tiles or nearly so: FC1 of a group is then done when its FC2 is claimed.
  constexpr int64_t kMaxMinimum = 64;
  const int64_t waves = ceil_div(18 * int64_t{ctas}, 10 * int64_t{g.fc1_tiles});
  g.min_group_blocks = static_cast<int32_t>(waves < kMaxMinimum ? waves : kMaxMinimum);
  g.max_group_blocks = static_cast<int32_t>(align_up(2 * g.min_group_blocks, kCutBlocks));
  g.row_ring_blocks = g.max_group_blocks;
  g.activation_ring_blocks = 2 * g.max_group_blocks;
  g.grad_ring_blocks = 2 * g.max_group_blocks;
  return g;
}

// A ring never needs more than the worst case.
static int64_t ring_rows(const Geometry& g, int32_t blocks) {
  return kBlockRows * (g.max_blocks < blocks ? g.max_blocks : blocks);
}

LocalLayout make_local_layout(const Geometry& g) {
  int64_t end = 0;
  const auto take = [&end](int64_t bytes) {
    const int64_t at = end;
    end = align_up(end + bytes, 1024);
    return at;
  };
  LocalLayout at{};
  at.state = take(sizeof(CallState));
  at.blocks = take(int64_t{g.max_blocks} * sizeof(BlockInfo));
  at.group_first_block = take((int64_t{g.max_blocks} + 1) * 4);
  at.cuts = take(int64_t{g.max_cuts} * sizeof(CutInfo));
  at.group_first_cut = take((int64_t{g.max_blocks} + 1) * 4);
  at.expert_first_cut = take((int64_t{g.local_experts} + 1) * 4);
  at.rows_ready = take(int64_t{g.max_blocks} * 4);
  at.activations_ready = take(int64_t{g.max_blocks} * 4);
  at.step_done = take((int64_t{g.max_blocks} + kPanels) * 4);
  at.grads_ready = take(int64_t{g.max_blocks} * 4);
  at.group_grads_ready = take(int64_t{g.max_blocks} * 4);
  at.group_released = take(int64_t{g.max_blocks} * 4);
  at.cuts_added = take(int64_t{g.local_experts} * 4);
  at.counters_end = end;
  at.chunk_offsets = take(int64_t{g.num_experts} * g.max_chunks * 4);
  at.first_row = take(int64_t{g.num_experts} * sizeof(ExpertRows));
  at.expert_groups = take(int64_t{g.num_experts} * sizeof(ExpertGroups));
  at.rank_groups = take(int64_t{g.num_ranks} * 4);
  at.route_group = take(int64_t{g.max_tokens} * g.topk * 2);
  at.slot_row = take(int64_t{g.max_tokens} * g.topk * 4);
  at.bucket = take(int64_t{kReduceBuckets} * g.max_tokens * 4);
  // The rings of forward and backward share their memory.
  at.row_ring = take(ring_rows(g, g.row_ring_blocks) * g.hidden * 2);
  at.activation_ring = take(ring_rows(g, g.activation_ring_blocks) * g.ffn * 2);
  const int64_t forward_end = end;
  end = at.row_ring;
  const int64_t rows = ring_rows(g, g.grad_ring_blocks);
  at.grad.hidden_ring = take(rows * g.hidden * 2);
  at.grad.grad_output_ring = take(rows * g.hidden * 2);
  at.grad.preact_ring = take(rows * 2 * g.ffn * 2);
  at.grad.activation_ring = take(rows * g.ffn * 2);
  at.grad.prob_parts = take(rows * g.fc2_dgrad_tiles * 4);
  at.bytes = end > forward_end ? end : forward_end;
  return at;
}

namespace {

void load_all_kernels() {
  for (const auto load :
       {load_schedule_kernels, load_forward_kernel, load_backward_kernels, load_dispatch_kernel,
        load_combine_kernel, load_export_kernels, load_routes_kernels, load_map_kernels}) {
    check_cuda(load(), "loading the kernels");
  }
}

uint64_t nanoseconds(int32_t milliseconds, int32_t otherwise) {
  return uint64_t{1'000'000} * (milliseconds > 0 ? milliseconds : otherwise);
}

}  // namespace
}  // namespace mok::sm90

MokWorkspace::MokWorkspace(const MokWorkspaceDesc& desc) : shape(desc.shape) {
  using namespace mok;
  using namespace mok::sm90;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  int32_t major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "asking for the compute capability");
  if (major != 9) {
    throw Error{MOK_ERR_UNSUPPORTED, "this engine is for Hopper GPUs (compute capability 9.0)"};
  }
  int32_t sms = 0;
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
             "asking for the number of SMs");
  ctas = desc.options.workers > 0 ? desc.options.workers : sms;
  geometry = make_geometry(shape, ctas);
  load_all_kernels();

  const LocalLayout at = make_local_layout(geometry);
  memory = device_alloc(at.bytes);
  // Only the tables need a defined start; rings are written before they are read.
  check_cuda(cudaMemset(memory.get(), 0, at.row_ring), "clearing the workspace");
  // Calls may come on streams that do not wait for this one.
  check_cuda(cudaStreamSynchronize(nullptr), "clearing the workspace");
  auto* base = static_cast<uint8_t*>(memory.get());
  local.state = reinterpret_cast<CallState*>(base + at.state);
  local.blocks = reinterpret_cast<BlockInfo*>(base + at.blocks);
  local.rows_ready = reinterpret_cast<uint32_t*>(base + at.rows_ready);
  local.activations_ready = reinterpret_cast<uint32_t*>(base + at.activations_ready);
  local.step_done = reinterpret_cast<uint32_t*>(base + at.step_done);
  local.chunk_offsets = reinterpret_cast<int32_t*>(base + at.chunk_offsets);
  local.grads_ready = reinterpret_cast<uint32_t*>(base + at.grads_ready);
  local.group_grads_ready = reinterpret_cast<uint32_t*>(base + at.group_grads_ready);
  local.group_released = reinterpret_cast<uint32_t*>(base + at.group_released);
  local.cuts_added = reinterpret_cast<uint32_t*>(base + at.cuts_added);
  local.counter_words = (at.counters_end - at.rows_ready) / 4;
  local.group_first_block = reinterpret_cast<int32_t*>(base + at.group_first_block);
  local.cuts = reinterpret_cast<CutInfo*>(base + at.cuts);
  local.group_first_cut = reinterpret_cast<int32_t*>(base + at.group_first_cut);
  local.expert_first_cut = reinterpret_cast<int32_t*>(base + at.expert_first_cut);
  local.first_row = reinterpret_cast<ExpertRows*>(base + at.first_row);
  local.expert_groups = reinterpret_cast<ExpertGroups*>(base + at.expert_groups);
  local.rank_groups = reinterpret_cast<int32_t*>(base + at.rank_groups);
  local.route_group = reinterpret_cast<uint16_t*>(base + at.route_group);
  local.slot_row = reinterpret_cast<int32_t*>(base + at.slot_row);
  local.bucket = reinterpret_cast<int32_t*>(base + at.bucket);
  set_up_forward(at);
  set_up_backward(at);
  for (mok::sm90::MapSets* maps : {&weight_maps, &dgrad_maps, &grad_maps}) {
    maps->reserve(2 * geometry.local_experts);
  }

  const SegmentLayout segment = make_segment_layout(shape);
  for (int32_t r = 0; r < shape.ep_size; ++r) {
    auto* peer = static_cast<uint8_t*>(desc.peers[r]);
    peers.flags[r] = reinterpret_cast<PeerFlags*>(peer + segment.base.flags);
    peers.headers[r] = reinterpret_cast<CallHeader*>(peer + segment.base.headers);
    peers.counts[r] = reinterpret_cast<int32_t*>(peer + segment.base.counts);
    peers.rows[r] = reinterpret_cast<MokRow*>(peer + segment.base.rows);
    peers.hidden[r] = peer + segment.base.hidden;
    peers.grad_output[r] = peer + segment.base.grad_output;
    peers.slots[r] = peer + segment.base.slots;
    peers.prob_slots[r] = reinterpret_cast<float*>(peer + segment.base.prob_slots);
    peers.progress[r] = reinterpret_cast<uint64_t*>(peer + segment.progress);
    dog.peer_abort[r] = &peers.flags[r]->abort;
  }
  dog.abort = dog.peer_abort[shape.ep_rank];
  dog.failed_wait = &local.state->failed_wait;
  dog.fault = faults.fault();
  dog.rank = shape.ep_rank;
  dog.num_ranks = shape.ep_size;
  dog.first_wait_ns = nanoseconds(desc.options.first_wait_ms, 10 * 60 * 1000);
  dog.inner_wait_ns = nanoseconds(desc.options.inner_wait_ms, 60 * 1000);
}

void MokWorkspace::set_up_forward(const mok::sm90::LocalLayout& at) {
  using namespace mok::sm90;
  auto* base = static_cast<uint8_t*>(memory.get());
  uint8_t* const rows = base + at.row_ring;
  uint8_t* const activations = base + at.activation_ring;
  const int64_t num_rows = ring_rows(geometry, geometry.row_ring_blocks);
  const int64_t num_activations = ring_rows(geometry, geometry.activation_ring_blocks);
  row_ring = rows;
  forward_maps.rows = make_matrix_map(rows, num_rows, shape.hidden, kTileM);
  forward_maps.half_rows = make_matrix_map(rows, num_rows, shape.hidden, kWarpgroupRows);
  forward_maps.activations = make_matrix_map(activations, num_activations, shape.ffn, kTileM);
  forward_maps.half_activations =
      make_matrix_map(activations, num_activations, shape.ffn, kWarpgroupRows);
}

void MokWorkspace::set_up_backward(const mok::sm90::LocalLayout& at) {
  using namespace mok::sm90;
  auto* base = static_cast<uint8_t*>(memory.get());
  const int64_t rows = ring_rows(geometry, geometry.grad_ring_blocks);
  const int64_t h = shape.hidden, f = shape.ffn;
  BackwardRings& rings = backward_rings;
  rings.hidden = base + at.grad.hidden_ring;
  rings.grad_output = base + at.grad.grad_output_ring;
  rings.prob_parts = reinterpret_cast<float*>(base + at.grad.prob_parts);
  uint8_t* const preact = base + at.grad.preact_ring;
  uint8_t* const activations = base + at.grad.activation_ring;

  constexpr int32_t kBlocksM = kTileM / kBoxColumns, kBlocksN = kTileN / kBoxColumns;
  BackwardMaps& maps = backward_maps;
  maps.hidden_rows = make_block_map(rings.hidden, rows, h, kTileM, 1);
  maps.grad_output_rows = make_block_map(rings.grad_output, rows, h, kTileM, 1);
  maps.grad_preact_rows = make_block_map(preact, rows, 2 * f, kTileM, 1);
  maps.grad_preact_columns = make_block_map(preact, rows, 2 * f, kTileK, kBlocksM);
  maps.hidden_columns = make_block_map(rings.hidden, rows, h, kTileK, kBlocksN);
  maps.grad_output_columns = make_block_map(rings.grad_output, rows, h, kTileK, kBlocksM);
  maps.activation_columns = make_block_map(activations, rows, f, kTileK, kBlocksN);
  maps.preact = make_matrix_map(preact, rows, 2 * f, kWarpgroupRows);
  maps.activations = make_matrix_map(activations, rows, f, kWarpgroupRows);
}
