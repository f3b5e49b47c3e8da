// Backward of the expert layer: pull dY and X, FC2 dgrad with the SwiGLU backward, FC1 dgrad +
// push, weight gradients, reduce.
#include "expert.h"
#include "ops.h"
#include "rows.h"

namespace mok {
namespace {

template <typename T>
class Backward {
 public:
  Backward(Call& call, const MokBackwardArgs& args)
      : call_(call), ws_(call.ws), s_(call.ws.shape), args_(args), scratch_(call.ws.workers) {}

  void run() {
    call_.expect_parts(ws_.tasks.fc2_tiles);
    call_.run(MOK_BACKWARD, reduce_tiles(call_.routes), [this](const Task& task, int32_t worker) {
      switch (task.phase) {
        case MOK_PHASE_DISPATCH:
          return dispatch(task);
        case MOK_PHASE_FC1:
          return grad_preact(task, scratch_[worker]);
        case MOK_PHASE_FC2:
          return grad_hidden(task, scratch_[worker]);
        case MOK_PHASE_WGRAD:
          return wgrad(task, scratch_[worker]);
        case MOK_PHASE_REDUCE:
          reduce_tokens<T>(call_, task, nullptr, static_cast<T*>(args_.grad_hidden));
          return collect_grad_probs(task);
      }
    });
  }

 private:
  T* ring(const std::unique_ptr<std::byte[]>& memory, int32_t block, int64_t width) {
    return reinterpret_cast<T*>(memory.get()) + block % ws_.rings.blocks * kBlockRows * width;
  }
  float* grad_prob_parts(int32_t block) {
    return ws_.rings.grad_prob_parts.get() +
           block % ws_.rings.blocks * kBlockRows * ws_.tasks.fc1_tiles;
  }

  void dispatch(const Task& task) {
    if (task.block >= ws_.rings.blocks) wait_free(task, task.block - int32_t(ws_.rings.blocks));
    pull_block(call_, task.block, ws_.layout.hidden, ring(ws_.rings.hidden, task.block, s_.hidden));
    pull_block(call_, task.block, ws_.layout.grad_output,
               ring(ws_.rings.grad_output, task.block, s_.hidden));
    call_.block_pulled();
    ws_.counters.dispatched[task.block].store(1, std::memory_order_release);
  }

  // A ring slot is free once dX and the weight-gradient cut of the block in it are done.
  void wait_free(const Task& task, int32_t old) {
    call_.wait_counter({"backward dispatch", task.ticket}, ws_.counters.fc2[old],
                       ws_.tasks.fc2_tiles);
    const int32_t expert = call_.expert_of(old);
    const int32_t cut = (old - call_.block_offsets[expert]) / ws_.tasks.cut_blocks;
    call_.wait_counter({"backward dispatch", task.ticket}, ws_.counters.wgrad[expert],
                       (cut + 1) * ws_.tasks.wgrad_tiles);
  }

