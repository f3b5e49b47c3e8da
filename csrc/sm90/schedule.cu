#include "launch.cuh"
#include "layout.cuh"
#include "schedule.h"
#include "sync.cuh"
#include "task.cuh"

namespace mok::sm90 {
namespace {

constexpr int32_t kWarps = kChunkRoutes / 32;

// The routes of a chunk: one a thread, in (token, k) order.
struct ChunkRoute {
  int32_t token;
  int32_t k;
  int32_t expert;  // -1: no route, or beyond the last token
  bool valid;      // the expert id is in range; expert is -1 where it is not

  MOK_DEVICE explicit ChunkRoute(const ScheduleParams& p) : expert(-1), valid(true) {
    const int32_t topk = p.geometry.topk;
    const int32_t in_chunk = threadIdx.x / topk;
    token = blockIdx.x * chunk_tokens(topk) + in_chunk;
    k = threadIdx.x - in_chunk * topk;
    if (in_chunk < chunk_tokens(topk) && token < p.tokens) {
      expert = p.expert_ids[int64_t{token} * topk + k];
      valid = expert >= -1 && expert < p.geometry.num_experts;
      if (!valid) expert = -1;
    }
  }
};

// ---- 1. Count ----------------------------------------------------------------------------------

// Zeroes the counters of this call and counts each chunk's routes to each expert.
__global__ void __launch_bounds__(kChunkRoutes)
    count_kernel(const __grid_constant__ ScheduleParams p) {
  __shared__ int32_t count[MOK_MAX_EXPERTS];
  const Geometry& g = p.geometry;
  let_next_kernel_start();
  for (int32_t e = threadIdx.x; e < g.num_experts; e += blockDim.x) count[e] = 0;
  const int32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < p.local.counter_words; i += gridDim.x * blockDim.x) {
    p.local.rows_ready[i] = 0;
  }
  if (first == 0) p.local.state->counters = CallState::Counters{};
  __syncthreads();
  const ChunkRoute route(p);
  if (route.expert >= 0) atomicAdd(&count[route.expert], 1);
  if (!route.valid) {
    const uint32_t index = static_cast<uint32_t>(route.token) * g.topk + route.k;
    atomicMax(&p.local.state->bad_route, ~index);
  }
  __syncthreads();
  for (int32_t e = threadIdx.x; e < g.num_experts; e += blockDim.x) {
    p.local.chunk_offsets[int64_t{e} * g.max_chunks + blockIdx.x] = count[e];
  }
}

// ---- 2. Exchange -------------------------------------------------------------------------------

struct Sum {
  MOK_DEVICE int32_t operator()(int32_t a, int32_t b) const { return a + b; }
};
struct Max {
  MOK_DEVICE int32_t operator()(int32_t a, int32_t b) const { return max(a, b); }
};

template <typename Op>
MOK_DEVICE int32_t warp_scan(int32_t value, Op op) {
  const int32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int32_t d = 1; d < 32; d *= 2) {
    const int32_t other = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value = op(value, other);
  }
  return value;
}

// Inclusive scan over the threads of the CTA; `scratch` holds one word a warp.
template <typename Op>
MOK_DEVICE int32_t block_scan(int32_t value, int32_t* scratch, Op op) {
  const int32_t lane = threadIdx.x % 32;
  const int32_t warp = threadIdx.x / 32;
  value = warp_scan(value, op);
  __syncthreads();  // the scan before may still be reading
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) scratch[lane] = warp_scan(scratch[lane], op);
  __syncthreads();
  return warp > 0 ? op(value, scratch[warp - 1]) : value;
}

