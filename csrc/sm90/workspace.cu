#include "layout.cuh"
#include "workspace.h"

namespace mok::sm90 {

void check_cuda(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  throw Error{MOK_ERR_SYSTEM, std::string(doing) + ": " + cudaGetErrorString(error)};
}

DeviceMemory device_alloc(int64_t bytes) {
  void* p = nullptr;
  check_cuda(cudaMalloc(&p, bytes), "allocating device memory");
  return DeviceMemory(p);
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
  g.fc1_tiles = static_cast<int32_t>(ceil_div(s.ffn, kTileF));
  g.fc2_tiles = static_cast<int32_t>(ceil_div(s.hidden, kTileN));
  // Two waves of FC1 tiles or nearly so: FC1 of a group is then done when its FC2 is claimed.
  constexpr int64_t kMaxMinimum = 64;
  const int64_t waves = ceil_div(18 * int64_t{ctas}, 10 * int64_t{g.fc1_tiles});
  g.min_group_blocks = static_cast<int32_t>(waves < kMaxMinimum ? waves : kMaxMinimum);
  g.max_group_blocks = 2 * g.min_group_blocks;
  g.row_ring_blocks = g.max_group_blocks;
  g.activation_ring_blocks = 2 * g.max_group_blocks;
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
  at.rows_ready = take(int64_t{g.max_blocks} * 4);
  at.activations_ready = take(int64_t{g.max_blocks} * 4);
  at.step_done = take((int64_t{g.max_blocks} + kPanels) * 4);
  at.chunk_offsets = take(int64_t{g.num_experts} * g.max_chunks * 4);
  at.first_row = take(int64_t{g.num_experts} * sizeof(ExpertRows));
  at.expert_groups = take(int64_t{g.num_experts} * sizeof(ExpertGroups));
  at.rank_groups = take(int64_t{g.num_ranks} * 4);
  at.route_group = take(int64_t{g.max_tokens} * g.topk * 2);
  at.bucket = take(int64_t{kReduceBuckets} * g.max_tokens * 4);
  at.row_ring = take(ring_rows(g, g.row_ring_blocks) * g.hidden * 2);
  at.activation_ring = take(ring_rows(g, g.activation_ring_blocks) * g.ffn * 2);
  at.bytes = end;
  return at;
}

namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Looked up at run time, so that the library loads where there is no driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                cudaEnableDefault, &status),
               "looking up cuTensorMapEncodeTiled");
    if (found == nullptr) throw Error{MOK_ERR_SYSTEM, "the driver has no cuTensorMapEncodeTiled"};
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

CUtensorMap encode_map(const void* data, int32_t rank, const cuuint64_t* sizes,
                       const cuuint64_t* strides, const cuuint32_t* box) {
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), sizes,
                     strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error{MOK_ERR_SYSTEM, "cuTensorMapEncodeTiled failed with CUresult " +
                                    std::to_string(static_cast<int32_t>(result))};
  }
  return map;
}

// fc1 is [2F, H]: gate rows, then up rows. One box takes 128 rows of each, and clips at F.
CUtensorMap make_fc1_map(const void* data, const Geometry& g) {
  const auto h = static_cast<cuuint64_t>(g.hidden);
  const auto f = static_cast<cuuint64_t>(g.ffn);
  const cuuint64_t sizes[3] = {h, f, 2};
  const cuuint64_t strides[2] = {h * 2, h * f * 2};
  const cuuint32_t box[3] = {kTileK, kTileF, 2};
  return encode_map(data, 3, sizes, strides, box);
}

uint64_t nanoseconds(int32_t milliseconds, int32_t otherwise) {
  return uint64_t{1'000'000} * (milliseconds > 0 ? milliseconds : otherwise);
}

}  // namespace

