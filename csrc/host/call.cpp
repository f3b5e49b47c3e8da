#include "call.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "../schedule/messages.h"

namespace mok {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic_ref<uint32_t> shared(uint32_t& word) { return std::atomic_ref<uint32_t>(word); }

// Epochs wrap; a flag is due when it is not behind.
bool reached(uint32_t flag, uint32_t epoch) { return int32_t(flag - epoch) >= 0; }

// Counts of this rank's routes, or the reason why they are refused, also as a Refusal.
std::string count_routes(const MokShape& s, const MokRoutes& routes, std::vector<int32_t>& counts,
                         int32_t& refusal) {
  if (routes.tokens < 0 || routes.tokens > s.max_tokens) {
    refusal = kRefusedTokens;
    return bad_tokens_text(s, routes.tokens);
  }
  for (int64_t i = 0; i < int64_t{routes.tokens} * s.topk; ++i) {
    const int32_t expert = routes.expert_ids[i];
    if (expert < -1 || expert >= s.num_experts) {
      refusal = kRefusedExpertId;
      return bad_expert_text(s, expert, i);
    }
    if (expert >= 0) ++counts[expert];
  }
  return "";
}

std::string describe(const WaitPoint& point) {
  std::string text = std::string("phase '") + point.phase + "'";
  if (point.task >= 0) text += ", task " + std::to_string(point.task);
  return text +
         (point.peer >= 0 ? ", for rank " + std::to_string(point.peer) : ", for its own tasks");
}

// `abort_word`: PeerFlags.abort of this rank.
Error gave_up(const MokShape& s, uint32_t abort_word, const WaitPoint& point) {
  return Error(MOK_ERR_TIMEOUT, rank_text(s) + " stopped in " + describe(point) +
                                    ", because rank " + std::to_string(abort_word - 1) +
                                    " gave up waiting");
}

}  // namespace

Call::Call(MokWorkspace& workspace, Op op, const MokRoutes& routes, const void* hidden,
           const void* grad_output, const std::string& refusal)
    : ws(workspace), routes(routes), epoch(++workspace.epoch), parts_left_(ws.shape.ep_size) {
  const MokShape& s = ws.shape;
  std::vector<int32_t> mine(s.num_experts, 0);
  int32_t reason = kRefusedArgument;
  const std::string refused = refusal.empty() ? count_routes(s, routes, mine, reason) : refusal;

  if (const uint32_t who = shared(ws.flags(s.ep_rank).abort).load(std::memory_order_acquire)) {
    throw gave_up(s, who, {"entry", -1, int32_t(who) - 1});
  }
  // Peers may still be reading what the last call staged.
  wait_all("pull of the call before", &PeerFlags::pulled, epoch - 1, ws.options.first_wait_ms, -1);
  if (refused.empty()) {
    const size_t bytes = size_t(routes.tokens) * s.hidden * dtype_bytes(s.dtype);
    if (hidden) std::memcpy(ws.peer<std::byte>(s.ep_rank, ws.layout.hidden), hidden, bytes);
    if (grad_output) {
      std::memcpy(ws.peer<std::byte>(s.ep_rank, ws.layout.grad_output), grad_output, bytes);
    }
  }
  const int64_t bank = (epoch & 1) * int64_t{s.ep_size} + s.ep_rank;
  for (int32_t r = 0; r < s.ep_size; ++r) {
    ws.peer<CallHeader>(r, ws.layout.headers)[bank] =
        CallHeader{int32_t(op), refused.empty() ? routes.tokens : reason};
    std::memcpy(ws.peer<int32_t>(r, ws.layout.counts) + bank * s.num_experts, mine.data(),
                sizeof(int32_t) * s.num_experts);
  }
  signal_all(&PeerFlags::counts);
  exchange_counts(op, refused);

  block_offsets.resize(local_experts(s) + 1);
  build_block_offsets(counts.data(), s, s.ep_rank, block_offsets.data());
  blocks_left_to_pull_ = num_blocks();
  const bool pulls = op != Op::kSchedule && op != Op::kCombine;
  if (!pulls || num_blocks() == 0) signal_all(&PeerFlags::pulled);
  exchange_rows();

  for (int64_t i = 0; i < num_blocks(); ++i) {
    ws.counters.dispatched[i].store(0, std::memory_order_relaxed);
    ws.counters.fc1[i].store(0, std::memory_order_relaxed);
    ws.counters.fc2[i].store(0, std::memory_order_relaxed);
  }
  for (int32_t i = 0; i < local_experts(s); ++i) {
    ws.counters.wgrad[i].store(0, std::memory_order_relaxed);
  }
}