// Turns the counts of an expert's chunks into offsets; returns their sum. By a warp; `counts` has
// room for whole groups of 4 chunks, of which those beyond `chunks` are undefined.
MOK_DEVICE int32_t scan_chunks(int32_t* counts, int32_t chunks) {
  const int32_t lane = threadIdx.x % 32;
  int32_t total = 0;
  for (int32_t first = 0; first < chunks; first += 128) {
    const int32_t chunk = first + lane * 4;
    int4 c = make_int4(0, 0, 0, 0);
    if (chunk < chunks) c = *reinterpret_cast<const int4*>(counts + chunk);
    if (chunk + 1 >= chunks) c.y = 0;
    if (chunk + 2 >= chunks) c.z = 0;
    if (chunk + 3 >= chunks) c.w = 0;
    const int32_t mine = c.x + c.y + c.z + c.w;
    const int32_t sum = warp_scan(mine, Sum{});
    const int32_t before = total + sum - mine;
    if (chunk < chunks) {
      *reinterpret_cast<int4*>(counts + chunk) =
          make_int4(before, before + c.x, before + c.x + c.y, before + c.x + c.y + c.z);
    }
    total += __shfl_sync(~0u, sum, 31);
  }
  return total;
}

// Tells every rank `tokens`, which may be a Refusal, and this rank's counts. By a whole CTA.
MOK_DEVICE void announce(const ScheduleParams& p, uint32_t epoch, int32_t tokens,
                         const int32_t* totals) {
  const Geometry& g = p.geometry;
  const int32_t bank = epoch % 2;
  const int64_t mine = (int64_t{bank} * g.num_ranks + g.rank) * g.num_experts;
  if (tokens >= 0) {
    for (int32_t r = 0; r < g.num_ranks; ++r) {
      for (int32_t e = threadIdx.x; e < g.num_experts; e += blockDim.x) {
        p.peers.counts[r][mine + e] = totals[e];
      }
    }
  }
  if (threadIdx.x < g.num_ranks) {
    p.peers.headers[threadIdx.x][bank * g.num_ranks + g.rank] = CallHeader{p.op, tokens};
  }
  if (g.num_ranks == 1) return;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < g.num_ranks) {
    release_store(&p.peers.flags[threadIdx.x]->counts[g.rank], epoch);
  }
}

// Waits until every rank has announced itself. False after a failure.
MOK_DEVICE bool await_announcements(const ScheduleParams& p, uint32_t epoch) {
  const Geometry& g = p.geometry;
  bool ok = true;
  if (g.num_ranks > 1 && threadIdx.x < g.num_ranks) {
    ok = wait_epoch(&p.peers.flags[g.rank]->counts[threadIdx.x], epoch, p.dog, kWaitPeerCounts,
                    threadIdx.x, p.dog.first_wait_ns);
    acquire_fence();
  }
  return __syncthreads_and(ok);
}

// Leaves word of a refused call, unless the host has not read the last one.
MOK_DEVICE void record_refusal(const ScheduleParams& p, const RefusedCall& call) {
  volatile RefusedCall* record = p.refused_call;
  if (record->raised) return;
  record->rank = call.rank;
  record->op = call.op;
  record->tokens = call.tokens;
  record->my_op = call.my_op;
  record->route = call.route;
  record->expert = call.expert;
  record->epoch = call.epoch;
  __threadfence_system();
  record->raised = 1;
}

// Whether a rank refuses the call or makes another one. All ranks see the same headers, so all
// leave the call together, and are in step at the next.
MOK_DEVICE bool call_refused(const ScheduleParams& p, uint32_t epoch, uint32_t bad_route) {
  __shared__ int32_t first;  // rank that spoils it
  const Geometry& g = p.geometry;
  if (threadIdx.x == 0) first = MOK_MAX_RANKS;
  __syncthreads();
  CallHeader header{};
  if (threadIdx.x < g.num_ranks) {
    header = p.peers.headers[g.rank][epoch % 2 * g.num_ranks + threadIdx.x];
    if (header.tokens < 0 || header.op != p.op) {
      atomicMin(&first, static_cast<int32_t>(threadIdx.x));
    }
  }
  __syncthreads();
  if (first == MOK_MAX_RANKS) return false;
  if (threadIdx.x == first) {
    RefusedCall call{first, header.op, header.tokens, p.op, -1, 0, epoch, 0};
    if (first == g.rank && bad_route != 0) {
      call.route = static_cast<int32_t>(~bad_route);
      call.expert = p.expert_ids[call.route];
    }
    record_refusal(p, call);
    p.local.state->refused = 1;
  }
  return true;
}

