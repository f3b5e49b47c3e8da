// Dispatch alone: pulls the rows of this rank's experts from their owners.
#include "copy_kernel.cuh"

namespace mok::sm90 {
namespace {

MOK_DEVICE void write_expert_rows(const DispatchParams& p) {
  const Geometry& g = p.geometry;
  const int32_t bank = p.local.state->epoch % 2;
  const int32_t* counts = p.peers.counts[g.rank] + int64_t{bank} * g.num_ranks * g.num_experts +
                          g.rank * g.local_experts;
  for (int32_t i = threadIdx.x; i < g.local_experts; i += blockDim.x) {
    int32_t rows = 0;
    for (int32_t r = 0; r < g.num_ranks; ++r) rows += counts[int64_t{r} * g.num_experts + i];
    p.expert_rows[i] = rows;
  }
}

// Claims pieces, one from each 1/L of the row table in turn. Where routes are even, these are L
// experts: rows that they take from one token are then pulled at about the same time, all but the
// first from L2.
MOK_DEVICE DispatchPiece claim_piece(const DispatchParams& p) {
  CallState& state = *p.local.state;
  const int32_t pieces = state.num_blocks * kPieces;
  const int32_t parts = p.geometry.local_experts;
  const auto part_pieces = static_cast<int32_t>(ceil_div(pieces, parts));
  while (true) {
    const int32_t ticket = claim_ticket(&state.counters.dispatch_ticket);
    if (ticket >= part_pieces * parts) return DispatchPiece(-1);
    const int32_t piece = ticket % parts * part_pieces + ticket / parts;
    if (piece < pieces) return DispatchPiece(piece);
  }
}

MOK_DEVICE void write_probs(const DispatchParams& p, const DispatchPiece& piece) {
  const int32_t lane = threadIdx.x % 32;
  if (lane >= kPieceRows) return;
  const int32_t in_block = piece.first_row() + lane;
  const int64_t row = int64_t{piece.block()} * kBlockRows + in_block;
  const bool padding = in_block >= p.local.blocks[piece.block()].rows;
  p.row_probs[row] = padding ? 0.0f : p.peers.rows[p.geometry.rank][row].prob;
}

__global__ void __launch_bounds__(kCopyThreads, kCopyCtasPerSm)
    dispatch_kernel(const __grid_constant__ DispatchParams p) {
  const Geometry& g = p.geometry;
  wait_for_previous_kernel();
  if (!rows_have_arrived(p)) return;
  if (blockIdx.x == 0) write_expert_rows(p);
  const PulledMatrix pulled[] = {{p.peers.hidden, p.rows}};
  bool last = nothing_to_do(p);
  for (DispatchPiece piece = claim_piece(p); piece.ticket >= 0; piece = claim_piece(p)) {
    if (piece.block() < p.capacity) {
      if (p.row_probs != nullptr) write_probs(p, piece);
      piece.pull(p, g.max_blocks, pulled);
    }
    if (is_last_piece(p)) last = true;
  }
  // When the kernel ends, peers have pulled what this rank staged, so the next call may stage.
  if (!last || g.num_ranks == 1) return;
  tell_peers(p, &PeerFlags::pulled);
  await_peers(p, &PeerFlags::pulled, kWaitPulled);
}

}  // namespace

cudaError_t load_dispatch_kernel() { return load_kernels(dispatch_kernel); }

cudaError_t launch_dispatch(const DispatchParams& params, int32_t ctas, cudaStream_t stream) {
  return launch_overlapped(dispatch_kernel, ctas * kCopyCtasPerSm, kCopyThreads, 0, stream, params);
}

}  // namespace mok::sm90
