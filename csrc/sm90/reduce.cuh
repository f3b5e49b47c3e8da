// Ordered reduction of the combine: sums the K results of a token once all have arrived.
#ifndef MOK_SM90_REDUCE_CUH_
#define MOK_SM90_REDUCE_CUH_

#include "forward.h"
#include "sync.cuh"

namespace mok::sm90 {

MOK_DEVICE uint4 load_row_chunk(const uint8_t* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

MOK_DEVICE void add_bf16x8(float (&sum)[8], uint4 v) {
  sum[0] = __fadd_rn(sum[0], bf16_low(v.x));
  sum[1] = __fadd_rn(sum[1], bf16_high(v.x));
  sum[2] = __fadd_rn(sum[2], bf16_low(v.y));
  sum[3] = __fadd_rn(sum[3], bf16_high(v.y));
  sum[4] = __fadd_rn(sum[4], bf16_low(v.z));
  sum[5] = __fadd_rn(sum[5], bf16_high(v.z));
  sum[6] = __fadd_rn(sum[6], bf16_low(v.w));
  sum[7] = __fadd_rn(sum[7], bf16_high(v.w));
}

// The k that comes lane-th in ascending (expert id, k); `routes` is how many there are. Lane k of a
// warp brings expert id k, or -1.
MOK_DEVICE int32_t route_in_order(int32_t expert, int32_t topk, int32_t& routes) {
  const int32_t lane = threadIdx.x % 32;
  int32_t rank = 0;
  for (int32_t k = 0; k < topk; ++k) {
    const int32_t other = __shfl_sync(~0u, expert, k);
    if (other >= 0 && (other < expert || (other == expert && k < lane))) ++rank;
  }
  if (expert < 0) rank = 32;
  int32_t mine = 0;
  for (int32_t k = 0; k < topk; ++k) {
    if (__shfl_sync(~0u, rank, k) == lane) mine = k;
  }
  routes = __popc(__ballot_sync(~0u, expert >= 0));
  return mine;
}

// Sums one token with a warp, `kBatch` loads of 16 bytes a lane in flight.
template <int32_t kBatch>
MOK_DEVICE void reduce_token(const ForwardParams& p, int32_t token, int32_t expert) {
  const Geometry& g = p.geometry;
  const int32_t lane = threadIdx.x % 32;
  const int32_t row_bytes = g.hidden * 2;
  int32_t routes;
  const int32_t order = route_in_order(expert, g.topk, routes);
  const uint8_t* slots = p.peers.slots[g.rank] + int64_t{token} * g.topk * row_bytes;
  const int64_t row = int64_t{token} * row_bytes;
  for (int32_t first = 0; first < row_bytes; first += 512) {
    const int32_t at = first + lane * 16;
    const bool inside = at < row_bytes;
    float sum[8] = {};
    for (int32_t n = 0; n < routes; n += kBatch) {
      uint4 v[kBatch];
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        const int32_t k = __shfl_sync(~0u, order, (n + i) % 32);
        if (n + i < routes && inside) v[i] = load_row_chunk(slots + static_cast<uint32_t>(k * row_bytes + at));
      }
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        if (n + i < routes && inside) add_bf16x8(sum, v[i]);
      }
    }
    if (!inside) continue;
    if (p.addend != nullptr) add_bf16x8(sum, load_row_chunk(p.addend + row + at));
    const uint4 result = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                    pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
    *reinterpret_cast<uint4*>(p.output + row + at) = result;
  }
}

// Reduces tokens in ticket order until none is left, by a whole warp. Waits on peers, so it must only
// be entered by warps that no peer depends on any more.
template <int32_t kBatch>
MOK_DEVICE void reduce_tokens(const ForwardParams& p) {
  const Geometry& g = p.geometry;
  CallState& state = *p.local.state;
  const int32_t lane = threadIdx.x % 32;
  const uint32_t epoch = state.epoch;
  uint32_t seen = 0;  // groups that all ranks are known to have finished
  while (true) {
    int32_t ticket = 0;
    if (lane == 0) ticket = atomicAdd(&state.counters.reduce_ticket, 1u);
    ticket = warp_uniform(ticket);
    if (ticket >= p.tokens) return;
    int32_t bucket = 0;
    for (; bucket < kReduceBuckets - 1; ++bucket) {
      const int32_t tokens = state.counters.bucket_tokens[bucket];
      if (ticket < tokens) break;
      ticket -= tokens;
    }
    const int32_t token = p.local.bucket[int64_t{bucket} * g.max_tokens + ticket];
    const int64_t route = int64_t{token} * g.topk + lane;
    const int32_t expert = lane < g.topk ? p.expert_ids[route] : -1;
    const uint32_t needed = expert >= 0 ? p.local.route_group[route] + 1u : 0u;
    if (__any_sync(~0u, needed > seen)) {
      bool ok = true;
      if (expert >= 0) {
        const int32_t owner = expert / g.local_experts;
        ok = wait_progress(p.peers.progress[g.rank] + owner, epoch, needed, p.dog, kWaitCombine,
                           owner);
      }
      if (!__all_sync(~0u, ok)) return;
      acquire_fence();
      if (g.num_ranks == 1) seen = __reduce_max_sync(~0u, needed);
    }
    reduce_token<kBatch>(p, token, expert);
  }
}

}  // namespace mok::sm90

#endif  // MOK_SM90_REDUCE_CUH_