// Where the group that begins with expert `first` ends, unless experts are split; `end`: of the
// experts of one rank. A group takes experts until it has min_group_blocks or the next would be too
// many.
MOK_DEVICE int32_t group_end(const Geometry& g, const int32_t* first_block, int32_t first,
                             int32_t end) {
  const int32_t begin = first_block[first];
  int32_t low = first + 1;
  int32_t high = end;
  while (low < high) {
    const int32_t mid = (low + high) / 2;
    if (first_block[mid] - begin >= g.min_group_blocks ||
        first_block[mid + 1] - begin > g.max_group_blocks) {
      high = mid;
    } else {
      low = mid + 1;
    }
  }
  return low;
}

// The groups of one rank, by one thread: from the end of one group to the next. Marks the expert
// that begins a group; an expert larger than a group begins several, of about the same size.
// Returns how many there are.
MOK_DEVICE int32_t walk_groups(const Geometry& g, const int32_t* first_block, const int32_t* ends,
                               int32_t first, int32_t end, ExpertGroups* begins,
                               int32_t* group_first_block) {
  int32_t groups = 0;
  for (int32_t i = first; i < end;) {
    const int32_t next = ends[i];
    const int32_t n = first_block[next] - first_block[i];
    if (n > 0) {
      const int32_t chunks = (n + g.max_group_blocks - 1) / g.max_group_blocks;
      const int32_t chunk =
          chunks == 1 ? INT32_MAX : static_cast<int32_t>(align_up(ceil_div(n, chunks), kCutBlocks));
      begins[i] = ExpertGroups{groups, chunk};
      for (int32_t at = 0; at < n; at += min(chunk, n - at)) {
        if (group_first_block != nullptr) {
          group_first_block[groups] = first_block[i] - first_block[first] + at;
        }
        ++groups;
      }
    }
    i = next;
  }
  if (group_first_block != nullptr) {
    group_first_block[groups] = first_block[end] - first_block[first];
  }
  return groups;
}

// The cuts of this rank's experts, by the whole CTA.
MOK_DEVICE void write_cuts(const ScheduleParams& p, const int32_t* first_block,
                           const int32_t* expert_rows, int32_t* scratch) {
  const Geometry& g = p.geometry;
  const int32_t i = threadIdx.x;  // local expert
  const int32_t global = g.rank * g.local_experts + i;
  const bool is_mine = i < g.local_experts;
  const int32_t blocks = is_mine ? first_block[global + 1] - first_block[global] : 0;
  const int32_t cuts = (blocks + kCutBlocks - 1) / kCutBlocks;
  const int32_t end = block_scan(cuts, scratch, Sum{});
  if (!is_mine) return;
  if (i == 0) p.local.expert_first_cut[0] = 0;
  p.local.expert_first_cut[i + 1] = end;
  const int32_t begin = first_block[global] - first_block[g.rank * g.local_experts];
  for (int32_t c = 0; c < cuts; ++c) {
    const int32_t rows_before = c * kCutBlocks * static_cast<int32_t>(kBlockRows);
    const int32_t rows =
        min(expert_rows[global] - rows_before, kCutBlocks * static_cast<int32_t>(kBlockRows));
    p.local.cuts[end - cuts + c] =
        CutInfo{begin + c * kCutBlocks, c, static_cast<int16_t>(i),
                static_cast<int16_t>(ceil_div(rows, kTileK)), c + 1 < cuts};
  }
}

