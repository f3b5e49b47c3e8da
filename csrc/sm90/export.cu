// The schedule as data: what the kernels of a call would work on, copied to the host.
#include <vector>

#include "launch.cuh"
#include "order.cuh"
#include "schedule.h"
#include "standalone.h"
#include "workspace.h"

namespace mok::sm90 {
namespace {

// The tasks of all tickets, and the one behind the last.
template <typename Order>
__global__ void list_tasks_kernel(const __grid_constant__ BackwardParams p, Task* tasks,
                                  int32_t count) {
  Order order(p);
  for (int32_t i = 0; i <= count; ++i) tasks[i] = order.decode(i, p);
}

template <typename T>
std::vector<T> to_host(const T* device, int64_t count, cudaStream_t stream) {
  std::vector<T> host(count);
  check_cuda(
      cudaMemcpyAsync(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost, stream),
      "copying the schedule");
  check_cuda(cudaStreamSynchronize(stream), "building the schedule");
  return host;
}

// Runs of tasks as segments: (tile, block) with the block fastest.
class SegmentList {
 public:
  SegmentList(MokSegment* out, int32_t capacity, const std::vector<CutInfo>& cuts)
      : out_(out), capacity_(capacity), cuts_(cuts) {}

  void add(const Task& task) {
    if (!extend(task)) {
      finish();
      run_ = MokSegment{task.phase, tickets_, task.block, 1, task.tile, 1, -1, 0};
      tasks_ = 1;
      square_ = task.phase == MOK_PHASE_WGRAD;  // their blocks are cuts, one a segment
    }
    ++tickets_;
  }

  void finish() {
    if (tasks_ == 0) return;
    const int32_t full = tasks_ / run_.num_blocks;
    const int32_t rest = tasks_ % run_.num_blocks;
    run_.num_tiles = full;
    write(run_);
    if (rest > 0) {
      MokSegment last = run_;
      last.first_ticket += full * run_.num_blocks;
      last.first_tile += full;
      last.num_blocks = rest;
      last.num_tiles = 1;
      write(last);
    }
    tasks_ = 0;
  }

  int32_t segments() const { return segments_; }
  int32_t tickets() const { return tickets_; }

 private:
  // Whether the task continues the run. `square_`: the run's number of blocks is known, because a
  // second tile has begun.
  bool extend(const Task& task) {
    if (tasks_ == 0 || task.phase != run_.phase) return false;
    if (!square_ && task.tile == run_.first_tile && task.block == run_.first_block + tasks_) {
      run_.num_blocks = ++tasks_;
      return true;
    }
    if (task.block != run_.first_block + tasks_ % run_.num_blocks ||
        task.tile != run_.first_tile + tasks_ / run_.num_blocks) {
      return false;
    }
    square_ = true;
    ++tasks_;
    return true;
  }

  void write(MokSegment segment) {
    if (segment.phase == MOK_PHASE_WGRAD) {
      const CutInfo& cut = cuts_[segment.first_block];
      segment.first_block = cut.first_block;
      segment.num_blocks = static_cast<int32_t>(ceil_div(cut.k_steps * kTileK, kBlockRows));
      segment.expert = cut.expert;
      segment.cut = cut.index;
    }
    if (segments_ < capacity_) out_[segments_] = segment;
    ++segments_;
  }

  MokSegment* out_;
  int32_t capacity_;
  const std::vector<CutInfo>& cuts_;
  MokSegment run_{};
  int32_t tasks_ = 0;  // of the run
  bool square_ = false;
  int32_t segments_ = 0;
  int32_t tickets_ = 0;
};

void export_rows(const MokWorkspace& ws, const std::vector<BlockInfo>& blocks, MokRow* out,
                 cudaStream_t stream) {
  const auto num_rows = static_cast<int64_t>(blocks.size()) * kBlockRows;
  const std::vector<MokRow> rows = to_host(ws.peers.rows[ws.shape.ep_rank], num_rows, stream);
  for (int64_t i = 0; i < num_rows; ++i) {
    const bool padding = i % kBlockRows >= blocks[i / kBlockRows].rows;
    out[i] = padding ? MokRow{-1, -1, -1, 0.0f, -1} : rows[i];
    if (!padding) out[i].k = static_cast<int16_t>(route_k(rows[i]));
  }
}

void export_segments(const CallParams& params, const CallState& state, MokScheduleArgs& args,
                     cudaStream_t stream) {
  const Geometry& g = params.geometry;
  const bool forward = args.direction == MOK_FORWARD;
  const auto num_cuts = to_host(params.local.expert_first_cut + g.local_experts, 1, stream)[0];
  const std::vector<CutInfo> cuts = to_host(params.local.cuts, num_cuts, stream);
  const int32_t first_tiles = forward ? g.fc1_tiles : g.fc2_dgrad_tiles;
  const int32_t count =
      state.num_blocks * (first_tiles + g.fc2_tiles) + (forward ? 0 : num_cuts * g.wgrad_tiles());
  const DeviceMemory memory = device_alloc((int64_t{count} + 1) * int64_t{sizeof(Task)});
  auto* device_tasks = static_cast<Task*>(memory.get());
  BackwardParams order{params};
  order.saved_blocks = INT32_MAX;
  if (forward) {
    list_tasks_kernel<ForwardOrder><<<1, 1, 0, stream>>>(order, device_tasks, count);
  } else {
    list_tasks_kernel<BackwardOrder><<<1, 1, 0, stream>>>(order, device_tasks, count);
  }
  check_cuda(cudaGetLastError(), "listing tasks");
  const std::vector<Task> tasks = to_host(device_tasks, int64_t{count} + 1, stream);
  SegmentList list(args.segments, args.segment_capacity, cuts);
  for (const Task& task : tasks) {
    if (task.phase == kNoTask) break;
    list.add(task);
  }
  list.finish();
  args.num_segments = list.segments();
  args.num_tickets = list.tickets();
}

}  // namespace

cudaError_t load_export_kernels() {
  return load_kernels(list_tasks_kernel<ForwardOrder>, list_tasks_kernel<BackwardOrder>);
}

void export_schedule(const MokWorkspace& ws, const CallParams& params, MokScheduleArgs& args) {
  const Geometry& g = params.geometry;
  const auto stream = static_cast<cudaStream_t>(args.stream);
  check_cuda(launch_await_rows(params, stream), "waiting for the row table");
  const CallState state = to_host(params.local.state, 1, stream)[0];
  const std::string fault = ws.faults.fault_message(ws.shape);
  if (!fault.empty()) throw Error{MOK_ERR_TIMEOUT, fault};
  if (state.refused) return;  // the caller has the reason

  const int64_t counts = int64_t{g.num_ranks} * g.num_experts;
  const std::vector<int32_t> from_ranks =
      to_host(params.peers.counts[g.rank] + state.epoch % 2 * counts, counts, stream);
  std::copy(from_ranks.begin(), from_ranks.end(), args.counts);
  const std::vector<BlockInfo> blocks = to_host(params.local.blocks, state.num_blocks, stream);
  std::fill_n(args.block_offsets, g.local_experts + 1, 0);
  for (const BlockInfo& block : blocks) ++args.block_offsets[block.expert + 1];
  for (int32_t i = 0; i < g.local_experts; ++i) args.block_offsets[i + 1] += args.block_offsets[i];
  export_rows(ws, blocks, args.rows, stream);
  export_segments(params, state, args, stream);
}

}  // namespace mok::sm90
