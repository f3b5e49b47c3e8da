// The schedule on the device: from a rank's expert ids to everything the forward and backward
// kernels need, without a sort and without the host. Three small launches.
#ifndef MOK_SM90_SCHEDULE_H_
#define MOK_SM90_SCHEDULE_H_

#include <cuda_runtime.h>

#include "call.h"

namespace mok::sm90 {

// Routes that one CTA ranks, in whole tokens.
constexpr int32_t kChunkRoutes = 1024;

MOK_HD int32_t chunk_tokens(int32_t topk) { return kChunkRoutes / topk; }

struct ScheduleParams {
  Geometry geometry;
  LocalTables local;
  PeerTables peers;
  Watchdog dog;
  RefusedCall* refused_call;
  int32_t op;                 // of CallHeader: every rank must be in the same call
  int32_t tokens;             // launch_refusal: a Refusal
  const int32_t* expert_ids;  // [T, K]
  const float* probs;         // [T, K] or NULL: all 0
};

cudaError_t launch_schedule(const ScheduleParams& params, cudaStream_t stream);

// After it: one CTA that waits until the peers' entries are in this rank's row table. Kernels that
// take every SM come after it: CTAs that wait on all SMs at once could keep out what they wait for,
// where ranks share a GPU or a collective of another library is to run.
cudaError_t launch_await_rows(const CallParams& params, cudaStream_t stream);

// Enters a call in order to tell the peers that this rank refuses it; nothing else of it follows.
cudaError_t launch_refusal(const ScheduleParams& params, cudaStream_t stream);

// Before the first launch on a device: loads what the functions above launch.
cudaError_t load_schedule_kernels();

}  // namespace mok::sm90

#endif  // MOK_SM90_SCHEDULE_H_