  // dA = dY W2, then gradients of gate, up and prob, and the weighted activation for dW2.
  void grad_preact(const Task& task, Scratch& scratch) {
    call_.wait_counter({"fc2 dgrad", task.ticket}, ws_.counters.dispatched[task.block], 1);
    const Span span = tile_span(task.tile, s_.ffn);
    const int32_t rows = call_.rows_of_block(task.block);
    const int32_t expert = call_.expert_of(task.block);
    load_preact(task.block, expert, rows, span, scratch);
    float* grad_act = scratch.zeroed(scratch.tile);
    const T* weight = static_cast<const T*>(args_.weights.fc2[expert]);
    scratch.gemm.accumulate(
        Matrix<T>{ring(ws_.rings.grad_output, task.block, s_.hidden), s_.hidden, 1},
        Matrix<T>{weight, s_.ffn, 1}.at(0, span.first), rows, span.size, s_.hidden, grad_act,
        kTile);

    const MokRow* row = call_.rows() + task.block * kBlockRows;
    T* act = ring(ws_.rings.act, task.block, s_.ffn) + span.first;
    T* grad = ring(ws_.rings.grad_preact, task.block, 2 * s_.ffn) + span.first;
    float* parts = grad_prob_parts(task.block);
    for (int32_t i = 0; i < rows; ++i, act += s_.ffn, grad += 2 * s_.ffn) {
      const float prob = row[i].prob;
      float grad_prob = 0.0f;
      for (int32_t j = 0; j < span.size; ++j) {
        const float da = grad_act[i * kTile + j];
        const float gate = scratch.gate[i * kTile + j];
        const float up = scratch.up[i * kTile + j];
        const float sig = sigmoid(gate);
        const float silu = gate * sig;
        grad_prob += da * (silu * up);
        act[j] = from_float<T>(silu * up * prob);
        grad[j] = from_float<T>(da * prob * up * (sig * (1.0f + gate * (1.0f - sig))));
        grad[s_.ffn + j] = from_float<T>(da * prob * silu);
      }
      parts[i * int64_t{ws_.tasks.fc1_tiles} + task.tile] = grad_prob;
    }
    ws_.counters.fc1[task.block].fetch_add(1, std::memory_order_acq_rel);
  }

  void load_preact(int32_t block, int32_t expert, int32_t rows, const Span& span,
                   Scratch& scratch) {
    if (!is_saved(args_.saved, block)) {
      fc1_tile(scratch, ring(ws_.rings.hidden, block, s_.hidden), rows,
               static_cast<const T*>(args_.weights.fc1[expert]), s_, span);
      return;
    }
    const T* saved =
        static_cast<const T*>(args_.saved.preact) + block * kBlockRows * 2 * s_.ffn + span.first;
    for (int32_t i = 0; i < rows; ++i, saved += 2 * s_.ffn) {
      for (int32_t j = 0; j < span.size; ++j) {
        scratch.gate[i * kTile + j] = to_float(saved[j]);
        scratch.up[i * kTile + j] = to_float(saved[s_.ffn + j]);
      }
    }
  }

  // dX = dH W1, pushed to the owners' slots; the first tile brings the gradients of the probs.
  void grad_hidden(const Task& task, Scratch& scratch) {
    call_.wait_counter({"fc1 dgrad", task.ticket}, ws_.counters.fc1[task.block],
                       ws_.tasks.fc1_tiles);
    const Span span = tile_span(task.tile, s_.hidden);
    const int32_t rows = call_.rows_of_block(task.block);
    const T* weight = static_cast<const T*>(args_.weights.fc1[call_.expert_of(task.block)]);
    float* out = scratch.zeroed(scratch.tile);
    scratch.gemm.accumulate(
        Matrix<T>{ring(ws_.rings.grad_preact, task.block, 2 * s_.ffn), 2 * int64_t{s_.ffn}, 1},
        Matrix<T>{weight, s_.hidden, 1}.at(0, span.first), rows, span.size, 2 * int64_t{s_.ffn},
        out, kTile);
    const MokRow* row = call_.rows() + task.block * kBlockRows;
    for (int32_t i = 0; i < rows; ++i) {
      T* slot = slot_of<T>(call_, row[i]) + span.first;
      for (int32_t j = 0; j < span.size; ++j) slot[j] = from_float<T>(out[i * kTile + j]);
      if (task.tile == 0) push_grad_prob(row[i], grad_prob_parts(task.block), i);
    }
    ws_.counters.fc2[task.block].fetch_add(1, std::memory_order_acq_rel);
    call_.part_pushed(task.block);
  }

  void push_grad_prob(const MokRow& row, const float* parts, int32_t index) {
    float sum = 0.0f;
    for (int32_t t = 0; t < ws_.tasks.fc1_tiles; ++t) {
      sum += parts[index * int64_t{ws_.tasks.fc1_tiles} + t];
    }
    ws_.peer<float>(row.rank, ws_.layout.prob_slots)[int64_t{row.token} * s_.topk + row.k] = sum;
  }

