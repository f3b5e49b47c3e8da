// The C ABI of Mixture-of-Kittens, implemented by libmok_host.so (CPU threads) and libmok_cuda.so.
//
// Plain structs, pointers and status codes; no torch, no Python. All calls on one workspace are
// collective over its expert-parallel (EP) group and must be made in the same order on every rank.
//
// A rank that refuses its arguments tells its peers, and no rank makes the call. The host engine
// then returns MOK_ERR_INVALID_ARGUMENT on every rank. Calls of the CUDA engine return before the
// device has met its peers: they learn of it from their next call or from mok_check, and what the
// refused call should have computed is undefined. Expert ids out of range are refused likewise, on
// the CUDA engine when the device has seen them.
//
// The CUDA engine takes pointers to device memory, but for the lists of pointers in MokWeights and
// MokWeightGrads and the results of mok_schedule, which are in host memory.
//
// Shapes: T tokens of this rank, K routes per token, H hidden size, F expert FFN size, E experts of
// the whole EP group, L = E / ep_size experts of this rank. Matrices are row-major and contiguous.
#ifndef MOK_H_
#define MOK_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOK_ABI_VERSION 2
#define MOK_MAX_RANKS 72
#define MOK_MAX_EXPERTS 1024
#define MOK_MAX_TOPK 32
// Rows of an expert are padded to whole blocks of this many rows.
#define MOK_BLOCK_ROWS 128

typedef enum MokStatus {
  MOK_OK = 0,
  MOK_ERR_INVALID_ARGUMENT = 1,  // no rank makes the call; the workspace can be used again
  MOK_ERR_TIMEOUT = 2,           // a bounded wait ran out; the workspace is poisoned
  MOK_ERR_POISONED = 3,          // an earlier call on this workspace failed midway
  MOK_ERR_UNSUPPORTED = 4,       // this engine cannot do what was asked
  MOK_ERR_SYSTEM = 5             // memory, threads or the CUDA runtime failed
} MokStatus;

typedef enum MokDtype { MOK_F32 = 0, MOK_BF16 = 1 } MokDtype;

// What a workspace is made for. Equal on every rank, but for ep_rank.
typedef struct MokShape {
  int32_t ep_size;
  int32_t ep_rank;
  int32_t num_experts;  // E, a multiple of ep_size, at most MOK_MAX_EXPERTS
  int32_t topk;         // K, at most MOK_MAX_TOPK
  int32_t hidden;       // H, a multiple of 64
  int32_t ffn;          // F, a multiple of 64
  int32_t max_tokens;   // most tokens this rank may pass in one call
  int32_t dtype;        // MokDtype of hidden states, weights and activations
} MokShape;

typedef struct MokOptions {
  int32_t workers;        // CPU threads or CTAs; 0 lets the engine choose
  int32_t first_wait_ms;  // wait for peers to enter a call (they may be saving a checkpoint)
  int32_t inner_wait_ms;  // every later wait of a call
} MokOptions;

// Sizes that follow from a shape.
typedef struct MokLayout {
  int64_t peer_bytes;   // zeroed memory that every rank provides and maps from every peer
  int64_t local_bytes;  // private memory that mok_workspace_create allocates
  int64_t max_rows;     // padded rows in the worst case: every route of every rank to this rank
} MokLayout;

typedef struct MokWorkspaceDesc {
  MokShape shape;
  MokOptions options;
  void* peers[MOK_MAX_RANKS];  // the peer segments, in rank order; own one at ep_rank
} MokWorkspaceDesc;

typedef struct MokWorkspace MokWorkspace;

// The routes of this rank's tokens.
typedef struct MokRoutes {
  int32_t tokens;             // T
  const int32_t* expert_ids;  // [T, K] global expert ids in any order; -1: no route
  const float* probs;         // [T, K]
} MokRoutes;

