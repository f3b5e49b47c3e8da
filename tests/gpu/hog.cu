// A stand-in for a collective of another library: CTAs that fill SMs and spin until the same kernel
// runs on every rank. Every spin is bounded.
#include <cstdint>

namespace {

constexpr int kMaxRanks = 8;
constexpr int kMaxCtas = 128;

struct Meeting {
  uint32_t* flags[kMaxRanks];  // of each rank: [kMaxRanks][kMaxCtas]
  int rank;
  int ranks;
  uint32_t round;
  uint64_t limit_ns;
  uint32_t* timeouts;
};

__device__ uint64_t now() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__global__ void meet(const __grid_constant__ Meeting m) {
  const int peer = threadIdx.x;
  if (peer >= m.ranks) return;
  volatile uint32_t* theirs = m.flags[peer] + m.rank * kMaxCtas + blockIdx.x;
  volatile uint32_t* mine = m.flags[m.rank] + peer * kMaxCtas + blockIdx.x;
  __threadfence_system();
  *theirs = m.round;
  const uint64_t start = now();
  while (static_cast<int32_t>(*mine - m.round) < 0) {
    if (now() - start > m.limit_ns) {
      atomicAdd(m.timeouts, 1u);
      return;
    }
  }
}

}  // namespace

extern "C" int hog(void* const* flags, int rank, int ranks, uint32_t round, int ctas, int limit_ms,
                   uint32_t* timeouts, void* stream) {
  Meeting m{};
  for (int r = 0; r < ranks; ++r) m.flags[r] = static_cast<uint32_t*>(flags[r]);
  m.rank = rank;
  m.ranks = ranks;
  m.round = round;
  m.limit_ns = uint64_t{1'000'000} * limit_ms;
  m.timeouts = timeouts;
  constexpr int kShared = 200 * 1024;  // nothing else fits beside it
  cudaFuncSetAttribute(meet, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  meet<<<ctas, 1024, kShared, static_cast<cudaStream_t>(stream)>>>(m);
  return cudaGetLastError();
}
