// Which task a ticket stands for.
#ifndef MOK_SM90_ORDER_CUH_
#define MOK_SM90_ORDER_CUH_

#include "call.h"
#include "task.cuh"

namespace mok::sm90 {

// Finds the tile that a ticket stands for. Order, that of build_segments without dispatch and
// reduction: step s has the FC1 tiles of group s, then the FC2 tiles of group s - 1. Blocks are
// fastest, so that consecutive tiles share weights; in FC1 of the first group tiles are, so that it
// can start on few rows. Tickets of one CTA only grow, so the step is found by moving forward.
class ForwardOrder {
 public:
  MOK_DEVICE explicit ForwardOrder(const CallParams& p)
      : first_block_(p.local.group_first_block), num_groups_(p.local.state->num_groups) {
    if (num_groups_ > 0) end_ = first_block_[1];
  }

  // All but what describe_block adds.
  MOK_DEVICE Task decode(int32_t ticket, const Geometry& g) {
    while (step_ <= num_groups_ && ticket >= g.fc1_tiles * end_ + g.fc2_tiles * begin_) {
      ++step_;
      before_ = begin_;
      begin_ = end_;
      if (step_ < num_groups_) end_ = first_block_[step_ + 1];
    }
    Task task{kNoTask, 0, 0, 0, 0, 0};
    if (step_ > num_groups_) return task;
    int32_t left = ticket - g.fc1_tiles * begin_ - g.fc2_tiles * before_;
    const int32_t blocks = end_ - begin_;
    if (left < blocks * g.fc1_tiles) {
      task.phase = MOK_PHASE_FC1;
      task.block = begin_ + (step_ == 0 ? left / g.fc1_tiles : left % blocks);
      task.tile = step_ == 0 ? left % g.fc1_tiles : left / blocks;
    } else {
      left -= blocks * g.fc1_tiles;
      task.phase = MOK_PHASE_FC2;
      task.block = before_ + left % (begin_ - before_);
      task.tile = left / (begin_ - before_);
    }
    return task;
  }

 private:
  const int32_t* first_block_;  // of every group
  int32_t num_groups_;
  int32_t step_ = 0;
  // Blocks before_ .. begin_ - 1 are group step_ - 1, begin_ .. end_ - 1 group step_.
  int32_t before_ = 0;
  int32_t begin_ = 0;
  int32_t end_ = 0;
};

MOK_DEVICE void describe_block(Task& task, const CallParams& p) {
  const BlockInfo block = p.local.blocks[task.block];
  task.expert = block.expert;
  task.rows = block.rows;
  task.group = block.group;
}

}  // namespace mok::sm90

#endif  // MOK_SM90_ORDER_CUH_