CUtensorMap make_matrix_map(const void* data, int64_t rows, int64_t columns, int32_t box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {kTileK, static_cast<cuuint32_t>(box_rows)};
  return encode_map(data, 2, sizes, strides, box);
}

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

  const LocalLayout at = make_local_layout(geometry);
  memory = device_alloc(at.bytes);
  // Only the tables need a defined start; rings are written before they are read.
  check_cuda(cudaMemset(memory.get(), 0, at.row_ring), "clearing the workspace");
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&fault_), sizeof(Fault), cudaHostAllocMapped),
             "allocating pinned memory");
  *fault_ = Fault{};
  auto* base = static_cast<uint8_t*>(memory.get());
  local.state = reinterpret_cast<CallState*>(base + at.state);
  local.blocks = reinterpret_cast<BlockInfo*>(base + at.blocks);
  local.rows_ready = reinterpret_cast<uint32_t*>(base + at.rows_ready);
  local.activations_ready = reinterpret_cast<uint32_t*>(base + at.activations_ready);
  local.step_done = reinterpret_cast<uint32_t*>(base + at.step_done);
  local.chunk_offsets = reinterpret_cast<int32_t*>(base + at.chunk_offsets);
  local.group_first_block = reinterpret_cast<int32_t*>(base + at.group_first_block);
  local.first_row = reinterpret_cast<ExpertRows*>(base + at.first_row);
  local.expert_groups = reinterpret_cast<ExpertGroups*>(base + at.expert_groups);
  local.rank_groups = reinterpret_cast<int32_t*>(base + at.rank_groups);
  local.route_group = reinterpret_cast<uint16_t*>(base + at.route_group);
  local.bucket = reinterpret_cast<int32_t*>(base + at.bucket);
  row_ring = base + at.row_ring;
  activation_ring = base + at.activation_ring;
  const int64_t rows = ring_rows(geometry, geometry.row_ring_blocks);
  const int64_t activation_rows = ring_rows(geometry, geometry.activation_ring_blocks);
  forward_maps.rows = make_matrix_map(row_ring, rows, shape.hidden, kTileM);
  forward_maps.activations = make_matrix_map(activation_ring, activation_rows, shape.ffn, kTileM);
  forward_maps.store_activations =
      make_matrix_map(activation_ring, activation_rows, shape.ffn, kWarpgroupRows);

  const SegmentLayout segment = make_segment_layout(shape);
  for (int32_t r = 0; r < shape.ep_size; ++r) {
    auto* peer = static_cast<uint8_t*>(desc.peers[r]);
    peers.flags[r] = reinterpret_cast<PeerFlags*>(peer + segment.base.flags);
    peers.headers[r] = reinterpret_cast<CallHeader*>(peer + segment.base.headers);
    peers.counts[r] = reinterpret_cast<int32_t*>(peer + segment.base.counts);
    peers.rows[r] = reinterpret_cast<MokRow*>(peer + segment.base.rows);
    peers.hidden[r] = peer + segment.base.hidden;
    peers.slots[r] = peer + segment.base.slots;
    peers.progress[r] = reinterpret_cast<uint64_t*>(peer + segment.progress);
    dog.peer_abort[r] = &peers.flags[r]->abort;
  }
  dog.abort = dog.peer_abort[shape.ep_rank];
  dog.fault = fault_;
  dog.rank = shape.ep_rank;
  dog.num_ranks = shape.ep_size;
  dog.first_wait_ns = nanoseconds(desc.options.first_wait_ms, 10 * 60 * 1000);
  dog.inner_wait_ns = nanoseconds(desc.options.inner_wait_ms, 60 * 1000);
}

MokWorkspace::~MokWorkspace() { cudaFreeHost(fault_); }

const mok::sm90::WeightMaps& MokWorkspace::weight_maps(const MokWeights& weights) {
  using namespace mok::sm90;
  const int32_t n = geometry.local_experts;
  std::vector<const void*> key(weights.fc1, weights.fc1 + n);
  key.insert(key.end(), weights.fc2, weights.fc2 + n);
  const auto found = weight_maps_.find(key);
  if (found != weight_maps_.end()) return found->second;

  std::vector<CUtensorMap> maps;
  for (int32_t i = 0; i < n; ++i) maps.push_back(make_fc1_map(weights.fc1[i], geometry));
  for (int32_t i = 0; i < n; ++i) {
    maps.push_back(make_matrix_map(weights.fc2[i], shape.hidden, shape.ffn, kTileN));
  }
  constexpr size_t kMaxSets = 1024;  // parameters that keep moving must not fill the memory
  if (weight_maps_.size() >= kMaxSets) {
    check_cuda(cudaDeviceSynchronize(), "waiting before old tensor maps are freed");
    weight_maps_.clear();
  }
  const int64_t bytes = static_cast<int64_t>(maps.size() * sizeof(CUtensorMap));
  WeightMaps made{device_alloc(bytes), nullptr, nullptr};
  check_cuda(cudaMemcpy(made.memory.get(), maps.data(), bytes, cudaMemcpyHostToDevice),
             "copying tensor maps; warm up once before capturing a graph");
  made.fc1 = static_cast<const CUtensorMap*>(made.memory.get());
  made.fc2 = made.fc1 + n;
  return weight_maps_.emplace(std::move(key), std::move(made)).first->second;
}

namespace {

// What a wait was for, in the words of the host engine.
struct SiteText {
  const char* phase;
  const char* detail;  // what Fault.detail numbers; NULL: nothing
};

SiteText describe_site(int32_t site) {
  using namespace mok::sm90;
  switch (site) {
    case kWaitPeerCounts:
      return {"entry", "rank"};
    case kWaitPeerRows:
      return {"row tables", "rank"};
    case kWaitRowRing:
      return {"dispatch", "block"};
    case kWaitRows:
      return {"fc1", "block"};
    case kWaitActivationRing:
      return {"fc1 store", "block"};
    case kWaitActivations:
      return {"fc2", "block"};
    case kWaitCombine:
      return {"combine", "token"};
    default:  // barriers between the warps of a CTA
      return {"pipeline", nullptr};
  }
}

}  // namespace

std::string fault_message(const MokWorkspace& ws) {
  using namespace mok::sm90;
  const volatile Fault* fault = ws.fault_;
  if (!fault->raised) return "";
  const int32_t rank = ws.shape.ep_rank;
  const std::string who =
      "rank " + std::to_string(rank) + " of EP " + std::to_string(ws.shape.ep_size);
  if (fault->site == kPeerMismatch) {
    return who + " and rank " + std::to_string(fault->detail) +
           " make different calls, or with different numbers of CTAs; every rank must make the "
           "same "
           "calls in the same order";
  }
  const SiteText text = describe_site(fault->site);
  const int32_t by = fault->by;
  std::string what =
      who + (by == rank ? " waited too long" : " stopped") + " in phase '" + text.phase + "'";
  if (text.detail != nullptr && fault->detail >= 0) {
    what += std::string(", for ") + text.detail + " " + std::to_string(fault->detail);
  }
  if (by != rank) what += ", because rank " + std::to_string(by) + " gave up waiting";
  return what;
}
