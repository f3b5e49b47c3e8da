// One collective call of the host engine: entering it together with the peers, its tables, bounded
// waits, and the flags that tell peers what is done.
#ifndef MOK_HOST_CALL_H_
#define MOK_HOST_CALL_H_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "workspace.h"

namespace mok {

// Where a wait stands, for the error that names it.
struct WaitPoint {
  const char* phase;
  int32_t task = -1;
  int32_t peer = -1;  // -1: this rank's own tasks
};

struct Task {
  MokPhase phase;
  int32_t ticket;
  int32_t block;
  int32_t tile;
  const MokSegment* segment;
};

class Call {
 public:
  // Counts routes, stages the matrices that peers pull (NULL: none) and exchanges counts and row
  // tables with all peers. Throws Error; after an invalid argument on any rank, on every rank.
  Call(MokWorkspace& workspace, Op op, const MokRoutes& routes, const void* hidden,
       const void* grad_output, const std::string& refusal);

  // Task order of this call into `segments` and `num_tickets`.
  void build(MokDirection direction, int32_t reduce_tiles);
  // Claims tasks in ticket order on ws.workers threads until all are done or one fails.
  void run(MokDirection direction, int32_t reduce_tiles,
           const std::function<void(const Task&, int32_t worker)>& task);

  // Blocks until ready(), or throws: on a timeout, when a peer gave up, or when another worker
  // failed.
  template <typename Ready>
  void wait(const WaitPoint& point, int32_t timeout_ms, const Ready& ready) {
    if (!ready()) wait_slowly(point, timeout_ms, std::function<bool()>(ready));
  }
  void wait_counter(const WaitPoint& point, const std::atomic<int32_t>& counter, int32_t value) {
    wait(point, ws.options.inner_wait_ms,
         [&] { return counter.load(std::memory_order_acquire) >= value; });
  }

  // This rank has read the rows of one more block from its peers' staging areas.
  void block_pulled();
  // One of `parts` equal shares of the block's results is in the slots of the rows' owners.
  void part_pushed(int32_t block);
  // Sets how many part_pushed() calls each block gets. Before any of them.
  void expect_parts(int32_t parts);
  // Waits until all results for this rank's tokens are in its slots.
  void wait_combined(int32_t task);

  int32_t num_blocks() const { return block_offsets.back(); }
  const MokRow* rows() const { return ws.peer<MokRow>(ws.shape.ep_rank, ws.layout.rows); }
  int32_t rows_of_block(int32_t block) const;
  // Local expert of a block.
  int32_t expert_of(int32_t block) const {
    return expert_of_block(block_offsets.data(), local_experts(ws.shape), block);
  }

  MokWorkspace& ws;
  const MokRoutes& routes;
  const uint32_t epoch;
  std::vector<int32_t> counts;         // [ep_size, E]
  std::vector<int32_t> block_offsets;  // [L + 1]
  std::vector<MokSegment> segments;
  int32_t num_tickets = 0;

 private:
  void exchange_counts(Op op, const std::string& refusal);
  void exchange_rows();

  using Flags = uint32_t (PeerFlags::*)[MOK_MAX_RANKS];
  void signal(Flags flags, int32_t rank);
  void signal_all(Flags flags);
  void wait_all(const char* phase, Flags flags, uint32_t value, int32_t timeout_ms, int32_t task);
  void wait_slowly(const WaitPoint& point, int32_t timeout_ms, const std::function<bool()>& ready);
  void fail(const Error& error);

  std::atomic<int32_t> blocks_left_to_pull_{0};
  std::vector<std::atomic<int64_t>> parts_left_;  // by owner
  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  std::unique_ptr<Error> failure_;
};

}  // namespace mok

#endif  // MOK_HOST_CALL_H_
