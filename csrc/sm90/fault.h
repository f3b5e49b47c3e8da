// What kernels leave behind for the host when a call fails, in words.
#ifndef MOK_SM90_FAULT_H_
#define MOK_SM90_FAULT_H_

#include <string>

#include "call.h"

namespace mok::sm90 {

// Pinned memory of a workspace that kernels write.
class FaultRecords {
 public:
  FaultRecords();
  ~FaultRecords();
  FaultRecords(const FaultRecords&) = delete;
  FaultRecords& operator=(const FaultRecords&) = delete;

  Fault* fault() { return &memory_->fault; }
  RefusedCall* refused_call() { return &memory_->refused; }

  // What a bounded wait of an earlier call ran into, or "".
  std::string fault_message(const MokShape& shape) const;
  // The first refused call since this was last asked, or "".
  std::string take_refusal(const MokShape& shape);

 private:
  struct Memory {
    Fault fault;
    RefusedCall refused;
  };
  Memory* memory_ = nullptr;
};

}  // namespace mok::sm90

#endif  // MOK_SM90_FAULT_H_