void Call::exchange_counts(Op op, const std::string& refusal) {
  const MokShape& s = ws.shape;
  wait_all("entry", &PeerFlags::counts, epoch, ws.options.first_wait_ms, -1);
  const int64_t bank = (epoch & 1) * int64_t{s.ep_size};
  const CallHeader* headers = ws.peer<CallHeader>(s.ep_rank, ws.layout.headers) + bank;
  std::string why = refusal;
  for (int32_t r = 0; r < s.ep_size && why.empty(); ++r) {
    if (headers[r].op != int32_t(op)) {
      why = other_call_text(r, headers[r].op, int32_t(op));
    } else if (headers[r].tokens < 0) {
      why = peer_refused_text(r, headers[r].tokens);
    }
  }
  // All ranks see the same headers, so all leave here together and the workspace stays usable.
  bool anyone = false;
  for (int32_t r = 0; r < s.ep_size; ++r) {
    anyone |= headers[r].op != headers[0].op || headers[r].tokens < 0;
  }
  if (anyone) {
    signal_all(&PeerFlags::pulled);
    throw Error(MOK_ERR_INVALID_ARGUMENT, why.empty() ? "a peer refused the call" : why);
  }
  const int32_t* table = ws.peer<int32_t>(s.ep_rank, ws.layout.counts) + bank * s.num_experts;
  counts.assign(table, table + int64_t{s.ep_size} * s.num_experts);
}

void Call::exchange_rows() {
  const MokShape& s = ws.shape;
  const int32_t num_local = local_experts(s);
  // Next row of each expert, in the row table of the rank that has it.
  std::vector<int64_t> next(s.num_experts);
  std::vector<int32_t> offsets(num_local + 1);
  for (int32_t r = 0; r < s.ep_size; ++r) {
    build_block_offsets(counts.data(), s, r, offsets.data());
    for (int32_t i = 0; i < num_local; ++i) {
      const int32_t expert = r * num_local + i;
      next[expert] =
          offsets[i] * kBlockRows + rows_before_rank(counts.data(), s, expert, s.ep_rank);
    }
  }
  for (int32_t t = 0; t < routes.tokens; ++t) {
    for (int32_t k = 0; k < s.topk; ++k) {
      const int64_t route = int64_t{t} * s.topk + k;
      const int32_t expert = routes.expert_ids[route];
      if (expert < 0) continue;
      ws.peer<MokRow>(expert / num_local, ws.layout.rows)[next[expert]++] = MokRow{
          t, int16_t(s.ep_rank), int16_t(k), routes.probs ? routes.probs[route] : 0.0f, expert};
    }
  }
  signal_all(&PeerFlags::rows);
  wait_all("row tables", &PeerFlags::rows, epoch, ws.options.inner_wait_ms, -1);
}

int32_t Call::rows_of_block(int32_t block) const {
  const int32_t local = expert_of(block);
  const int32_t expert = ws.shape.ep_rank * local_experts(ws.shape) + local;
  return rows_in_block(expert_rows(counts.data(), ws.shape, expert), block - block_offsets[local]);
}

void Call::build(MokDirection direction, int32_t reduce_tiles) {
  const int32_t num_local = local_experts(ws.shape);
  segments.resize(max_segments(ws.tasks, num_blocks(), num_local));
  SegmentWriter writer{segments.data(), int32_t(segments.size()), 0, 0};
  build_segments(block_offsets.data(), num_local, ws.tasks, direction, reduce_tiles, writer);
  segments.resize(writer.num_segments);
  num_tickets = writer.num_tickets;
}

