// A rank's side of the host engine: the mapped peer segments and this rank's private memory.
#ifndef MOK_HOST_WORKSPACE_H_
#define MOK_HOST_WORKSPACE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../schedule/segments.h"
#include "mok.h"

namespace mok {

// An error of a call, with the status that the C ABI returns for it.
class Error : public std::runtime_error {
 public:
  Error(MokStatus status, const std::string& what) : std::runtime_error(what), status(status) {}
  const MokStatus status;
};

// Tiles are this many columns (and, in weight gradients, rows) wide.
constexpr int32_t kTile = 128;
constexpr int32_t kReduceTokens = 64;

int32_t choose_workers(const MokShape& shape, const MokOptions& options);
TaskShape make_task_shape(const MokShape& shape, int32_t workers);

// Rows of activations that are alive at once, in ring order: block b lives at b % blocks.
struct Rings {
  int64_t blocks;
  std::unique_ptr<std::byte[]> hidden;       // [blocks * kBlockRows, H]
  std::unique_ptr<std::byte[]> grad_output;  // [.., H], backward
  std::unique_ptr<std::byte[]> act;          // [.., F]
  std::unique_ptr<std::byte[]> grad_preact;  // [.., 2F], backward
  std::unique_ptr<float[]> grad_prob_parts;  // [.., fc1_tiles], backward
};

// Progress of each block and expert within one call.
struct Counters {
  std::unique_ptr<std::atomic<int32_t>[]> dispatched;  // [max_blocks] 0 or 1
  std::unique_ptr<std::atomic<int32_t>[]> fc1;         // [max_blocks] tiles done
  std::unique_ptr<std::atomic<int32_t>[]> fc2;         // [max_blocks] tiles done
  std::unique_ptr<std::atomic<int32_t>[]> wgrad;       // [L] tiles done, over all cuts
};

}  // namespace mok

struct MokWorkspace {
  explicit MokWorkspace(const MokWorkspaceDesc& desc);

  mok::PeerFlags& flags(int32_t rank) {
    return *reinterpret_cast<mok::PeerFlags*>(peers[rank] + layout.flags);
  }
  template <typename T>
  T* peer(int32_t rank, int64_t offset) {
    return reinterpret_cast<T*>(peers[rank] + offset);
  }

  const MokShape shape;
  const MokOptions options;
  const int32_t workers;
  const mok::TaskShape tasks;
  const mok::PeerLayout layout;
  const int64_t max_blocks;
  std::vector<std::byte*> peers;

  uint32_t epoch = 0;
  std::string poisoned;  // why, when an earlier call failed midway
  mok::Rings rings;
  mok::Counters counters;
};

#endif  // MOK_HOST_WORKSPACE_H_
