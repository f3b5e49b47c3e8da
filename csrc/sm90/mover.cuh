// Mover warps: pull dispatch, which copies rows from their owners into the row ring ahead of FC1,
// and the reduction of tokens that are complete.
#ifndef MOK_SM90_MOVER_CUH_
#define MOK_SM90_MOVER_CUH_

#include "forward.h"
#include "layout.cuh"
#include "reduce.cuh"
#include "sync.cuh"

namespace mok::sm90 {

// Rows that a mover pulls under one ticket. Small, so that the first blocks are soon complete and
// their rows come from all CTAs at once.
constexpr int32_t kPieceRows = 8;
constexpr int32_t kPieces = static_cast<int32_t>(kBlockRows) / kPieceRows;

// Shared memory of one mover warp: lane i < kMoverChunks owns chunk i and its barrier.
struct MoverChunks {
  uint32_t chunk;
  uint32_t barrier;
  uint32_t parity = 0;

  MOK_DEVICE MoverChunks(uint32_t smem, int32_t mover, int32_t lane) {
    const int32_t index = mover * kMoverChunks + lane % kMoverChunks;
    chunk = smem + SharedPlan::kMoverChunk + index * kMoverChunkBytes;
    barrier = smem + SharedPlan::kMoverFull + index * 8;
  }
  MOK_DEVICE static void init(uint32_t smem) {
    for (int32_t i = 0; i < kMovers * kMoverChunks; ++i) {
      barrier_init(smem + SharedPlan::kMoverFull + i * 8, 1);
    }
  }
};

// Copies `rows` rows: lane r holds the source of row r, destinations are consecutive. Chunks in
// flight belong to different lanes, which wait for nothing but their own copies.
MOK_DEVICE bool copy_rows(const uint8_t* source, uint8_t* destination, int32_t rows,
                          int32_t row_bytes, MoverChunks& mine, const Watchdog& dog) {
  const int32_t lane = threadIdx.x % 32;
  const int32_t chunks = (row_bytes + kMoverChunkBytes - 1) / kMoverChunkBytes;
  for (int32_t first = 0; first < rows * chunks; first += kMoverChunks) {
    const int32_t item = first + lane;
    const bool active = lane < kMoverChunks && item < rows * chunks;
    const int32_t row = active ? item / chunks : 0;
    const int32_t offset = (item - row * chunks) * kMoverChunkBytes;
    const int32_t bytes = min(kMoverChunkBytes, row_bytes - offset);
    const uint64_t from = __shfl_sync(~0u, reinterpret_cast<uint64_t>(source), row);
    bool ok = true;
    if (active) {
      wait_bulk_read();
      barrier_expect(mine.barrier, bytes);
      load_bulk(mine.chunk, reinterpret_cast<const uint8_t*>(from) + offset, bytes, mine.barrier);
      ok = wait_barrier(mine.barrier, mine.parity, dog, kWaitMoverCopy);
      mine.parity ^= 1;
      if (ok) {
        store_bulk(destination + int64_t{row} * row_bytes + offset, mine.chunk, bytes);
        commit_bulk_group();
      }
    }
    if (!__all_sync(~0u, ok)) return false;
  }
  return true;
}

// A claimed piece of a row block.
struct DispatchPiece {
  int32_t ticket;  // -1: there are no more
  int32_t rows;    // that are not padding; may be 0 or less

  MOK_DEVICE explicit DispatchPiece(const ForwardParams& p) {
    uint32_t claimed = 0;
    if (threadIdx.x % 32 == 0) {
      claimed = atomicAdd(&p.local.state->counters.dispatch_ticket, 1u);
    }
    ticket = warp_uniform(claimed);
    if (ticket >= p.local.state->num_blocks * kPieces) {
      ticket = -1;
    } else {
      rows = min(p.local.blocks[block()].rows - first_row(), kPieceRows);
    }
  }

  MOK_DEVICE int32_t block() const { return ticket / kPieces; }
  MOK_DEVICE int32_t first_row() const { return ticket % kPieces * kPieceRows; }

  // Whether FC1 has read what its place in the ring held before.
  MOK_DEVICE bool ready(const ForwardParams& p) const {
    const int32_t before = block() - p.geometry.row_ring_blocks;
    return before < 0 || load_relaxed(p.local.activations_ready + before) >= p.geometry.fc1_tiles;
  }

  // Pulls it. False after a failed wait.
  MOK_DEVICE bool pull(const ForwardParams& p, MoverChunks& chunks) const {
    const Geometry& g = p.geometry;
    const int32_t lane = threadIdx.x % 32;
    const int32_t row_bytes = g.hidden * 2;
    const uint8_t* source = nullptr;
    if (lane < rows) {
      const MokRow row = p.peers.rows[g.rank][int64_t{block()} * kBlockRows + first_row() + lane];
      source = p.peers.hidden[row.rank] + int64_t{row.token} * row_bytes;
      if (row.rank == g.rank) prefetch_bulk(source, row_bytes);
    }
    uint8_t* destination =
        p.row_ring + (int64_t{block() % g.row_ring_blocks} * kBlockRows + first_row()) * row_bytes;
    if (rows > 0 && !copy_rows(source, destination, rows, row_bytes, chunks, p.dog)) return false;
    finish_bulk_stores();
    __syncwarp();
    if (lane == 0) release_add(p.local.rows_ready + block(), 1);
    return true;
  }
};

// Pulls pieces, and reduces tokens while no piece can be pulled. Pieces come first, for peers may
// wait for what this rank computes from them; a token is only reduced if that needs no waiting.
MOK_DEVICE void mover_role(const ForwardParams& p, const ForwardMaps& maps, uint32_t smem,
                           int32_t mover) {
  MoverChunks chunks(smem, mover, threadIdx.x % 32);
  ReduceBuffers buffers(smem, mover);
  const TokenQueue queue(p);
  DispatchPiece piece(p);
  ReduceItem item = queue.claim(p);
  while (piece.ticket >= 0 || item.token >= 0) {
    bool pull = false;
    const auto can_work = [&] {
      pull = piece.ticket >= 0 && piece.ready(p);
      return pull || (item.token >= 0 && item.ready(p));
    };
    const bool pulling = piece.ticket >= 0;
    if (!warp_wait_until(can_work, p.dog, pulling ? kWaitRowRing : kWaitCombine,
                         pulling ? piece.block() : item.token)) {
      return;
    }
    pull || p.geometry.num_ranks == 1 ? acquire_fence_gpu() : acquire_fence();
    fence_proxy_global();
    if (pull) {
      if (!piece.pull(p, chunks)) return;
      piece = DispatchPiece(p);
    } else {
      if (!buffers.reduce(p, maps, item)) return;
      item = queue.claim(p);
    }
  }
}

}  // namespace mok::sm90

#endif  // MOK_SM90_MOVER_CUH_
