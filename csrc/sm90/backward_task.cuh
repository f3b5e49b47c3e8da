// What a task of backward works on, and what it waits for.
#ifndef MOK_SM90_BACKWARD_TASK_CUH_
#define MOK_SM90_BACKWARD_TASK_CUH_

#include "mover.cuh"
#include "order.cuh"
#include "persistent.cuh"

namespace mok::sm90 {

// Where a block begins in the rings, in rows.
MOK_DEVICE int32_t ring_row(int32_t block, const Geometry& g) {
  return block % g.grad_ring_blocks * kTileM;
}

// Column chunks of FC2's dgrad that lie before F.
MOK_DEVICE int32_t num_chunks(const Task& task, const Geometry& g) {
  return min(kTileN, g.ffn - task.tile * kTileN) / kBoxColumns;
}

// The tile of a weight gradient: those of W1 [2F, H] come first, then those of W2 [H, F]. Both in
// strips of some rows of tiles, within a strip column after column, so that what the tiles of all
// SMs read at a time fits L2 beside the gradients.
struct WgradTile {
  static constexpr int32_t kStripRows = 16;

  bool fc1;
  int32_t row;     // in tiles of kTileM
  int32_t column;  // in tiles of kTileN
  bool wanted;

  MOK_DEVICE WgradTile(const Task& task, const BackwardParams& p) {
    const Geometry& g = p.geometry;
    fc1 = task.tile < g.fc1_wgrad_tiles;
    const int32_t tile = fc1 ? task.tile : task.tile - g.fc1_wgrad_tiles;
    const int32_t rows =
        fc1 ? g.fc1_wgrad_tiles / g.fc2_tiles : g.fc2_wgrad_tiles / g.fc2_dgrad_tiles;
    const int32_t columns = fc1 ? g.fc2_tiles : g.fc2_dgrad_tiles;
    const int32_t first_row = tile / (kStripRows * columns) * kStripRows;
    const int32_t in_strip = tile - first_row * columns;
    const int32_t strip_rows = min(kStripRows, rows - first_row);
    row = first_row + in_strip % strip_rows;
    column = in_strip / strip_rows;
    wanted = (fc1 ? p.fc1_wanted : p.fc2_wanted).contains(task.expert);
  }
};

MOK_DEVICE int32_t k_steps(const Task& task, const BackwardParams& p) {
  switch (task.phase) {
    case MOK_PHASE_FC2:
      return 2 * p.geometry.ffn / kTileK;
    case MOK_PHASE_WGRAD:
      return WgradTile(task, p).wanted ? task.rows : 0;
    default:
      return p.geometry.hidden / kTileK;
  }
}

MOK_DEVICE Readiness task_readiness(const Task& task, const BackwardParams& p) {
  const uint32_t tiles = p.geometry.fc2_dgrad_tiles;
  switch (task.phase) {
    case MOK_PHASE_FC2:
      return {p.local.grads_ready + task.block, tiles};
    case MOK_PHASE_WGRAD: {
      const int32_t* first = p.local.group_first_block + task.group;
      return {p.local.group_grads_ready + task.group, (first[1] - first[0]) * tiles};
    }
    default:
      return {p.local.rows_ready + task.block, kPieces};
  }
}

// Whether all tiles that read a group's part of the rings have done so.
MOK_DEVICE bool group_released(int32_t group, const BackwardParams& p) {
  const Geometry& g = p.geometry;
  const int32_t* block = p.local.group_first_block + group;
  const int32_t* cut = p.local.group_first_cut + group;
  const uint32_t readers =
      (block[1] - block[0]) * g.fc2_tiles + (cut[1] - cut[0]) * g.wgrad_tiles();
  return load_relaxed(p.local.group_released + group) >= readers;
}

// Whether the ring slot of a block may be overwritten.
MOK_DEVICE bool slot_free(int32_t block, const BackwardParams& p) {
  const int32_t before = block - p.geometry.grad_ring_blocks;
  return before < 0 || group_released(p.local.blocks[before].group, p);
}

}  // namespace mok::sm90

#endif  // MOK_SM90_BACKWARD_TASK_CUH_
