// Combine alone: rows of peers' tokens are pushed to their slots there, then each token's rows are
// summed, from its slots and, where they were computed on this rank, from where they are.
#include "copy_kernel.cuh"

namespace mok::sm90 {
namespace {

MOK_DEVICE void push_piece(const CombineParams& p, const DispatchPiece& piece) {
  const Geometry& g = p.geometry;
  const int32_t lane = threadIdx.x % 32;
  const int32_t row_bytes = g.hidden * 2;
  const int32_t rows = min(p.local.blocks[piece.block()].rows - piece.first_row(), kPieceRows);
  const int64_t first = int64_t{piece.block()} * kBlockRows + piece.first_row();
  uint64_t slot = 0;  // of row `lane`; 0: it is padding, or stays here
  if (lane < rows) {
    const MokRow row = p.peers.rows[g.rank][first + lane];
    if (row.rank != g.rank) {
      const int64_t token = int64_t{row.token} * g.topk;
      slot = reinterpret_cast<uint64_t>(p.peers.slots[row.rank] +
                                        (token + route_slot(row)) * row_bytes);
      if (p.row_probs != nullptr) {
        p.peers.prob_slots[row.rank][token + route_k(row)] = p.row_probs[first + lane];
      }
    }
  }
#pragma unroll 1
  for (int32_t r = 0; r < kPieceRows; ++r) {
    const uint64_t to = __shfl_sync(~0u, slot, r);
    if (to == 0) continue;
    copy_row(p.rows + (first + r) * row_bytes, reinterpret_cast<uint8_t*>(to), row_bytes);
  }
}

MOK_DEVICE void push_rows(const CombineParams& p) {
  bool last = nothing_to_do(p);
  for (DispatchPiece piece(p); piece.ticket >= 0; piece = DispatchPiece(p)) {
    if (piece.block() < p.capacity) push_piece(p, piece);
    if (is_last_piece(p)) last = true;
  }
  if (last) tell_peers(p, &PeerFlags::combine);
}

// Lane k knows about route k.
MOK_DEVICE ReduceItem claim_token(const CombineParams& p) {
  const int32_t lane = threadIdx.x % 32;
  ReduceItem item{-1, -1, -1, 0};
  const uint32_t ticket = claim_ticket(&p.local.state->counters.reduce_ticket);
  if (ticket >= static_cast<uint32_t>(p.tokens)) return item;
  item.token = static_cast<int32_t>(ticket);
  const int32_t topk = p.geometry.topk;
  if (lane < topk) item.expert = p.expert_ids[int64_t{item.token} * topk + lane];
  return item;
}

// Brings the values of a token's rows to its routes; `row`: lane n has the n-th result's row here.
MOK_DEVICE void collect_probs(const CombineParams& p, const ReduceItem& item, int32_t row) {
  const Geometry& g = p.geometry;
  const int32_t k = threadIdx.x % 32;
  const int64_t first = int64_t{item.token} * g.topk;
  if (k < g.topk && item.expert < 0) p.grad_probs[first + k] = 0.0f;
  if (k < g.topk && item.expert >= 0 && item.expert / g.local_experts != g.rank) {
    p.grad_probs[first + k] = __ldcg(p.peers.prob_slots[g.rank] + first + k);
  }
  if (row >= 0) p.grad_probs[first + route_k(p.peers.rows[g.rank][row])] = p.row_probs[row];
}

MOK_DEVICE void reduce_all(const CombineParams& p) {
  const Geometry& g = p.geometry;
  const int32_t lane = threadIdx.x % 32;
  const int64_t row_bytes = int64_t{g.hidden} * 2;
  ReduceItem item = claim_token(p);
  while (item.token >= 0) {
    const ReduceItem next = claim_token(p);
    const int64_t slot = int64_t{item.token} * g.topk + lane;
    const int32_t routes = item.routes();
    int32_t row = lane < routes ? p.local.slot_row[slot] : -1;
    if (row >= p.capacity * kBlockRows) row = -1;
    const uint8_t* at =
        row >= 0 ? p.rows + row * row_bytes : p.peers.slots[g.rank] + slot * row_bytes;
    const auto address = reinterpret_cast<uint64_t>(at);
    reduce_token(p, item, [&](int32_t n) {
      return reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, address, n));
    });
    if (p.grad_probs != nullptr) collect_probs(p, item, row);
    item = next;
  }
}

__global__ void __launch_bounds__(kCopyThreads, kCopyCtasPerSm)
    combine_kernel(const __grid_constant__ CombineParams p) {
  wait_for_previous_kernel();
  if (!rows_have_arrived(p)) return;
  if (p.geometry.num_ranks > 1) {
    push_rows(p);
    if (!await_peers(p, &PeerFlags::combine, kWaitPushed)) return;
  }
  reduce_all(p);
}

}  // namespace

cudaError_t load_combine_kernel() { return load_kernels(combine_kernel); }

cudaError_t launch_combine(const CombineParams& params, int32_t ctas, cudaStream_t stream) {
  return launch_overlapped(combine_kernel, ctas * kCopyCtasPerSm, kCopyThreads, 0, stream, params);
}

}  // namespace mok::sm90