  // One tile of dW1 (tiles of dW1 come first) or dW2 over the rows of one cut.
  void wgrad(const Task& task, Scratch& scratch) {
    const MokSegment& cut = *task.segment;
    const int32_t last = cut.first_block + cut.num_blocks;
    for (int32_t b = cut.first_block; b < last; ++b) {
      call_.wait_counter({"wgrad", task.ticket}, ws_.counters.fc1[b], ws_.tasks.fc1_tiles);
    }
    // Cuts are added in order, so the gradient does not depend on who runs first.
    std::atomic<int32_t>& done = ws_.counters.wgrad[cut.expert];
    call_.wait_counter({"wgrad", task.ticket}, done, cut.cut * ws_.tasks.wgrad_tiles);

    const int32_t fc1_grad_tiles =
        int32_t(ceil_div(2 * int64_t{s_.ffn}, kTile)) * ws_.tasks.fc2_tiles;
    if (task.tile < fc1_grad_tiles) {
      wgrad_tile(cut, args_.weight_grads.fc1[cut.expert], ws_.rings.grad_preact, 2 * s_.ffn,
                 ws_.rings.hidden, s_.hidden, task.tile, scratch);
    } else {
      wgrad_tile(cut, args_.weight_grads.fc2[cut.expert], ws_.rings.grad_output, s_.hidden,
                 ws_.rings.act, s_.ffn, task.tile - fc1_grad_tiles, scratch);
    }
    done.fetch_add(1, std::memory_order_acq_rel);
  }

  // grad[m, n] (+)= left[rows, m]^T right[rows, n] for one tile, rows in order.
  void wgrad_tile(const MokSegment& cut, float* grad, const std::unique_ptr<std::byte[]>& left,
                  int64_t m, const std::unique_ptr<std::byte[]>& right, int64_t n, int32_t tile,
                  Scratch& scratch) {
    if (grad == nullptr) return;
    if (cut.num_blocks == 0 && args_.weight_grads.accumulate) return;
    const int32_t row_tiles = int32_t(ceil_div(m, kTile));
    const Span rows = tile_span(tile % row_tiles, m);
    const Span cols = tile_span(tile / row_tiles, n);
    float* sum = scratch.zeroed(scratch.tile);
    for (int32_t b = cut.first_block; b < cut.first_block + cut.num_blocks; ++b) {
      scratch.gemm.accumulate(Matrix<T>{ring(left, b, m), m, 1}.at(0, rows.first).transposed(),
                              Matrix<T>{ring(right, b, n), n, 1}.at(0, cols.first), rows.size,
                              cols.size, call_.rows_of_block(b), sum, kTile);
    }
    const bool add = args_.weight_grads.accumulate || cut.cut > 0;
    for (int32_t i = 0; i < rows.size; ++i) {
      float* out = grad + (rows.first + i) * n + cols.first;
      for (int32_t j = 0; j < cols.size; ++j) {
        out[j] = add ? out[j] + sum[i * kTile + j] : sum[i * kTile + j];
      }
    }
  }

  void collect_grad_probs(const Task& task) {
    const float* slots = ws_.peer<float>(s_.ep_rank, ws_.layout.prob_slots);
    const int64_t first = int64_t{task.tile} * kReduceTokens * s_.topk;
    const int64_t last =
        std::min(first + int64_t{kReduceTokens} * s_.topk, int64_t{call_.routes.tokens} * s_.topk);
    for (int64_t i = first; i < last; ++i) {
      args_.grad_probs[i] = call_.routes.expert_ids[i] < 0 ? 0.0f : slots[i];
    }
  }

  Call& call_;
  MokWorkspace& ws_;
  const MokShape& s_;
  const MokBackwardArgs& args_;
  std::vector<Scratch> scratch_;
};

}  // namespace

void run_backward(Call& call, const MokBackwardArgs& args) {
  if (call.ws.shape.dtype == MOK_F32) {
    Backward<float>(call, args).run();
  } else {
    Backward<Bf16>(call, args).run();
  }
}

}  // namespace mok
