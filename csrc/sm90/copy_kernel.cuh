// What dispatch and combine as kernels of their own share: their size, and the flags by which ranks
// tell each other that all rows are where they belong.
#ifndef MOK_SM90_COPY_KERNEL_CUH_
#define MOK_SM90_COPY_KERNEL_CUH_

#include "launch.cuh"
#include "mover.cuh"
#include "standalone.h"
#include "task.cuh"

namespace mok::sm90 {

// Every warp moves rows. Enough of them that loads in flight fill the memory's latency.
constexpr int32_t kCopyThreads = 256;
constexpr int32_t kCopyCtasPerSm = 3;

// Words that each rank writes at every peer when it is done.
using DoneFlags = uint32_t (PeerFlags::*)[MOK_MAX_RANKS];

// By whole warps, as all below. Publishes what the warp has done or seen done.
MOK_DEVICE void tell_peers(const CallParams& p, DoneFlags flags) {
  const Geometry& g = p.geometry;
  __syncwarp();
  for (int32_t r = threadIdx.x % 32; r < g.num_ranks; r += 32) {
    release_store(&(p.peers.flags[r]->*flags)[g.rank], p.local.state->epoch);
  }
}

// Waits until every rank has told this one.
MOK_DEVICE bool await_peers(const CallParams& p, DoneFlags flags, WaitSite site) {
  const Geometry& g = p.geometry;
  const uint32_t epoch = p.local.state->epoch;
  bool ok = true;
  for (int32_t r = threadIdx.x % 32; ok && r < g.num_ranks; r += 32) {
    const uint32_t* flag = &(p.peers.flags[g.rank]->*flags)[r];
    const auto done = [=] {
      if (static_cast<int32_t>(load_relaxed(flag) - epoch) >= 0) return true;
      __nanosleep(200);  // all warps wait here
      return false;
    };
    ok = wait_until(done, p.dog, site, r, p.dog.inner_wait_ns);
  }
  if (!ok) settle_failure(p.dog);
  acquire_fence();
  return __all_sync(~0u, ok);
}

// Counts a finished piece; whether it was the last of the call, after which all pieces are seen.
// Pieces are counted and not CTAs: peers must not wait for a CTA that has not started.
MOK_DEVICE bool is_last_piece(const CallParams& p) {
  CallState& state = *p.local.state;
  bool last = false;
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    const uint32_t pieces = state.num_blocks * kPieces;
    last = release_add_fetch(&state.counters.pieces_done, 1) + 1 == pieces;
    if (last) acquire_fence_gpu();
  }
  return __shfl_sync(~0u, last, 0);
}

// A rank without rows is done at once. One warp speaks for it.
MOK_DEVICE bool nothing_to_do(const CallParams& p) {
  return p.local.state->num_blocks == 0 && blockIdx.x == 0 && threadIdx.x < 32;
}

}  // namespace mok::sm90

#endif  // MOK_SM90_COPY_KERNEL_CUH_
