// Dispatch and combine alone, and the schedule as data.
#include <algorithm>

#include "../schedule/messages.h"
#include "ops.h"
#include "rows.h"

namespace mok {
namespace {

void require_room(const Call& call, int64_t capacity) {
  const int64_t needed = call.num_blocks() * kBlockRows;
  if (needed > capacity) {
    // Peers are at work by now, so this is no refusal: they will miss this rank.
    throw Error(MOK_ERR_SYSTEM, rank_text(call.ws.shape) + " got " + std::to_string(needed) +
                                    " padded rows; there is room for " + std::to_string(capacity));
  }
}

template <typename T>
void dispatch(Call& call, const MokDispatchArgs& args) {
  const MokShape& s = call.ws.shape;
  T* out = static_cast<T*>(args.rows);
  require_room(call, args.capacity);
  for (int32_t b = 0; b < call.num_blocks(); ++b) {
    const int64_t first = b * kBlockRows;
    const int32_t rows = call.rows_of_block(b);
    pull_block(call, b, call.ws.layout.hidden, out + first * s.hidden);
    std::fill(out + (first + rows) * s.hidden, out + (first + kBlockRows) * s.hidden, T{});
    if (args.row_probs) {
      for (int32_t i = 0; i < kBlockRows; ++i) {
        args.row_probs[first + i] = i < rows ? call.rows()[first + i].prob : 0.0f;
      }
    }
    call.block_pulled();
  }
  for (int32_t i = 0; i < local_experts(s); ++i) {
    args.expert_rows[i] = expert_rows(call.counts.data(), s, s.ep_rank * local_experts(s) + i);
  }
}

template <typename T>
void combine(Call& call, const MokCombineArgs& args) {
  const MokShape& s = call.ws.shape;
  const T* source = static_cast<const T*>(args.rows);
  require_room(call, args.capacity);
  call.expect_parts(1);
  for (int32_t b = 0; b < call.num_blocks(); ++b) {
    for (int64_t i = b * kBlockRows, last = i + call.rows_of_block(b); i < last; ++i) {
      const MokRow& row = call.rows()[i];
      std::copy_n(source + i * s.hidden, s.hidden, slot_of<T>(call, row));
      if (args.row_probs) {
        float* slots = call.ws.peer<float>(row.rank, call.ws.layout.prob_slots);
        slots[int64_t{row.token} * s.topk + row.k] = args.row_probs[i];
      }
    }
    call.part_pushed(b);
  }
  Task task{MOK_PHASE_REDUCE, 0, 0, 0, nullptr};
  for (; task.tile < reduce_tiles(call.routes); ++task.tile) {
    reduce_tokens<T>(call, task, static_cast<const T*>(args.addend), static_cast<T*>(args.output));
  }
  if (!args.route_probs) return;
  const float* values = call.ws.peer<float>(s.ep_rank, call.ws.layout.prob_slots);
  for (int64_t i = 0; i < int64_t{call.routes.tokens} * s.topk; ++i) {
    args.route_probs[i] = call.routes.expert_ids[i] < 0 ? 0.0f : values[i];
  }
}

}  // namespace

void run_dispatch(Call& call, const MokDispatchArgs& args) {
  if (call.ws.shape.dtype == MOK_F32) {
    dispatch<float>(call, args);
  } else {
    dispatch<Bf16>(call, args);
  }
}

void run_combine(Call& call, const MokCombineArgs& args) {
  if (call.ws.shape.dtype == MOK_F32) {
    combine<float>(call, args);
  } else {
    combine<Bf16>(call, args);
  }
}

void run_schedule(Call& call, MokScheduleArgs& args) {
  call.build(MokDirection(args.direction), reduce_tiles(call.routes));
  std::copy(call.counts.begin(), call.counts.end(), args.counts);
  std::copy(call.block_offsets.begin(), call.block_offsets.end(), args.block_offsets);
  for (int32_t b = 0; b < call.num_blocks(); ++b) {
    const MokRow* from = call.rows() + b * kBlockRows;
    MokRow* to = args.rows + b * kBlockRows;
    const int32_t rows = call.rows_of_block(b);
    std::copy_n(from, rows, to);
    std::fill_n(to + rows, kBlockRows - rows, MokRow{-1, -1, -1, 0.0f, -1});
  }
  args.num_segments = int32_t(call.segments.size());
  args.num_tickets = call.num_tickets;
  std::copy_n(call.segments.begin(), std::min(args.num_segments, args.segment_capacity),
              args.segments);
}

}  // namespace mok
