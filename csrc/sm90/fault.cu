#include "../schedule/messages.h"
#include "error.h"
#include "fault.h"

namespace mok::sm90 {
namespace {

// What a wait was for, in the words of the host engine where it has the same.
struct SiteText {
  const char* phase;
  const char* detail;  // what Fault.detail numbers; NULL: nothing
};

// No default: the compiler then tells of a site without text (see tests/native).
SiteText describe_site(WaitSite site) {
  switch (site) {
    case kWaitNone:
      break;
    case kWaitPeerCounts:
      return {"entry", "rank"};
    case kWaitPeerRows:
      return {"row tables", "rank"};
    case kWaitPulled:
      return {"pull of this rank's rows", "rank"};
    case kWaitPushed:
      return {"combine", "rank"};
    case kWaitCombine:
      return {"combine", "token"};
    // Rings in global memory; those of backward free whole groups.
    case kWaitRowRing:
      return {"dispatch", "block"};
    case kWaitActivationRing:
      return {"fc1 store", "block"};
    case kWaitGradRing:
      return {"fc2 dgrad store", "block"};
    // Operands of a task. Backward waits for rows in its recomputation, too.
    case kWaitRows:
      return {"fc1 or fc2 dgrad", "block"};
    case kWaitActivations:
      return {"fc2 or pre-activations of fc2 dgrad", "block"};
    case kWaitGrads:
      return {"fc1 dgrad or wgrad", "block or cut"};
    // Barriers between the warps of a CTA.
    case kWaitStageEmpty:
      return {"pipeline, free stage", nullptr};
    case kWaitTaskEmpty:
      return {"pipeline, free task slot", nullptr};
    case kWaitStagingFull:
      return {"pipeline, finished tile", nullptr};
    case kWaitChunkFull:
      return {"pipeline, gradients of pre-activations", nullptr};
  }
  return {"unknown", nullptr};
}

// Why nobody made the call, as this rank sees it.
std::string describe_refusal(const RefusedCall& call, const MokShape& shape) {
  if (call.rank == shape.ep_rank && call.route >= 0) {
    return bad_expert_text(shape, call.expert, call.route);
  }
  if (call.tokens < 0) return peer_refused_text(call.rank, call.tokens);
  if ((call.op & 0xff) == (call.my_op & 0xff)) {
    return peer_text(call.rank) + " has another number of CTAs than this rank";
  }
  return other_call_text(call.rank, call.op, call.my_op);
}

}  // namespace

FaultRecords::FaultRecords() {
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&memory_), sizeof(Memory), cudaHostAllocMapped),
             "allocating pinned memory");
  *memory_ = Memory{};
}

FaultRecords::~FaultRecords() { cudaFreeHost(memory_); }

std::string FaultRecords::fault_message(const MokShape& shape) const {
  const volatile Fault& fault = memory_->fault;
  if (!fault.raised) return "";
  const SiteText text = describe_site(static_cast<WaitSite>(fault.site));
  const int32_t by = fault.by;
  std::string what = rank_text(shape) + (by == shape.ep_rank ? " waited too long" : " stopped") +
                     " in phase '" + text.phase + "'";
  if (text.detail != nullptr && fault.detail >= 0) {
    what += std::string(", for ") + text.detail + " " + std::to_string(fault.detail);
  }
  if (by != shape.ep_rank) what += ", because rank " + std::to_string(by) + " gave up waiting";
  return what;
}

std::string FaultRecords::take_refusal(const MokShape& shape) {
  volatile RefusedCall& record = memory_->refused;
  if (!record.raised) return "";
  const RefusedCall call{record.rank,  record.op,     record.tokens, record.my_op,
                         record.route, record.expert, record.epoch,  1};
  record.raised = 0;
  return rank_text(shape) + " did not make call " + std::to_string(call.epoch) + " (" +
         op_name(call.my_op) + "), whose results are undefined: " + describe_refusal(call, shape);
}

}  // namespace mok::sm90
