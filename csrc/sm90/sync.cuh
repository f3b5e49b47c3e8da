// How CTAs and ranks hand data to each other: flags in global memory, and waits that cannot hang.
//
// Producer through the asynchronous proxy (bulk or tensor stores): the issuing thread waits until
// its stores are performed, fences the proxies, then releases a counter or flag. Consumer: poll
// relaxed (an acquiring poll would invalidate the L1 cache every time), then one acquiring fence,
// then, before tensor or bulk loads, a fence between the proxies. PTX orders accesses of one proxy
// without it only within a CTA. Words that peers write carry the epoch and are never reset;
// counters local to a rank are zeroed by the schedule of every call.
#ifndef MOK_SM90_SYNC_CUH_
#define MOK_SM90_SYNC_CUH_

#include "call.h"
#include "ptx.cuh"

namespace mok::sm90 {

// ---- Words in global memory --------------------------------------------------------------------

MOK_DEVICE uint32_t load_relaxed(const uint32_t* word) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}

MOK_DEVICE uint64_t load_relaxed(const uint64_t* word) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}

// Publishes everything the thread has done or seen done, to other CTAs of this GPU.
MOK_DEVICE void release_add(uint32_t* counter, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// The same; returns the value before. Who must see what earlier arrivals published fences after it.
MOK_DEVICE uint32_t release_add_fetch(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

// The next ticket of `counter`, claimed by a whole warp.
MOK_DEVICE uint32_t claim_ticket(uint32_t* counter) {
  uint32_t ticket = 0;
  if (threadIdx.x % 32 == 0) ticket = atomicAdd(counter, 1u);
  return warp_uniform(ticket);
}

// Publishes to all ranks.
MOK_DEVICE void release_store(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

MOK_DEVICE void release_store(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

MOK_DEVICE void acquire_fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
MOK_DEVICE void acquire_fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Makes data that bulk or tensor stores of other CTAs published visible to this thread's own bulk
// or tensor copies. Call after the poll that saw the flag.
MOK_DEVICE void acquire_for_copies() {
  acquire_fence_gpu();
  fence_proxy_global();
}

// Order of the thread's finished bulk stores before a release that follows.
MOK_DEVICE void finish_bulk_stores() {
  wait_bulk_done();
  fence_proxy_global();
}

// ---- Bounded waits -----------------------------------------------------------------------------

// Watchdog.failed_wait: the first wait of this rank that failed; 0 if none has.
constexpr uint64_t kToldToAbort = uint64_t{1} << 40;  // by a peer, or another wait
MOK_DEVICE uint64_t pack_failed_wait(WaitSite site, int32_t detail, bool told) {
  return uint64_t{static_cast<uint32_t>(site)} << 32 | (told ? kToldToAbort : 0) |
         static_cast<uint32_t>(detail);
}

// Writes the failure of this rank where the host finds it; by one thread in the life of a
// workspace.
MOK_DEVICE void record_fault(const Watchdog& dog, WaitSite site, int32_t detail, int32_t by) {
  dog.fault->site = site;
  dog.fault->detail = detail;
  dog.fault->by = by;
  __threadfence_system();
  dog.fault->raised = 1;
}

// Records that this rank gives up, and tells every rank. Nothing if a rank has given up before.
MOK_DEVICE void raise_abort(const Watchdog& dog, WaitSite site, int32_t detail) {
  if (atomicCAS_system(dog.abort, 0u, 1u + dog.rank) != 0) return;
  record_fault(dog, site, detail, dog.rank);
#pragma unroll 1
  for (int32_t r = dog.num_ranks - 1; r >= 0; --r) {
    atomicCAS_system(dog.peer_abort[r], 0u, 1u + dog.rank);
  }
}

// Whether some rank has given up. The first thread that learns it of a peer records where this rank
// stood, for here, too, the call did not complete.
MOK_DEVICE bool aborted(const Watchdog& dog, WaitSite site, int32_t detail) {
  constexpr uint32_t kRecorded = 1u << 31;
  const uint32_t word = load_relaxed(dog.abort);
  if (word == 0) return false;
  if (word != 1u + dog.rank && (word & kRecorded) == 0 &&
      atomicCAS_system(dog.abort, word, word | kRecorded) == word) {
    record_fault(dog, site, detail, static_cast<int32_t>(word) - 1);
  }
  return true;
}

// Whether a wait must end: some rank has given up, or the time is up. Notes where it stood and
// leaves the rest to settle_failure: waits are everywhere, and what a kernel runs all the time must
// fit the instruction cache. (A call in the kernel would cost the multiplies their registers.)
class Deadline {
 public:
  // Looks every 16th call, for this costs a trip to memory.
  MOK_DEVICE bool passed(const Watchdog& dog, WaitSite site, int32_t detail, uint64_t limit_ns) {
    if (++polls_ % 16 != 0) return false;
    const bool told = load_relaxed(dog.abort) != 0;
    if (!told) {
      const auto now = static_cast<uint32_t>(global_nanoseconds() >> kTickShift);
      if (polls_ == 16) start_ = now;
      if (now - start_ <= limit_ns >> kTickShift) return false;
    }
    atomicCAS(reinterpret_cast<unsigned long long*>(dog.failed_wait), 0ull,
              pack_failed_wait(site, detail, told));
    return true;
  }

 private:
  static constexpr int32_t kTickShift = 20;  // about a millisecond; registers are scarce here

  uint32_t polls_ = 0;
  uint32_t start_ = 0;  // in ticks
};

// By every thread of a kernel that waits, after its role: if a wait has failed, tells all ranks or,
// if one of them told this rank, records where it stood.
MOK_DEVICE void settle_failure(const Watchdog& dog) {
  const uint64_t failed = load_relaxed(dog.failed_wait);
  if (failed == 0) return;
  const auto site = static_cast<WaitSite>(failed >> 32 & 0xff);
  const auto detail = static_cast<int32_t>(static_cast<uint32_t>(failed));
  if ((failed & kToldToAbort) != 0) {
    aborted(dog, site, detail);
  } else {
    raise_abort(dog, site, detail);
  }
}

// Polls `ready` until it holds. False when the deadline passes: the caller then leaves its role at
// once, and so does every other role at its next wait.
template <typename Ready>
MOK_DEVICE bool wait_until(Ready ready, const Watchdog& dog, WaitSite site, int32_t detail,
                           uint64_t limit_ns) {
  Deadline deadline;
#pragma unroll 1
  while (!ready()) {
    if (deadline.passed(dog, site, detail, limit_ns)) return false;
  }
  return true;
}

// The same for a condition that a whole warp evaluates together, with rests between the polls.
template <typename Ready>
MOK_DEVICE bool warp_wait_until(Ready ready, const Watchdog& dog, WaitSite site, int32_t detail) {
  Deadline deadline;
  while (!ready()) {
    if (__any_sync(~0u, deadline.passed(dog, site, detail, dog.inner_wait_ns))) return false;
    __nanosleep(300);
  }
  return true;
}

// For the math warps: in fewer instructions and without a deadline of its own, since what they wait
// for is the work of warps that have one. False once some rank has given up.
template <typename Ready>
MOK_DEVICE bool math_wait_until(Ready ready, const Watchdog& dog) {
#pragma unroll 1
  for (uint32_t polls = 1; !ready(); ++polls) {
    if (polls % 64 == 0 && load_relaxed(dog.abort) != 0) return false;
  }
  return true;
}

// Waits for a phase of a shared-memory barrier.
MOK_DEVICE bool wait_barrier(uint32_t barrier, uint32_t parity, const Watchdog& dog,
                             WaitSite site) {
  return wait_until([=] { return barrier_try_wait(barrier, parity); }, dog, site, 0,
                    dog.inner_wait_ns);
}

MOK_DEVICE bool math_wait_barrier(uint32_t barrier, uint32_t parity, const Watchdog& dog) {
  return math_wait_until([=] { return barrier_try_wait(barrier, parity); }, dog);
}

// Waits until a local counter has reached `target`. It stands for data that tensor or bulk copies
// of this thread read next.
MOK_DEVICE bool wait_loadable(const uint32_t* counter, uint32_t target, const Watchdog& dog,
                              WaitSite site, int32_t detail) {
  if (!wait_until([=] { return load_relaxed(counter) >= target; }, dog, site, detail,
                  dog.inner_wait_ns)) {
    return false;
  }
  acquire_for_copies();
  return true;
}

// Waits for an epoch-stamped flag of a peer.
MOK_DEVICE bool wait_epoch(const uint32_t* flag, uint32_t epoch, const Watchdog& dog, WaitSite site,
                           int32_t detail, uint64_t limit_ns) {
  if (wait_until([=] { return static_cast<int32_t>(load_relaxed(flag) - epoch) >= 0; }, dog, site,
                 detail, limit_ns)) {
    return true;
  }
  settle_failure(dog);
  return false;
}

// Waits until a rank has finished `steps` steps of this call.
MOK_DEVICE bool wait_progress(const uint64_t* word, uint32_t epoch, uint32_t steps,
                              const Watchdog& dog, WaitSite site, int32_t detail) {
  const uint64_t target = progress_word(epoch, steps);
  return wait_until([=] { return load_relaxed(word) >= target; }, dog, site, detail,
                    dog.inner_wait_ns);
}

// ---- Rings in shared memory --------------------------------------------------------------------

// Position in a ring of `kSlots` with the parity of the current lap.
template <int32_t kSlots>
struct RingCursor {
  uint32_t slot = 0;
  uint32_t parity;

  MOK_DEVICE explicit RingCursor(uint32_t first_parity) : parity(first_parity) {}
  MOK_DEVICE void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
  MOK_DEVICE void advance_by(uint32_t steps) {
    slot += steps;
    parity ^= slot / kSlots & 1;
    slot %= kSlots;
  }
};

}  // namespace mok::sm90

#endif  // MOK_SM90_SYNC_CUH_
