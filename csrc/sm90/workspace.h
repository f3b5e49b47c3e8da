// Host side of a rank: memory, geometry, tensor maps, and what the entry points share.
#ifndef MOK_SM90_WORKSPACE_H_
#define MOK_SM90_WORKSPACE_H_

#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "error.h"
#include "forward.h"
#include "schedule.h"

namespace mok::sm90 {

// Numbers of CallHeader.op.
enum class Op : int32_t { kSchedule = 1, kDispatch, kCombine, kForward, kBackward };

struct DeviceFree {
  void operator()(void* p) const { cudaFree(p); }
};
using DeviceMemory = std::unique_ptr<void, DeviceFree>;
DeviceMemory device_alloc(int64_t bytes);

// Sizes of the private memory of a rank, in bytes, and where each part begins.
struct LocalLayout {
  int64_t state, blocks, group_first_block, rows_ready, activations_ready, step_done, chunk_offsets,
      first_row, expert_groups, rank_groups, route_group, bucket, row_ring, activation_ring;
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

// BF16 matrix of `rows` x `columns` read in boxes of `box_rows` x 64 columns, 128-byte swizzle.
CUtensorMap make_matrix_map(const void* data, int64_t rows, int64_t columns, int32_t box_rows);

// Tensor maps of one layer's weights in device memory. They are made once for a set of pointers;
// DDP may move parameters, so every call looks its pointers up.
struct WeightMaps {
  DeviceMemory memory;
  const CUtensorMap* fc1;
  const CUtensorMap* fc2;
};

}  // namespace mok::sm90

struct MokWorkspace {
  explicit MokWorkspace(const MokWorkspaceDesc& desc);
  ~MokWorkspace();

  MokShape shape;
  int32_t device = 0;
  int32_t ctas = 0;
  mok::sm90::Geometry geometry{};
  mok::sm90::DeviceMemory memory;
  mok::sm90::LocalTables local{};
  mok::sm90::PeerTables peers{};
  mok::sm90::Watchdog dog{};
  uint8_t* row_ring = nullptr;
  uint8_t* activation_ring = nullptr;
  mok::sm90::ForwardMaps forward_maps{};  // store_preact is set for each call
  std::string poisoned;                   // why, or empty

  const mok::sm90::WeightMaps& weight_maps(const MokWeights& weights);

 private:
  mok::sm90::Fault* fault_ = nullptr;  // pinned
  std::map<std::vector<const void*>, mok::sm90::WeightMaps> weight_maps_;
  friend std::string fault_message(const MokWorkspace& ws);
};

// What a bounded wait of an earlier call ran into, or "".
std::string fault_message(const MokWorkspace& ws);

#endif  // MOK_SM90_WORKSPACE_H_
