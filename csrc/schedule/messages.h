// Errors that both engines report, in the same words.
#ifndef MOK_SCHEDULE_MESSAGES_H_
#define MOK_SCHEDULE_MESSAGES_H_

#include <string>

#include "layout.h"

namespace mok {

inline const char* op_name(int32_t op) {
  switch (static_cast<Op>(op & 0xff)) {
    case Op::kSchedule:
      return "schedule";
    case Op::kDispatch:
      return "dispatch";
    case Op::kCombine:
      return "combine";
    case Op::kForward:
      return "forward";
    case Op::kBackward:
      return "backward";
  }
  return "an unknown operation";
}

inline const char* refusal_text(int32_t refusal) {
  switch (refusal) {
    case kRefusedTokens:
      return "more tokens than the workspace takes";
    case kRefusedExpertId:
      return "an expert id out of range";
    default:
      return "a missing or misaligned buffer, or a wrong size";
  }
}

// This rank.
inline std::string rank_text(const MokShape& s) {
  return "rank " + std::to_string(s.ep_rank) + " of EP " + std::to_string(s.ep_size);
}

inline std::string peer_text(int32_t rank) {
  return "rank " + std::to_string(rank) + " of the EP group";
}

inline std::string bad_tokens_text(const MokShape& s, int32_t tokens) {
  return "got " + std::to_string(tokens) + " tokens; the workspace takes 0 to " +
         std::to_string(s.max_tokens) + " (its max_tokens)";
}

// Of dispatch and combine, or "".
inline std::string bad_capacity_text(int64_t max_blocks, int64_t capacity) {
  const int64_t most = max_blocks * kBlockRows;
  if (capacity >= 0 && capacity <= most && capacity % kBlockRows == 0) return "";
  return "capacity is " + std::to_string(capacity) + " rows; it must be a multiple of " +
         std::to_string(kBlockRows) + ", at most " + std::to_string(most);
}

// Of the schedule as data, or "".
inline std::string small_row_capacity_text(int64_t max_blocks, int64_t row_capacity) {
  const int64_t needed = max_blocks * kBlockRows;
  if (row_capacity >= needed) return "";
  return "row_capacity is " + std::to_string(row_capacity) + "; the workspace needs room for " +
         std::to_string(needed) + " rows";
}

// route: its position in the [T, K] expert ids.
inline std::string bad_expert_text(const MokShape& s, int32_t expert, int64_t route) {
  return "expert id " + std::to_string(expert) + " at token " + std::to_string(route / s.topk) +
         ", k " + std::to_string(route % s.topk) + "; allowed are -1 (no route) to " +
         std::to_string(s.num_experts - 1);
}

inline std::string peer_refused_text(int32_t rank, int32_t refusal) {
  return peer_text(rank) + " refused its arguments (" + refusal_text(refusal) + "); see its error";
}

inline std::string other_call_text(int32_t rank, int32_t op, int32_t my_op) {
  return peer_text(rank) + " calls " + op_name(op) + " while this rank calls " + op_name(my_op) +
         "; every rank must make the same calls in the same order";
}

}  // namespace mok

#endif  // MOK_SCHEDULE_MESSAGES_H_
