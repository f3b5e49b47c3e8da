// Where things lie in the memory that ranks share. One source for the host and CUDA engines.
#ifndef MOK_SCHEDULE_LAYOUT_H_
#define MOK_SCHEDULE_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "mok.h"

#ifdef __CUDACC__
#define MOK_HD __host__ __device__ inline
#else
#define MOK_HD inline
#endif

namespace mok {

constexpr int64_t kBlockRows = MOK_BLOCK_ROWS;

MOK_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MOK_HD int64_t align_up(int64_t value, int64_t alignment) {
  return ceil_div(value, alignment) * alignment;
}

MOK_HD int64_t dtype_bytes(int32_t dtype) { return dtype == MOK_F32 ? 4 : 2; }
MOK_HD int32_t local_experts(const MokShape& s) { return s.num_experts / s.ep_size; }

// Blocks of this rank if every route of every rank came to it: full blocks, and for each local
// expert at most one that is not full.
MOK_HD int64_t max_blocks(const MokShape& s) {
  return int64_t{s.ep_size} * s.max_tokens * s.topk / kBlockRows + local_experts(s);
}

// Entry points of an engine.
enum class Op : int32_t { kSchedule = 1, kDispatch, kCombine, kForward, kBackward };

// Why a rank refuses a call. In words: messages.h.
enum Refusal : int32_t {
  kRefusedArgument = -1,
  kRefusedTokens = -2,
  kRefusedExpertId = -3,
};

// What a rank announces when it enters a call. Peers refuse to go on unless they do the same call.
struct CallHeader {
  int32_t op;      // Op in the low byte; above it what else ranks must have in common
  int32_t tokens;  // or a Refusal: every rank must return
};

// Words that peers write carry the epoch (number of the call) and are never reset: a peer may be
// one call ahead. All are indexed by the rank that writes.
struct PeerFlags {
  uint32_t counts[MOK_MAX_RANKS];   // its counts are here, it has staged, its slots are free
  uint32_t rows[MOK_MAX_RANKS];     // its entries of my row table are here
  uint32_t combine[MOK_MAX_RANKS];  // all rows it computed for my tokens are in my slots
  uint32_t pulled[MOK_MAX_RANKS];   // it has pulled all it needs from my staging area
  uint32_t abort;                   // 1 + rank of the first that failed, for ever after
};

// Byte offsets inside a rank's peer segment.
struct PeerLayout {
  int64_t flags;        // PeerFlags
  int64_t headers;      // [2][ep_size] CallHeader, banked by epoch parity
  int64_t counts;       // [2][ep_size][E] int32, banked likewise
  int64_t rows;         // [max_blocks * kBlockRows] MokRow: this rank's row table
  int64_t hidden;       // [max_tokens, H] staged hidden states, pulled by peers
  int64_t grad_output;  // [max_tokens, H] staged gradient of the output
  int64_t slots;        // [max_tokens, K, H] results that peers push back
  int64_t prob_slots;   // [max_tokens, K] float gradients of probs
  int64_t bytes;
};

MOK_HD PeerLayout make_peer_layout(const MokShape& s) {
  constexpr int64_t kAlign = 256;
  const int64_t matrix = align_up(int64_t{s.max_tokens} * s.hidden * dtype_bytes(s.dtype), kAlign);
  PeerLayout at{};
  at.flags = 0;
  at.headers = align_up(sizeof(PeerFlags), kAlign);
  at.counts = align_up(at.headers + 2 * int64_t{s.ep_size} * int64_t{sizeof(CallHeader)}, kAlign);
  at.rows = align_up(at.counts + 2 * int64_t{s.ep_size} * s.num_experts * 4, kAlign);
  at.hidden = align_up(at.rows + max_blocks(s) * kBlockRows * int64_t{sizeof(MokRow)}, kAlign);
  at.grad_output = at.hidden + matrix;
  at.slots = at.grad_output + matrix;
  at.prob_slots = at.slots + matrix * s.topk;
  at.bytes = align_up(at.prob_slots + int64_t{s.max_tokens} * s.topk * 4, kAlign);
  return at;
}

// The reason why a shape is impossible, or NULL.
MOK_HD const char* check_shape(const MokShape& s) {
  if (s.ep_size < 1 || s.ep_size > MOK_MAX_RANKS) return "ep_size must be 1..72";
  if (s.ep_rank < 0 || s.ep_rank >= s.ep_size) return "ep_rank must be 0..ep_size-1";
  if (s.num_experts < 1 || s.num_experts > MOK_MAX_EXPERTS) return "num_experts must be 1..1024";
  if (s.num_experts % s.ep_size != 0) return "num_experts must be a multiple of ep_size";
  if (s.topk < 1 || s.topk > MOK_MAX_TOPK) return "topk must be 1..32";
  if (s.hidden < 64 || s.hidden % 64 != 0) return "hidden must be a positive multiple of 64";
  if (s.ffn < 64 || s.ffn % 64 != 0) return "ffn must be a positive multiple of 64";
  if (s.max_tokens < 1) return "max_tokens must be positive";
  if (s.dtype != MOK_F32 && s.dtype != MOK_BF16) return "dtype must be MOK_F32 or MOK_BF16";
  if (max_blocks(s) > INT32_MAX / kBlockRows) return "more than 2^31 rows in the worst case";
  return nullptr;
}

}  // namespace mok

#endif  // MOK_SCHEDULE_LAYOUT_H_