// Routes from the dense map of Megatron's router. Needs no workspace and concerns one rank alone.
typedef enum MokProbsDtype {
  MOK_PROBS_F32 = 0,
  MOK_PROBS_BF16 = 1,
  MOK_PROBS_F64 = 2
} MokProbsDtype;
typedef struct MokRouteMapArgs {
  int32_t tokens;              // T
  int32_t experts;             // E
  int32_t topk;                // K
  const uint8_t* routing_map;  // [T, E], 1 where the token goes to the expert
  const void* probs;           // [T, E] of probs_dtype
  int32_t probs_dtype;         // MokProbsDtype
  int32_t* expert_ids;         // [T, K] ascending, then -1
  float* route_probs;          // [T, K], 0 where there is no route
  void* stream;
} MokRouteMapArgs;

// One routed row, as the rank that computes it sees it.
typedef struct MokRow {
  int32_t token;  // in the owner's [T]
  int16_t rank;   // owner
  int16_t k;      // route of the token
  float prob;
  int32_t expert;  // global id
} MokRow;

// Weights of the L local experts: fc1[i] is [2F, H] (gate rows, then up rows), fc2[i] is [H, F].
typedef struct MokWeights {
  const void* const* fc1;
  const void* const* fc2;
} MokWeights;

// FP32 weight gradients, one pointer per local expert; NULL skips that expert's matrix.
typedef struct MokWeightGrads {
  float* const* fc1;   // [2F, H] each
  float* const* fc2;   // [H, F] each
  int32_t accumulate;  // 1 adds to what is there (main_grad), 0 overwrites it
} MokWeightGrads;

// Pre-activations (gate columns, then up columns) of the first `rows` padded rows of this rank,
// kept from forward to backward. Rows beyond are recomputed. The content of padding rows is
// undefined.
typedef struct MokSaved {
  void* preact;  // [rows, 2F] of the shape's dtype; NULL when rows is 0
  int64_t rows;  // a multiple of MOK_BLOCK_ROWS
} MokSaved;

typedef struct MokForwardArgs {
  MokRoutes routes;
  const void* hidden;  // [T, H]
  MokWeights weights;
  const void* addend;  // [T, H] added to the combined output (shared expert), or NULL
  void* output;        // [T, H]
  MokSaved saved;
  void* stream;  // cudaStream_t; ignored by the host engine
} MokForwardArgs;

typedef struct MokBackwardArgs {
  MokRoutes routes;
  const void* grad_output;  // [T, H]
  const void* hidden;       // [T, H], as in forward
  MokWeights weights;
  MokSaved saved;
  void* grad_hidden;  // [T, H]
  float* grad_probs;  // [T, K]; 0 where there is no route
  MokWeightGrads weight_grads;
  void* stream;
} MokBackwardArgs;

// Dispatch alone: rows arrive expert by expert, each expert's rows padded to whole blocks of zeros.
//
// `capacity` counts the rows that there is room for, a multiple of MOK_BLOCK_ROWS and at most
// MokLayout.max_rows, which is always enough. A caller that knows how many routes its experts get
// may give less. If it is too little, the host engine fails; the CUDA engine, which returns before
// it could tell, touches no row beyond the capacity, and what depends on those rows is undefined.
typedef struct MokDispatchArgs {
  MokRoutes routes;
  const void* hidden;    // [T, H]
  void* rows;            // [capacity, H]; NULL where the capacity is 0
  float* row_probs;      // [capacity], 0 in padding rows, or NULL: routes.probs may be NULL too
  int32_t* expert_rows;  // [L] rows of each local expert, without padding
  int64_t capacity;      // rows behind the last block are not written
  void* stream;
} MokDispatchArgs;

// Combine alone: the inverse of dispatch under the same routes; sums each token's K rows.
typedef struct MokCombineArgs {
  MokRoutes routes;  // probs are not used
  const void* rows;  // [capacity, H], in dispatch's order
  int64_t capacity;
  const void* addend;      // as in forward
  void* output;            // [T, H]
  const float* row_probs;  // [capacity] a value a row, brought back to its route; or NULL
  float* route_probs;      // [T, K] those values, 0 where there is no route; NULL without them
  void* stream;
} MokCombineArgs;

typedef enum MokDirection { MOK_FORWARD = 0, MOK_BACKWARD = 1 } MokDirection;