// first_block: of this rank's experts, counted from any block. Groups begin where cuts do.
MOK_DEVICE int32_t first_cut_of_group(const ScheduleParams& p, const int32_t* first_block,
                                      int32_t group) {
  const int32_t num_local = p.geometry.local_experts;
  if (group == p.local.state->num_groups) return p.local.expert_first_cut[num_local];
  const int32_t block = p.local.group_first_block[group];
  const int32_t expert = p.local.blocks[block].expert;
  const int32_t in_expert = block - (first_block[expert] - first_block[0]);
  return p.local.expert_first_cut[expert] + in_expert / kCutBlocks;
}

// One CTA: sums the chunks, exchanges counts, and derives all offsets. Thread e does expert e.
__global__ void __launch_bounds__(1024, 1)
    exchange_kernel(const __grid_constant__ ScheduleParams p) {
  static_assert(MOK_MAX_EXPERTS <= 1024, "one expert a thread");
  __shared__ int32_t totals[MOK_MAX_EXPERTS];
  __shared__ int32_t first_block[MOK_MAX_EXPERTS + 1];  // over the experts of all ranks
  __shared__ int32_t expert_rows[MOK_MAX_EXPERTS];
  __shared__ int32_t ends[MOK_MAX_EXPERTS];
  __shared__ ExpertGroups begins[MOK_MAX_EXPERTS];
  __shared__ int32_t scratch[32];
  const Geometry& g = p.geometry;
  wait_for_previous_kernel();
  CallState& state = *p.local.state;
  const int32_t chunks = ceil_div(p.tokens, chunk_tokens(g.topk));
#pragma unroll 4
  for (int32_t e = threadIdx.x / 32; e < g.num_experts; e += 32) {
    const int32_t total = scan_chunks(p.local.chunk_offsets + int64_t{e} * g.max_chunks, chunks);
    if (threadIdx.x % 32 == 0) totals[e] = total;
  }
  const uint32_t epoch = state.epoch + 1;
  const uint32_t bad_route = state.bad_route;
  __syncthreads();
  if (threadIdx.x == 0) {
    state.epoch = epoch;
    state.bad_route = 0;
    state.refused = 0;
  }
  announce(p, epoch, bad_route == 0 ? p.tokens : kRefusedExpertId, totals);
  if (!await_announcements(p, epoch) || call_refused(p, epoch, bad_route)) return;
  let_next_kernel_start();  // not before the peers are here: it would hold SMs that others may need

  const int32_t expert = threadIdx.x;
  int32_t rows = 0;
  int32_t before_me = 0;
  if (g.num_ranks == 1) {
    if (expert < g.num_experts) rows = totals[expert];
  } else if (expert < g.num_experts) {
    const int32_t* counts =
        p.peers.counts[g.rank] + int64_t{epoch % 2} * g.num_ranks * g.num_experts + expert;
    for (int32_t r = 0; r < g.num_ranks; ++r) {
      if (r == g.rank) before_me = rows;
      rows += counts[int64_t{r} * g.num_experts];
    }
  }
  if (expert < g.num_experts) expert_rows[expert] = rows;
  const int32_t blocks = static_cast<int32_t>(ceil_div(rows, kBlockRows));
  const int32_t end = block_scan(blocks, scratch, Sum{});
  if (expert < g.num_experts) first_block[expert + 1] = end;
  if (expert == 0) first_block[0] = 0;
  __syncthreads();

  if (expert < g.num_experts) {
    const int32_t owner = expert / g.local_experts;
    const int32_t block = first_block[expert] - first_block[owner * g.local_experts];
    p.local.first_row[expert] = ExpertRows{block, before_me};
    ends[expert] = group_end(g, first_block, expert, (owner + 1) * g.local_experts);
    begins[expert].first = -1;
  }
  __syncthreads();
  if (threadIdx.x < g.num_ranks) {
    const int32_t first = threadIdx.x * g.local_experts;
    const bool me = threadIdx.x == g.rank;
    const int32_t groups = walk_groups(g, first_block, ends, first, first + g.local_experts, begins,
                                       me ? p.local.group_first_block : nullptr);
    p.local.rank_groups[threadIdx.x] = groups;
    if (me) {
      state.num_blocks = first_block[first + g.local_experts] - first_block[first];
      state.num_groups = groups;
    }
  }
  __syncthreads();
  // Every expert belongs to the last group that begins at or before it.
  const bool begins_group = expert < g.num_experts && begins[expert].first >= 0;
  const int32_t group_begin = block_scan(begins_group ? expert : 0, scratch, Max{});
  if (expert < g.num_experts) p.local.expert_groups[expert] = begins[group_begin];
  write_cuts(p, first_block, expert_rows, scratch);
  __syncthreads();
  const int32_t my_first = first_block[g.rank * g.local_experts];
  for (int32_t i = threadIdx.x / 32; i < g.local_experts; i += 32) {
    const int32_t global = g.rank * g.local_experts + i;
    const int32_t expert_blocks = first_block[global + 1] - first_block[global];
    const ExpertGroups groups = p.local.expert_groups[global];
    for (int32_t b = threadIdx.x % 32; b < expert_blocks; b += 32) {
      p.local.blocks[first_block[global] - my_first + b] = BlockInfo{
          static_cast<int16_t>(i), static_cast<int16_t>(rows_in_block(expert_rows[global], b)),
          groups.group_of(b)};
    }
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i <= state.num_groups; i += blockDim.x) {
    p.local.group_first_cut[i] = first_cut_of_group(p, first_block + g.rank * g.local_experts, i);
  }
}

