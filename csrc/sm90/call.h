// What the kernels of one call share: the schedule's results, counters, and where everything lies.
#ifndef MOK_SM90_CALL_H_
#define MOK_SM90_CALL_H_

#include <cuda.h>

#include "../schedule/tables.h"

namespace mok::sm90 {

// Where a bounded wait ran out. (Math warps wait without a deadline; see sync.cuh.)
enum WaitSite : int32_t {
  kWaitNone = 0,
  kWaitPeerCounts,
  kWaitPeerRows,
  kWaitStageEmpty,
  kWaitTaskEmpty,
  kWaitStagingFull,
  kWaitRowRing,
  kWaitActivationRing,
  kWaitRows,
  kWaitActivations,
  kWaitCombine,
  kWaitChunkFull,
  kWaitGradRing,
  kWaitGrads,
  kWaitPulled,
  kWaitPushed,
};

// The first failure of this rank, in memory that the host reads.
struct Fault {
  int32_t site;    // WaitSite
  int32_t detail;  // the peer, block or token that was waited for; -1: none
  int32_t by;      // rank that gave up first
  int32_t raised;
};

// A call that no rank made because one refused it, in memory that the host reads and clears. The
// first one stays until then.
struct RefusedCall {
  int32_t rank;  // that refused, or made another call
  int32_t op;    // its CallHeader
  int32_t tokens;
  int32_t my_op;
  int32_t route;  // of kRefusedExpertId on this rank itself
  int32_t expert;
  uint32_t epoch;
  int32_t raised;
};

struct Watchdog {
  uint32_t* abort;        // own PeerFlags.abort
  uint64_t* failed_wait;  // CallState.failed_wait
  uint32_t* peer_abort[MOK_MAX_RANKS];
  Fault* fault;
  int32_t rank;
  int32_t num_ranks;
  uint64_t first_wait_ns;
  uint64_t inner_wait_ns;
};

// A rank's report: so many steps of this epoch are complete, and so are all earlier epochs.
MOK_HD uint64_t progress_word(uint32_t epoch, uint32_t steps) {
  return uint64_t{epoch} << 32 | steps;
}

// A rank's progress counts its groups, but the last one counts for as many as it has panels: runs
// of column tiles. Its tokens can so be reduced panel by panel while it is still at work.
constexpr int32_t kPanels = 4;

MOK_HD int32_t num_panels(int32_t fc2_tiles) { return fc2_tiles < kPanels ? fc2_tiles : kPanels; }
MOK_HD int32_t panel_first_tile(int32_t panel, int32_t fc2_tiles) {
  return fc2_tiles * panel / num_panels(fc2_tiles);
}

// Tokens are reduced in the order in which they complete, in buckets of the number of groups that
// their last route lies before its rank's last group. The first bucket takes all that lie further.
constexpr int32_t kReduceBuckets = 8;

// Results of the schedule and the counters of a call, in this rank's private memory.
struct CallState {
  uint32_t epoch;  // number of this call; kept in device memory so that CUDA graphs can be replayed
  int32_t num_blocks;
  int32_t num_groups;
  int32_t refused;       // 1: some rank refuses this call, so its kernels do nothing
  uint64_t failed_wait;  // see sync.cuh; the workspace is poisoned if not 0
  uint32_t bad_route;    // ~index of this rank's first expert id out of range, 0: there is none
  // Zeroed at the start of every call.
  struct Counters {
    uint32_t task_ticket;
    uint32_t dispatch_ticket;
    uint32_t reduce_ticket;
    uint32_t chunks_routed;
    uint32_t pieces_done;  // of dispatch or combine alone
    uint32_t bucket_tokens[kReduceBuckets];
  } counters;
};

// A row block as its tasks need it.
struct BlockInfo {
  int16_t expert;  // local
  int16_t rows;    // that are not padding
  int32_t group;
};

// A weight gradient is the sum over cuts of an expert's rows, each a fixed number of row blocks but
// the last: what a tile adds at once. The cuts of an expert are added one after the other, so that
// the bits of the sum do not depend on anything else.
constexpr int32_t kCutBlocks = 32;
struct CutInfo {
  int32_t first_block;
  int32_t index;    // among the cuts of the expert
  int16_t expert;   // local
  int16_t k_steps;  // rows / kTileK, rounded up
  int32_t more;     // 1: the expert has another cut after this one
};

// MokRow.k on the device: the route, and the slot that its result is pushed to. Slots of a token
// are in ascending (expert id, k), the order in which they are added.
MOK_HD int16_t pack_route(int32_t k, int32_t slot) { return static_cast<int16_t>(k | slot << 8); }
MOK_HD int32_t route_k(const MokRow& row) { return row.k & 0xff; }
MOK_HD int32_t route_slot(const MokRow& row) { return row.k >> 8; }

// Where the rows of one expert that come from this rank lie at its owner.
struct ExpertRows {
  int32_t first_block;  // of the expert
  int32_t before_rank;  // rows of the expert from ranks before this one
};

// How the blocks of one expert are grouped at its owner.
struct ExpertGroups {
  int32_t first;         // group of its first block
  int32_t chunk_blocks;  // every so many blocks begin the next group; large if they are not split,
                         // otherwise whole cuts