typedef enum MokPhase {
  MOK_PHASE_DISPATCH = 0,  // one task a block: pull its rows
  MOK_PHASE_FC1 = 1,       // FC1 and SwiGLU; backward: FC2 dgrad and SwiGLU backward
  MOK_PHASE_FC2 = 2,       // FC2 and push; backward: FC1 dgrad and push
  MOK_PHASE_WGRAD = 3,     // one task a tile of dW1 or dW2
  MOK_PHASE_REDUCE = 4     // sum the K slots of a range of tokens
} MokPhase;

// A run of tasks with consecutive tickets: (tile, block) with the block fastest.
typedef struct MokSegment {
  int32_t phase;  // MokPhase
  int32_t first_ticket;
  int32_t first_block;  // REDUCE: 0
  int32_t num_blocks;   // WGRAD: blocks of the cut, walked by each task; REDUCE: 1
  int32_t first_tile;
  int32_t num_tiles;
  int32_t expert;  // WGRAD: local expert, otherwise -1
  int32_t cut;     // WGRAD: index of the cut within its expert
} MokSegment;

// The schedule alone, for tests and tools: what a forward or backward call would work on. Counts,
// offsets and rows are the same from every engine; each cuts the tasks for itself. The CUDA engine
// takes routes in device memory and everything else in host memory, and waits for the device. Its
// segments are the tiles alone, in the order of their tickets, backward with all pre-activations
// saved: dispatch and reduction have tickets of their own. A segment may begin at any tile.
typedef struct MokScheduleArgs {
  MokRoutes routes;
  int32_t direction;       // MokDirection
  int32_t* counts;         // [ep_size, E] routes from each rank to each expert
  int32_t* block_offsets;  // [L + 1] first block of each local expert
  MokRow* rows;            // [row_capacity]; rank -1 in padding rows
  int64_t row_capacity;    // at least MokLayout.max_rows
  MokSegment* segments;    // [segment_capacity]
  int32_t segment_capacity;
  int32_t num_segments;  // out: segments there are, also where they exceed the capacity
  int32_t num_tickets;   // out
  void* stream;
} MokScheduleArgs;

int32_t mok_abi_version(void);
const char* mok_engine(void);  // "host" or "sm90"
// What went wrong in the last failed call of this thread.
const char* mok_last_error(void);

// Zeroed memory that peers can map: of the current device for the CUDA engine, of the process for
// the host engine. A handle can be opened by other processes of this host while its owner lives.
#define MOK_HANDLE_BYTES 64
MokStatus mok_segment_alloc(int64_t bytes, void** segment);
MokStatus mok_segment_export(void* segment, uint8_t* handle);
MokStatus mok_segment_open(const uint8_t* handle, void** segment);
MokStatus mok_segment_close(void* segment);  // of mok_segment_open
MokStatus mok_segment_free(void* segment);   // of mok_segment_alloc

MokStatus mok_layout(const MokShape* shape, const MokOptions* options, MokLayout* layout);
MokStatus mok_workspace_create(const MokWorkspaceDesc* desc, MokWorkspace** workspace);
void mok_workspace_destroy(MokWorkspace* workspace);

// A token with more than K routes is MOK_ERR_INVALID_ARGUMENT from the host engine. The CUDA engine
// cannot wait to tell, and keeps its first K.
MokStatus mok_routes_from_map(const MokRouteMapArgs* args);

// What kernels of earlier calls have recorded by now; does not wait for them. The same is reported
// by the next call, which is then made nevertheless, so that the ranks stay in step.
MokStatus mok_check(MokWorkspace* workspace);

MokStatus mok_schedule(MokWorkspace* workspace, MokScheduleArgs* args);
MokStatus mok_dispatch(MokWorkspace* workspace, const MokDispatchArgs* args);
MokStatus mok_combine(MokWorkspace* workspace, const MokCombineArgs* args);
MokStatus mok_forward(MokWorkspace* workspace, const MokForwardArgs* args);
MokStatus mok_backward(MokWorkspace* workspace, const MokBackwardArgs* args);

#ifdef __cplusplus
}
#endif

#endif  // MOK_H_
