// Host side of a rank: memory, geometry, tensor maps, and what the entry points share.
#ifndef MOK_SM90_WORKSPACE_H_
#define MOK_SM90_WORKSPACE_H_

#include <cuda_runtime.h>

#include <string>

#include "backward.h"
#include "error.h"
#include "fault.h"
#include "forward.h"
#include "maps.h"
#include "schedule.h"

namespace mok::sm90 {

// Sizes of the private memory of a rank, in bytes, and where each part begins.
struct LocalLayout {
  int64_t state, blocks, group_first_block, cuts, group_first_cut, expert_first_cut;
  int64_t rows_ready, activations_ready, step_done, grads_ready, group_grads_ready, group_released,
      cuts_added, counters_end;
  int64_t chunk_offsets, first_row, expert_groups, rank_groups, route_group, slot_row, bucket;
  int64_t row_ring, activation_ring;
  struct {  // of backward, where forward has its rings
    int64_t hidden_ring, grad_output_ring, preact_ring, activation_ring, prob_parts;
  } grad;
  int64_t bytes;
};

// The peer segment of this engine: the shared layout, then the progress words.
struct SegmentLayout {
  PeerLayout base;
  int64_t progress;  // [ep_size] uint64
  int64_t bytes;
};

SegmentLayout make_segment_layout(const MokShape& shape);
Geometry make_geometry(const MokShape& shape, int32_t ctas);
LocalLayout make_local_layout(const Geometry& geometry);

}  // namespace mok::sm90

struct MokWorkspace {
  explicit MokWorkspace(const MokWorkspaceDesc& desc);

  MokShape shape;
  int32_t device = 0;
  int32_t ctas = 0;
  mok::sm90::Geometry geometry{};
  mok::sm90::DeviceMemory memory;
  mok::sm90::LocalTables local{};
  mok::sm90::PeerTables peers{};
  mok::sm90::Watchdog dog{};
  uint8_t* row_ring = nullptr;  // of forward
  mok::sm90::BackwardRings backward_rings{};
  mok::sm90::ForwardMaps forward_maps{};    // half_preact is set for each call
  mok::sm90::BackwardMaps backward_maps{};  // saved_preact likewise
  mok::sm90::MapSets weight_maps;           // fc1, then fc2; for FC1 and FC2
  mok::sm90::MapSets dgrad_maps;            // likewise, for their data gradients
  mok::sm90::MapSets grad_maps;             // of weight gradients
  mok::sm90::FaultRecords faults;
  std::string poisoned;  // why, or empty

 private:
  void set_up_forward(const mok::sm90::LocalLayout& at);
  void set_up_backward(const mok::sm90::LocalLayout& at);
};

#endif  // MOK_SM90_WORKSPACE_H_