  MOK_HD int32_t group_of(int32_t block_in_expert) const {
    return first + block_in_expert / chunk_blocks;
  }
};

// Private memory of a rank, sized for the worst case; see make_local_layout.
struct LocalTables {
  CallState* state;
  BlockInfo* blocks;           // [max_blocks]
  int32_t* group_first_block;  // [max_blocks + 1]; num_groups + 1 are in use
  CutInfo* cuts;               // [max_cuts] in the order of their blocks
  int32_t* group_first_cut;    // [max_blocks + 1]
  int32_t* expert_first_cut;   // [L + 1]
  // Counters, zeroed at the start of every call: counter_words words from rows_ready on.
  int64_t counter_words;
  uint32_t* rows_ready;         // [max_blocks] pieces of a block that have been pulled
  uint32_t* activations_ready;  // [max_blocks] FC1 tiles of a block that have been stored
  uint32_t* step_done;          // [max_blocks + kPanels] tiles pushed, +1 when all steps before are
  uint32_t* grads_ready;        // [max_blocks] tiles of a block's preactivation gradients stored
  uint32_t* group_grads_ready;  // [max_blocks] the same for all blocks of a group
  uint32_t* group_released;     // [max_blocks] tiles that have read what a group has in the rings
  uint32_t* cuts_added;         // [L] warps that have added their part of a tile of earlier cuts
  int32_t* chunk_offsets;       // [E, max_chunks] routes of an expert in earlier chunks of tokens
  ExpertRows* first_row;        // [E] where this rank's rows of an expert begin at its owner
  ExpertGroups* expert_groups;  // [E] groups of every expert
  int32_t* rank_groups;         // [ep_size] number of groups of each rank
  uint16_t* route_group;        // [max_tokens, K] group of each route at its owner
  int32_t* slot_row;            // [max_tokens, K] row of the result in each slot; -1: at a peer
  int32_t* bucket;              // [kReduceBuckets, max_tokens] tokens to reduce
};

// Pointers into the peer segments.
struct PeerTables {
  PeerFlags* flags[MOK_MAX_RANKS];
  CallHeader* headers[MOK_MAX_RANKS];         // [2][ep_size]
  int32_t* counts[MOK_MAX_RANKS];             // [2][ep_size][E]
  MokRow* rows[MOK_MAX_RANKS];                // [max_blocks * kBlockRows]
  const uint8_t* hidden[MOK_MAX_RANKS];       // [max_tokens, H] BF16
  const uint8_t* grad_output[MOK_MAX_RANKS];  // [max_tokens, H] BF16
  uint8_t* slots[MOK_MAX_RANKS];              // [max_tokens, K, H] BF16
  float* prob_slots[MOK_MAX_RANKS];           // [max_tokens, K]
  uint64_t* progress[MOK_MAX_RANKS];          // [ep_size] progress_word of each rank
};

// Sizes of a call that never change in the life of a workspace.
struct Geometry {
  int32_t num_ranks;
  int32_t rank;
  int32_t num_experts;
  int32_t local_experts;
  int32_t topk;
  int32_t hidden;
  int32_t ffn;
  int32_t max_tokens;
  int32_t max_blocks;
  int32_t max_cuts;
  int32_t max_chunks;       // a multiple of 4
  int32_t fc1_tiles;        // tiles of kTileF columns of F
  int32_t fc2_tiles;        // tiles of kTileN columns of H; also of FC1's dgrad
  int32_t fc2_dgrad_tiles;  // tiles of kTileN columns of F
  int32_t fc1_wgrad_tiles;  // kTileM x kTileN tiles of [2F, H]
  int32_t fc2_wgrad_tiles;  // of [H, F]
  // Groups are whole experts, at least min_group_blocks together, so that each weight is read from
  // memory in one group only; experts of more than max_group_blocks are split.
  int32_t min_group_blocks;
  int32_t max_group_blocks;
  // A ring slot is reused once FC1 (rows) or FC2 (activations) of its last block is done. No task
  // may wait for a larger ticket, so the rings hold the largest group, and the two largest.
  int32_t row_ring_blocks;
  int32_t activation_ring_blocks;
  // Backward keeps all that a group's weight gradients read until they are done, one group later.
  int32_t grad_ring_blocks;

  MOK_HD int32_t wgrad_tiles() const { return fc1_wgrad_tiles + fc2_wgrad_tiles; }
};

// What the parts that forward and backward share need of a call.
struct CallParams {
  Geometry geometry;
  LocalTables local;
  PeerTables peers;
  Watchdog dog;
  int32_t tokens;
  const int32_t* expert_ids;  // [T, K]
  const uint8_t* addend;      // [T, H] BF16, or NULL
  uint8_t* output;            // [T, H] BF16: sums of the rows pushed to this rank, plus addend
  float* grad_probs;          // [T, K] copied from the slots of probs, or NULL
};

}  // namespace mok::sm90

#endif  // MOK_SM90_CALL_H_