void Call::run(MokDirection direction, int32_t reduce_tiles,
               const std::function<void(const Task&, int32_t worker)>& task) {
  build(direction, reduce_tiles);
  std::atomic<int32_t> next_ticket{0};
  const auto work = [&](int32_t worker) {
    try {
      int32_t cursor = 0;
      while (!failed_.load(std::memory_order_relaxed)) {
        const int32_t ticket = next_ticket.fetch_add(1, std::memory_order_relaxed);
        if (ticket >= num_tickets) return;
        cursor = find_segment(segments.data(), int32_t(segments.size()), ticket, cursor);
        const MokSegment& segment = segments[cursor];
        const int32_t index = ticket - segment.first_ticket;
        const bool by_block = segment.phase != MOK_PHASE_WGRAD;
        const int32_t blocks = by_block ? segment.num_blocks : 1;
        task(Task{MokPhase(segment.phase), ticket, segment.first_block + index % blocks,
                  segment.first_tile + index / blocks, &segment},
             worker);
      }
    } catch (const Error& error) {
      fail(error);
    } catch (const std::exception& error) {
      fail(Error(MOK_ERR_SYSTEM, error.what()));
    }
  };
  std::vector<std::thread> threads;
  for (int32_t w = 1; w < ws.workers; ++w) threads.emplace_back(work, w);
  work(0);
  for (std::thread& thread : threads) thread.join();
  if (failure_) throw *failure_;
}

void Call::block_pulled() {
  if (blocks_left_to_pull_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    signal_all(&PeerFlags::pulled);
  }
}

void Call::expect_parts(int32_t parts) {
  std::vector<int64_t> left(ws.shape.ep_size, 0);
  for (int32_t b = 0; b < num_blocks(); ++b) {
    const MokRow* row = rows() + b * kBlockRows;
    // Owners come in rank order within a block.
    for (int32_t i = 0, n = rows_of_block(b), last = -1; i < n; ++i) {
      if (row[i].rank != last) left[last = row[i].rank] += parts;
    }
  }
  for (int32_t r = 0; r < ws.shape.ep_size; ++r) {
    parts_left_[r].store(left[r], std::memory_order_relaxed);
    if (left[r] == 0) signal(&PeerFlags::combine, r);
  }
}

void Call::part_pushed(int32_t block) {
  const MokRow* row = rows() + block * kBlockRows;
  for (int32_t i = 0, n = rows_of_block(block), last = -1; i < n; ++i) {
    if (row[i].rank == last) continue;
    last = row[i].rank;
    if (parts_left_[last].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      signal(&PeerFlags::combine, last);
    }
  }
}

void Call::wait_combined(int32_t task) {
  wait_all("combine", &PeerFlags::combine, epoch, ws.options.inner_wait_ms, task);
}

void Call::signal(Flags flags, int32_t rank) {
  shared((ws.flags(rank).*flags)[ws.shape.ep_rank]).store(epoch, std::memory_order_release);
}

void Call::signal_all(Flags flags) {
  for (int32_t r = 0; r < ws.shape.ep_size; ++r) signal(flags, r);
}

void Call::wait_all(const char* phase, Flags flags, uint32_t value, int32_t timeout_ms,
                    int32_t task) {
  for (int32_t r = 0; r < ws.shape.ep_size; ++r) {
    uint32_t& word = (ws.flags(ws.shape.ep_rank).*flags)[r];
    wait(WaitPoint{phase, task, r}, timeout_ms,
         [&] { return reached(shared(word).load(std::memory_order_acquire), value); });
  }
}

void Call::wait_slowly(const WaitPoint& point, int32_t timeout_ms,
                       const std::function<bool()>& ready) {
  const MokShape& s = ws.shape;
  uint32_t& abort_word = ws.flags(s.ep_rank).abort;
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  for (int64_t spins = 0; !ready(); ++spins) {
    if (failed_.load(std::memory_order_relaxed)) {
      throw Error(MOK_ERR_TIMEOUT, "another worker of this rank failed");
    }
    if (const uint32_t who = shared(abort_word).load(std::memory_order_acquire)) {
      throw gave_up(s, who, point);
    }
    if (Clock::now() > deadline) {
      for (int32_t r = 0; r < s.ep_size; ++r) {
        uint32_t none = 0;
        shared(ws.flags(r).abort).compare_exchange_strong(none, uint32_t(s.ep_rank) + 1);
      }
      throw Error(MOK_ERR_TIMEOUT, rank_text(s) + " waited " + std::to_string(timeout_ms) +
                                       " ms in " + describe(point) + " (call " +
                                       std::to_string(epoch) + ")");
    }
    if (spins < 64) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

// Keeps the first failure; the others are its consequence.
void Call::fail(const Error& error) {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!failure_) failure_ = std::make_unique<Error>(error);
  failed_ = true;
}

}  // namespace mok
