// Row order and offsets, derived by every rank from the same counts. One source for both engines.
//
// Rows of an expert are ordered by (source rank, token, k), so row blocks and all sums over rows do
// not depend on how many ranks the tokens are spread over.
#ifndef MOK_SCHEDULE_TABLES_H_
#define MOK_SCHEDULE_TABLES_H_

#include "layout.h"

namespace mok {

// counts: [ep_size, E] routes from each rank to each expert.
MOK_HD int32_t expert_rows(const int32_t* counts, const MokShape& s, int32_t expert) {
  int32_t rows = 0;
  for (int32_t r = 0; r < s.ep_size; ++r) rows += counts[int64_t{r} * s.num_experts + expert];
  return rows;
}

// Rows of `expert` that come from ranks before `rank`.
MOK_HD int32_t rows_before_rank(const int32_t* counts, const MokShape& s, int32_t expert,
                                int32_t rank) {
  int32_t rows = 0;
  for (int32_t r = 0; r < rank; ++r) rows += counts[int64_t{r} * s.num_experts + expert];
  return rows;
}

// block_offsets: [L + 1] first block of each expert of `rank`; the last entry is the number of
// blocks.
MOK_HD void build_block_offsets(const int32_t* counts, const MokShape& s, int32_t rank,
                                int32_t* block_offsets) {
  const int32_t num_local = local_experts(s);
  int32_t block = 0;
  for (int32_t i = 0; i < num_local; ++i) {
    block_offsets[i] = block;
    block += int32_t(ceil_div(expert_rows(counts, s, rank * num_local + i), kBlockRows));
  }
  block_offsets[num_local] = block;
}

// The local expert that owns `block`: the last whose first block is not after it.
MOK_HD int32_t expert_of_block(const int32_t* block_offsets, int32_t num_local, int32_t block) {
  int32_t low = 0, high = num_local - 1;
  while (low < high) {
    const int32_t mid = (low + high + 1) / 2;
    if (block_offsets[mid] <= block) {
      low = mid;
    } else {
      high = mid - 1;
    }
  }
  return low;
}

// Real rows in `block`; the rest of its kBlockRows rows is padding.
MOK_HD int32_t rows_in_block(int32_t rows_of_expert, int32_t block_in_expert) {
  const int32_t left = rows_of_expert - block_in_expert * int32_t(kBlockRows);
  return left < kBlockRows ? left : int32_t(kBlockRows);
}

// Order in which the K results of a token are added: ascending expert id, then k. Routes of -1 are
// left out. Returns how many there are.
MOK_HD int32_t reduction_order(const int32_t* expert_ids, int32_t topk, int32_t* order) {
  int32_t n = 0;
  for (int32_t k = 0; k < topk; ++k) {
    if (expert_ids[k] < 0) continue;
    int32_t at = n++;
    for (; at > 0 && expert_ids[order[at - 1]] > expert_ids[k]; --at) order[at] = order[at - 1];
    order[at] = k;
  }
  return n;
}

}  // namespace mok

#endif  // MOK_SCHEDULE_TABLES_H_
