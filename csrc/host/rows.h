// Moving rows between ranks: pull from the owners' staging areas, push into the owners' slots, and
// the ordered sum over slots. Shared by forward, backward, dispatch and combine.
#ifndef MOK_HOST_ROWS_H_
#define MOK_HOST_ROWS_H_

#include <cstring>

#include "call.h"
#include "scalar.h"

namespace mok {

// Copies the block's rows from the staged matrix at `staged` (an offset of PeerLayout) into
// out[kBlockRows, H]. Rows of padding are left alone.
template <typename T>
void pull_block(Call& call, int32_t block, int64_t staged, T* out) {
  const int64_t hidden = call.ws.shape.hidden;
  const MokRow* row = call.rows() + block * kBlockRows;
  for (int32_t i = 0, n = call.rows_of_block(block); i < n; ++i) {
    const T* source = call.ws.peer<T>(row[i].rank, staged) + row[i].token * hidden;
    std::memcpy(out + i * hidden, source, sizeof(T) * hidden);
  }
}

// Where the owner of a row takes its result: [H].
template <typename T>
T* slot_of(Call& call, const MokRow& row) {
  const MokShape& s = call.ws.shape;
  return call.ws.peer<T>(row.rank, call.ws.layout.slots) +
         (int64_t{row.token} * s.topk + row.k) * s.hidden;
}

// Number of ranges that the tokens of a call are reduced in.
inline int32_t reduce_tiles(const MokRoutes& routes) {
  return int32_t(ceil_div(routes.tokens, kReduceTokens));
}

// out[t] = sum over t's routes in ascending expert id, in FP32, plus addend[t]; rounded once.
template <typename T>
void reduce_tokens(Call& call, const Task& task, const T* addend, T* out) {
  const MokShape& s = call.ws.shape;
  call.wait_combined(task.ticket);
  const T* slots = call.ws.peer<T>(s.ep_rank, call.ws.layout.slots);
  const int32_t first = task.tile * kReduceTokens;
  const int32_t last = std::min(call.routes.tokens, first + kReduceTokens);
  std::vector<float> sum(s.hidden);
  for (int64_t t = first; t < last; ++t) {
    int32_t order[MOK_MAX_TOPK];
    const int32_t n = reduction_order(call.routes.expert_ids + t * s.topk, s.topk, order);
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int32_t j = 0; j < n; ++j) {
      const T* slot = slots + (t * s.topk + order[j]) * s.hidden;
      for (int32_t h = 0; h < s.hidden; ++h) sum[h] += to_float(slot[h]);
    }
    for (int32_t h = 0; h < s.hidden; ++h) {
      const float added = addend ? to_float(addend[t * s.hidden + h]) : 0.0f;
      out[t * s.hidden + h] = from_float<T>(sum[h] + added);
    }
  }
}

}  // namespace mok

#endif  // MOK_HOST_ROWS_H_
