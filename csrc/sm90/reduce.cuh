// Ordered reduction of the combine: sums the K results of a token once all have arrived.
#ifndef MOK_SM90_REDUCE_CUH_
#define MOK_SM90_REDUCE_CUH_

#include "call.h"
#include "layout.cuh"
#include "sync.cuh"

namespace mok::sm90 {

// Eight columns of one row.
MOK_DEVICE uint4 load_columns(const uint8_t* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

MOK_DEVICE void add_columns(float (&sum)[8], uint4 v) {
  sum[0] = __fadd_rn(sum[0], bf16_low(v.x));
  sum[1] = __fadd_rn(sum[1], bf16_high(v.x));
  sum[2] = __fadd_rn(sum[2], bf16_low(v.y));
  sum[3] = __fadd_rn(sum[3], bf16_high(v.y));
  sum[4] = __fadd_rn(sum[4], bf16_low(v.z));
  sum[5] = __fadd_rn(sum[5], bf16_high(v.z));
  sum[6] = __fadd_rn(sum[6], bf16_low(v.w));
  sum[7] = __fadd_rn(sum[7], bf16_high(v.w));
}

// Adds the shared expert's result, rounds and writes; `offset`: bytes into [T, H].
MOK_DEVICE void write_columns(const CallParams& p, int64_t offset, float (&sum)[8]) {
  if (p.addend != nullptr) add_columns(sum, load_columns(p.addend + offset));
  const uint4 result = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                  pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
  __stcs(reinterpret_cast<uint4*>(p.output + offset), result);
}

// A claimed token, or the columns of one panel of it. Lane k knows about route k.
struct ReduceItem {
  int32_t token;    // -1: there are no more
  int32_t panel;    // -1: all columns
  int32_t expert;   // -1: no route
  uint32_t needed;  // steps that the owner must have finished

  MOK_DEVICE int32_t first_column(const Geometry& g) const {
    return panel < 0 ? 0 : panel_first_tile(panel, g.fc2_tiles) * kTileN;
  }
  MOK_DEVICE int32_t end_column(const Geometry& g) const {
    return panel < 0 ? g.hidden : min(g.hidden, panel_first_tile(panel + 1, g.fc2_tiles) * kTileN);
  }

  // Whether all its results have arrived.
  MOK_DEVICE bool ready(const CallParams& p) const {
    bool arrived = true;
    if (expert >= 0) {
      const Geometry& g = p.geometry;
      const uint64_t* progress = p.peers.progress[g.rank] + expert / g.local_experts;
      arrived = load_relaxed(progress) >= progress_word(p.local.state->epoch, needed);
    }
    return __all_sync(~0u, arrived);
  }

  MOK_DEVICE int32_t routes() const { return __popc(__ballot_sync(~0u, expert >= 0)); }
};

// Claims tokens in the order in which they complete: whole tokens of all buckets but the last, then
// for each panel all tokens of the last. Used by whole warps, as all below.
class TokenQueue {
 public:
  MOK_DEVICE explicit TokenQueue(const CallParams& p) {
    const int32_t lane = threadIdx.x % 32;
    const uint32_t* tokens = p.local.state->counters.bucket_tokens;
    end_ = 0;
    for (int32_t b = 0; b < kReduceBuckets; ++b) {
      if (b <= lane) end_ += tokens[b];
    }
  }

  MOK_DEVICE ReduceItem claim(const CallParams& p) const {
    const Geometry& g = p.geometry;
    const int32_t lane = threadIdx.x % 32;
    ReduceItem item{-1, -1, -1, 0};
    uint32_t ticket = claim_ticket(&p.local.state->counters.reduce_ticket);
    constexpr int32_t kLast = kReduceBuckets - 1;
    const uint32_t whole = __shfl_sync(~0u, end_, kLast - 1);
    int32_t bucket = kLast;
    if (ticket < whole) {
      bucket = __popc(__ballot_sync(~0u, end_ <= ticket));
      const uint32_t first = __shfl_sync(~0u, end_, max(bucket - 1, 0));
      if (bucket > 0) ticket -= first;
    } else {
      const uint32_t tokens = p.tokens - whole;  // of the last bucket
      ticket -= whole;
      if (tokens == 0 || ticket >= tokens * num_panels(g.fc2_tiles)) return item;
      item.panel = ticket / tokens;
      ticket -= item.panel * tokens;
    }
    item.token = p.local.bucket[int64_t{bucket} * g.max_tokens + ticket];
    if (lane >= g.topk) return item;
    const int64_t route = int64_t{item.token} * g.topk + lane;
    item.expert = p.expert_ids[route];
    if (item.expert < 0) return item;
    const int32_t group = p.local.route_group[route];
    const bool in_panels = group == p.local.rank_groups[item.expert / g.local_experts] - 1;
    item.needed = group + (in_panels ? item.panel : 0) + 1;
    return item;
  }

 private:
  uint32_t end_;  // lane b: tokens in buckets 0 .. b
};

// Sums one item with 8 loads of 16 bytes a lane in flight. result(n): the token's n-th result, a
// row of H, or anything where there is none; called by whole warps.
template <typename Result>
MOK_DEVICE void reduce_token(const CallParams& p, const ReduceItem& item, Result result) {
  constexpr int32_t kBatch = 8;
  const Geometry& g = p.geometry;
  const int32_t lane = threadIdx.x % 32;
  const int32_t row_bytes = g.hidden * 2;
  const int32_t routes = item.routes();
  const int32_t end = item.end_column(g) * 2;
  for (int32_t first = item.first_column(g) * 2; first < end; first += 512) {
    const int32_t at = first + lane * 16;
    const bool inside = at < end;
    float sum[8] = {};
    for (int32_t n = 0; n < routes; n += kBatch) {
      uint4 v[kBatch];
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        const uint8_t* row = result(n + i);
        if (n + i < routes && inside) v[i] = load_columns(row + at);
      }
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        if (n + i < routes && inside) add_columns(sum, v[i]);
      }
    }
    if (inside) write_columns(p, int64_t{item.token} * row_bytes + at, sum);
  }
}

// Copies the gradients of the token's probs, which come with the first column tile.
MOK_DEVICE void collect_grad_probs(const CallParams& p, const ReduceItem& item) {
  const Geometry& g = p.geometry;
  const int32_t k = threadIdx.x % 32;
  if (item.panel > 0 || k >= g.topk) return;
  const int64_t route = int64_t{item.token} * g.topk + k;
  p.grad_probs[route] = item.expert < 0 ? 0.0f : __ldcg(p.peers.prob_slots[g.rank] + route);
}

MOK_DEVICE void acquire_results(const CallParams& p) {
  if (p.geometry.num_ranks == 1) {
    acquire_fence_gpu();
  } else {
    acquire_fence();
  }
}

// Reduces until nothing is left. Waits for peers, so no peer may depend on the warp any more.
MOK_DEVICE void reduce_tokens(const CallParams& p) {
  const Geometry& g = p.geometry;
  const TokenQueue queue(p);
  ReduceItem item = queue.claim(p);
  while (item.token >= 0) {
    if (!warp_wait_until([&] { return item.ready(p); }, p.dog, kWaitCombine, item.token)) return;
    acquire_results(p);
    const uint8_t* slots = p.peers.slots[g.rank] + int64_t{item.token} * g.topk * g.hidden * 2;
    reduce_token(p, item, [&](int32_t n) { return slots + n * (g.hidden * 2); });
    if (p.grad_probs != nullptr) collect_grad_probs(p, item);
    item = queue.claim(p);
  }
}

}  // namespace mok::sm90

#endif  // MOK_SM90_REDUCE_CUH_
