// Tile sizes, warp roles and the shared-memory plan of the persistent kernels.
#ifndef MOK_SM90_LAYOUT_CUH_
#define MOK_SM90_LAYOUT_CUH_

#include <cstdint>

#include "../schedule/layout.h"

namespace mok::sm90 {

// A task computes one 128 x 256 tile, K in steps of 64 (one 128-byte swizzle atom of BF16). At this
// tile the operands take 8 TB/s from L2 at full rate, near its limit; smaller tiles would exceed
// it.
constexpr int32_t kTileM = 128;
constexpr int32_t kTileN = 256;
constexpr int32_t kTileK = 64;
static_assert(kTileM == kBlockRows, "a tile is one row block high");

// Columns of the activation that an FC1 tile yields: half of its columns are gate, half are up.
constexpr int32_t kTileF = kTileN / 2;

// Warpgroups 0 and 1 multiply, 64 rows each. The warps of warpgroup 2 feed them. More warps are not
// possible: 208 registers a math thread leave 88 for the 128 others.
constexpr int32_t kMathWarpgroups = 2;
constexpr int32_t kMathWarps = 4 * kMathWarpgroups;
constexpr int32_t kWarpgroupRows = kTileM / kMathWarpgroups;
constexpr int32_t kLoadWarp = kMathWarps;        // claims tasks, issues tensor loads
constexpr int32_t kStoreWarp = kMathWarps + 1;   // stores finished tiles, raises flags
constexpr int32_t kFirstMover = kMathWarps + 2;  // pull rows, reduce combined rows
constexpr int32_t kMovers = 2;
constexpr int32_t kThreads = 32 * (kMathWarps + 2 + kMovers);
constexpr int32_t kMathRegisters = 208;
constexpr int32_t kFeedRegisters = 88;
static_assert(128 * (kMathWarpgroups * kMathRegisters + kFeedRegisters) <= 65536, "registers");

constexpr int32_t kStages = 3;
constexpr int32_t kOperandABytes = kTileM * kTileK * 2;
constexpr int32_t kOperandBBytes = kTileN * kTileK * 2;
constexpr int32_t kStageBytes = kOperandABytes + kOperandBBytes;

// The output tile waits here for the store warp, a half for each math warpgroup. Rows that are
// pushed one by one must be linear; they are padded by 16 bytes, for at a pitch of 512 bytes every
// matrix store would be an 8-way bank conflict. Tiles of a matrix are boxes of 64 columns in
// 128-byte swizzle, as tensor stores take them.
constexpr int32_t kStagingPitch = kTileN * 2 + 16;
constexpr int32_t kStagingHalfBytes = kWarpgroupRows * kStagingPitch;
constexpr int32_t kStagingBytes = kMathWarpgroups * kStagingHalfBytes;
constexpr int32_t kBoxColumns = 64;
constexpr int32_t kBoxBytes = kWarpgroupRows * kBoxColumns * 2;
static_assert(kTileN / kBoxColumns * kBoxBytes <= kStagingHalfBytes, "a tile also fits as boxes");
static_assert(kStagingHalfBytes % 1024 == 0, "alignment of the swizzle");

// FC2's dgrad takes pre-activations and gives back gradients in chunks of 64 columns that ride the
// operand stages: for each warpgroup a box of gate, one of up, and room for one of activations.
constexpr int32_t kChunksPerTile = kTileN / kBoxColumns;
constexpr int32_t kHalfChunkBytes = 3 * kBoxBytes;
static_assert(kMathWarpgroups * kHalfChunkBytes <= kStageBytes, "a chunk fits a stage");

// A weight gradient leaves each math warp in slices of 16 rows x 32 columns of FP32, through
// buffers in the staging tile.
constexpr int32_t kSliceColumns = 32;
constexpr int32_t kSliceBytes = 16 * kSliceColumns * 4;
constexpr int32_t kSliceBuffers = 4;
static_assert(4 * kSliceBuffers * kSliceBytes <= kStagingHalfBytes, "the buffers of four warps");

// Tasks claimed but not yet stored: one loading, one multiplying, one storing.
constexpr int32_t kTaskSlots = 4;

// Byte offsets in dynamic shared memory, which starts 1024-byte aligned for the swizzle.
struct SharedPlan {
  static constexpr uint32_t kOperands = 0;
  static constexpr uint32_t kStaging = kOperands + kStages * kStageBytes;
  static constexpr uint32_t kTasks = kStaging + kStagingBytes;
  static constexpr uint32_t kStageFull = kTasks + kTaskSlots * 16;
  static constexpr uint32_t kStageEmpty = kStageFull + kStages * 8;
  static constexpr uint32_t kChunkDone = kStageEmpty + kStages * 8;
  static constexpr uint32_t kTaskFull = kChunkDone + kStages * 8;
  static constexpr uint32_t kTaskEmpty = kTaskFull + kTaskSlots * 8;
  static constexpr uint32_t kStagingFull = kTaskEmpty + kTaskSlots * 8;
  static constexpr uint32_t kStagingFree = kStagingFull + kMathWarpgroups * 8;
  static constexpr uint32_t kBytes = kStagingFree + kMathWarpgroups * 8;
};
static_assert(SharedPlan::kStaging % 1024 == 0 && SharedPlan::kTasks % 16 == 0,
              "alignment of swizzled tiles and of tasks");
static_assert(SharedPlan::kBytes <= 232448, "shared memory of one CTA on sm_90");

}  // namespace mok::sm90

#endif  // MOK_SM90_LAYOUT_CUH_
