// Mover warps: pull dispatch, which copies rows from their owners into rings ahead of the tiles
// that need them, and the reduction of tokens that are complete.
#ifndef MOK_SM90_MOVER_CUH_
#define MOK_SM90_MOVER_CUH_

#include "reduce.cuh"
#include "sync.cuh"

namespace mok::sm90 {

// Rows that a mover pulls under one ticket. Small, so that the first blocks are soon complete and
// their rows come from all CTAs at once.
constexpr int32_t kPieceRows = 8;
constexpr int32_t kPieces = static_cast<int32_t>(kBlockRows) / kPieceRows;

// Copies one row with a warp, or writes zeros where `source` is NULL; 8 loads of 16 bytes a lane in
// flight. Through registers, not through bulk copies: those would queue with the operand loads of
// the tile, and delay them.
MOK_DEVICE void copy_row(const uint8_t* source, uint8_t* destination, int32_t bytes) {
  constexpr int32_t kBatch = 8;
  for (int32_t first = threadIdx.x % 32 * 16; first < bytes; first += kBatch * 512) {
    uint4 v[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      v[i] = make_uint4(0, 0, 0, 0);
      if (source != nullptr && first + i * 512 < bytes) {
        v[i] = load_columns(source + first + i * 512);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      if (first + i * 512 < bytes) *reinterpret_cast<uint4*>(destination + first + i * 512) = v[i];
    }
  }
}

// A matrix of which rows are pulled: where its rows lie at each rank, and the ring for them.
struct PulledMatrix {
  const uint8_t* const* owners;  // [num_ranks] each [max_tokens, H] BF16
  uint8_t* ring;                 // [ring blocks * kBlockRows, H] BF16
};

// A claimed piece of a row block.
struct DispatchPiece {
  int32_t ticket;  // -1: there are no more

  MOK_DEVICE explicit DispatchPiece(const CallParams& p) {
    ticket = claim_ticket(&p.local.state->counters.dispatch_ticket);
    if (ticket >= p.local.state->num_blocks * kPieces) ticket = -1;
  }
  MOK_DEVICE explicit DispatchPiece(int32_t piece) : ticket(piece) {}

  MOK_DEVICE int32_t block() const { return ticket / kPieces; }
  MOK_DEVICE int32_t first_row() const { return ticket % kPieces * kPieceRows; }

  // Pulls it. Padding rows become zero, and with them all that is computed from them.
  template <int32_t kMatrices>
  MOK_DEVICE void pull(const CallParams& p, int32_t ring_blocks,
                       const PulledMatrix (&matrices)[kMatrices]) const {
    const Geometry& g = p.geometry;
    const int32_t lane = threadIdx.x % 32;
    const int32_t row_bytes = g.hidden * 2;
    const int32_t rows = min(p.local.blocks[block()].rows - first_row(), kPieceRows);
    const MokRow row =
        p.peers.rows[g.rank][int64_t{block()} * kBlockRows + first_row() + lane % kPieceRows];
    const int64_t place = (int64_t{block() % ring_blocks} * kBlockRows + first_row()) * row_bytes;
#pragma unroll
    for (const PulledMatrix& matrix : matrices) {
      uint64_t source = 0;
      if (lane < rows) {  // else the row is padding, and its entry undefined
        const uint8_t* at = matrix.owners[row.rank] + int64_t{row.token} * row_bytes;
        source = reinterpret_cast<uint64_t>(at);
      }
#pragma unroll 1
      for (int32_t r = 0; r < kPieceRows; ++r) {
        const uint64_t from = __shfl_sync(~0u, source, r);
        copy_row(reinterpret_cast<const uint8_t*>(from),
                 matrix.ring + place + int64_t{r} * row_bytes, row_bytes);
      }
    }
    fence_proxy_global();  // they are read with tensor loads
    __syncwarp();
    if (lane == 0) release_add(p.local.rows_ready + block(), 1);
  }
};

// Pulls pieces until there are no more, then helps to reduce. Peers may wait for what this rank
// computes from the pieces, so nothing here waits for a peer before. is_free(block): whether the
// ring slot of the block may be overwritten.
template <int32_t kMatrices, typename IsFree>
MOK_DEVICE void mover_role(const CallParams& p, int32_t ring_blocks,
                           const PulledMatrix (&matrices)[kMatrices], IsFree is_free) {
  for (DispatchPiece piece(p); piece.ticket >= 0; piece = DispatchPiece(p)) {
    const int32_t block = piece.block();
    if (!warp_wait_until([&] { return is_free(block); }, p.dog, kWaitRowRing, block)) return;
    acquire_fence_gpu();
    fence_proxy_global();  // tensor loads have read the place in the ring
    piece.pull(p, ring_blocks, matrices);
  }
  reduce_tokens(p);
}

}  // namespace mok::sm90

#endif  // MOK_SM90_MOVER_CUH_