// ---- 3. Route ----------------------------------------------------------------------------------

// Position of the thread's route among those of the chunk to the same expert, in (token, k) order.
MOK_DEVICE int32_t rank_in_chunk(int32_t expert, int32_t* running) {
  const int32_t lane = threadIdx.x % 32;
  const uint32_t same = __match_any_sync(~0u, expert);
  const int32_t leader = __ffs(same) - 1;
  int32_t base = 0;
  for (int32_t w = 0; w < kWarps; ++w) {  // warps one after another
    if (static_cast<int32_t>(threadIdx.x) / 32 == w && expert >= 0 && lane == leader) {
      base = running[expert];
      running[expert] = base + __popc(same);
    }
    __syncthreads();
  }
  base = __shfl_sync(~0u, base, leader);
  return base + __popc(same & ((1u << lane) - 1));
}

// Routes of the token that come before this one in ascending (expert id, k).
MOK_DEVICE int32_t slot_of(const ChunkRoute& route, const int32_t* expert_ids, int32_t topk) {
  int32_t slot = 0;
  for (int32_t k = 0; k < topk; ++k) {
    const int32_t other = expert_ids[int64_t{route.token} * topk + k];
    if (other >= 0 && (other < route.expert || (other == route.expert && k < route.k))) ++slot;
  }
  return slot;
}

