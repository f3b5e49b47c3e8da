// Forward of the expert layer: dispatch, FC1 + SwiGLU, FC2 + push, reduce.
#include "expert.h"
#include "ops.h"
#include "rows.h"

namespace mok {
namespace {

template <typename T>
class Forward {
 public:
  Forward(Call& call, const MokForwardArgs& args)
      : call_(call), ws_(call.ws), s_(call.ws.shape), args_(args), scratch_(call.ws.workers) {}

  void run() {
    call_.expect_parts(ws_.tasks.fc2_tiles);
    call_.run(MOK_FORWARD, reduce_tiles(call_.routes), [this](const Task& task, int32_t worker) {
      switch (task.phase) {
        case MOK_PHASE_DISPATCH:
          return dispatch(task);
        case MOK_PHASE_FC1:
          return fc1(task, scratch_[worker]);
        case MOK_PHASE_FC2:
          return fc2(task, scratch_[worker]);
        case MOK_PHASE_REDUCE:
          return reduce_tokens<T>(call_, task, static_cast<const T*>(args_.addend),
                                  static_cast<T*>(args_.output));
        case MOK_PHASE_WGRAD:
          break;
      }
    });
  }

 private:
  T* ring(const std::unique_ptr<std::byte[]>& memory, int32_t block, int64_t width) {
    return reinterpret_cast<T*>(memory.get()) + block % ws_.rings.blocks * kBlockRows * width;
  }

  void dispatch(const Task& task) {
    if (task.block >= ws_.rings.blocks) {
      call_.wait_counter({"dispatch", task.ticket}, ws_.counters.fc2[task.block - ws_.rings.blocks],
                         ws_.tasks.fc2_tiles);
    }
    pull_block(call_, task.block, ws_.layout.hidden, ring(ws_.rings.hidden, task.block, s_.hidden));
    call_.block_pulled();
    ws_.counters.dispatched[task.block].store(1, std::memory_order_release);
  }

  void fc1(const Task& task, Scratch& scratch) {
    call_.wait_counter({"fc1", task.ticket}, ws_.counters.dispatched[task.block], 1);
    const Span span = tile_span(task.tile, s_.ffn);
    const int32_t rows = call_.rows_of_block(task.block);
    const T* weight = static_cast<const T*>(args_.weights.fc1[call_.expert_of(task.block)]);
    fc1_tile(scratch, ring(ws_.rings.hidden, task.block, s_.hidden), rows, weight, s_, span);
    if (is_saved(args_.saved, task.block)) save(task.block, rows, span, scratch);

    const MokRow* row = call_.rows() + task.block * kBlockRows;
    T* act = ring(ws_.rings.act, task.block, s_.ffn);
    for (int32_t i = 0; i < rows; ++i) {
      for (int32_t j = 0; j < span.size; ++j) {
        const float gate = scratch.gate[i * kTile + j];
        const float up = scratch.up[i * kTile + j];
        act[i * int64_t{s_.ffn} + span.first + j] =
            from_float<T>(gate * sigmoid(gate) * up * row[i].prob);
      }
    }
    ws_.counters.fc1[task.block].fetch_add(1, std::memory_order_acq_rel);
  }

  void save(int32_t block, int32_t rows, const Span& span, const Scratch& scratch) {
    T* out = static_cast<T*>(args_.saved.preact) + block * kBlockRows * 2 * s_.ffn + span.first;
    for (int32_t i = 0; i < rows; ++i, out += 2 * s_.ffn) {
      for (int32_t j = 0; j < span.size; ++j) {
        out[j] = from_float<T>(scratch.gate[i * kTile + j]);
        out[s_.ffn + j] = from_float<T>(scratch.up[i * kTile + j]);
      }
    }
  }

  void fc2(const Task& task, Scratch& scratch) {
    call_.wait_counter({"fc2", task.ticket}, ws_.counters.fc1[task.block], ws_.tasks.fc1_tiles);
    const Span span = tile_span(task.tile, s_.hidden);
    const int32_t rows = call_.rows_of_block(task.block);
    const T* weight = static_cast<const T*>(args_.weights.fc2[call_.expert_of(task.block)]);
    float* out = scratch.zeroed(scratch.tile);
    scratch.gemm.accumulate(Matrix<T>{ring(ws_.rings.act, task.block, s_.ffn), s_.ffn, 1},
                            Matrix<T>{weight, s_.ffn, 1}.at(span.first, 0).transposed(), rows,
                            span.size, s_.ffn, out, kTile);
    const MokRow* row = call_.rows() + task.block * kBlockRows;
    for (int32_t i = 0; i < rows; ++i) {
      T* slot = slot_of<T>(call_, row[i]) + span.first;
      for (int32_t j = 0; j < span.size; ++j) slot[j] = from_float<T>(out[i * kTile + j]);
    }
    ws_.counters.fc2[task.block].fetch_add(1, std::memory_order_acq_rel);
    call_.part_pushed(task.block);
  }

  Call& call_;
  MokWorkspace& ws_;
  const MokShape& s_;
  const MokForwardArgs& args_;
  std::vector<Scratch> scratch_;
};

}  // namespace

void run_forward(Call& call, const MokForwardArgs& args) {
  if (call.ws.shape.dtype == MOK_F32) {
    Forward<float>(call, args).run();
  } else {
    Forward<Bf16>(call, args).run();
  }
}

}  // namespace mok