// Writes each route's row into the table of its expert's owner, and sorts tokens into buckets of
// when they can be reduced.
__global__ void __launch_bounds__(kChunkRoutes)
    route_kernel(const __grid_constant__ ScheduleParams p) {
  __shared__ int32_t running[MOK_MAX_EXPERTS];
  __shared__ int32_t from_end[kChunkRoutes];  // of a token: groups between its last and the end
  const Geometry& g = p.geometry;
  CallState& state = *p.local.state;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (load_relaxed(p.dog.abort) != 0 || state.refused) return;
  for (int32_t e = threadIdx.x; e < g.num_experts; e += blockDim.x) running[e] = 0;
  from_end[threadIdx.x] = kReduceBuckets - 1;
  __syncthreads();
  const ChunkRoute route(p);
  const int32_t position = rank_in_chunk(route.expert, running);
  if (route.expert >= 0) {
    const int32_t owner = route.expert / g.local_experts;
    const int64_t id = int64_t{route.token} * g.topk + route.k;
    const ExpertRows begin = p.local.first_row[route.expert];
    const int32_t in_expert =
        begin.before_rank + position +
        p.local.chunk_offsets[int64_t{route.expert} * g.max_chunks + blockIdx.x];
    const int32_t row = begin.first_block * static_cast<int32_t>(kBlockRows) + in_expert;
    const int32_t slot = slot_of(route, p.expert_ids, g.topk);
    p.peers.rows[owner][row] =
        MokRow{route.token, static_cast<int16_t>(g.rank), pack_route(route.k, slot),
               p.probs != nullptr ? p.probs[id] : 0.0f, route.expert};
    p.local.slot_row[int64_t{route.token} * g.topk + slot] = owner == g.rank ? row : -1;
    const int32_t group =
        p.local.expert_groups[route.expert].group_of(in_expert / static_cast<int32_t>(kBlockRows));
    p.local.route_group[id] = static_cast<uint16_t>(group);
    atomicMin(&from_end[threadIdx.x / g.topk], p.local.rank_groups[owner] - 1 - group);
  }
  if (g.num_ranks > 1) __threadfence_system();
  __syncthreads();
  const int32_t token = blockIdx.x * chunk_tokens(g.topk) + threadIdx.x;
  if (threadIdx.x < chunk_tokens(g.topk) && token < p.tokens) {
    const int32_t bucket = kReduceBuckets - 1 - from_end[threadIdx.x];
    const int32_t at = atomicAdd(&state.counters.bucket_tokens[bucket], 1u);
    p.local.bucket[int64_t{bucket} * g.max_tokens + at] = token;
  }
  if (g.num_ranks == 1) return;
  __shared__ bool last;
  if (threadIdx.x == 0) {
    last = release_add_fetch(&state.counters.chunks_routed, 1) + 1 == gridDim.x;
  }
  __syncthreads();
  if (last && threadIdx.x < g.num_ranks) {
    acquire_fence();
    release_store(&p.peers.flags[threadIdx.x]->rows[g.rank], state.epoch);
  }
}

__global__ void __launch_bounds__(128) await_rows_kernel(const __grid_constant__ CallParams p) {
  static_assert(MOK_MAX_RANKS <= 128, "one rank a thread");
  wait_for_previous_kernel();
  rows_have_arrived(p);
}

__global__ void __launch_bounds__(128) refusal_kernel(const __grid_constant__ ScheduleParams p) {
  CallState& state = *p.local.state;
  const uint32_t epoch = state.epoch + 1;
  __syncthreads();
  if (threadIdx.x == 0) state.epoch = epoch;
  announce(p, epoch, p.tokens, nullptr);
  await_announcements(p, epoch);  // a rank must not be two calls ahead of another
}

}  // namespace

cudaError_t load_schedule_kernels() {
  return load_kernels(count_kernel, exchange_kernel, route_kernel, await_rows_kernel,
                      refusal_kernel);
}

cudaError_t launch_await_rows(const CallParams& params, cudaStream_t stream) {
  if (params.geometry.num_ranks == 1) return cudaSuccess;
  return launch_overlapped(await_rows_kernel, 1, 128, 0, stream, params);
}

cudaError_t launch_refusal(const ScheduleParams& params, cudaStream_t stream) {
  refusal_kernel<<<1, 128, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_schedule(const ScheduleParams& params, cudaStream_t stream) {
  const int32_t chunks =
      static_cast<int32_t>(ceil_div(params.tokens, chunk_tokens(params.geometry.topk)));
  const int32_t ctas = chunks > 0 ? chunks : 1;
  count_kernel<<<ctas, kChunkRoutes, 0, stream>>>(params);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) error = launch_overlapped(exchange_kernel, 1, 1024, 0, stream, params);
  if (error == cudaSuccess) {
    error = launch_overlapped(route_kernel, ctas, kChunkRoutes, 0, stream, params);
  }
  return error;
}

}  // namespace mok::sm90
