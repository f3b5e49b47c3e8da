// Element types of the host engine. All arithmetic is FP32; these only load and store.
#ifndef MOK_HOST_SCALAR_H_
#define MOK_HOST_SCALAR_H_

#include <bit>
#include <cstdint>

namespace mok {

struct Bf16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(double value) { return float(value); }
inline float to_float(Bf16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// Round to nearest even; NaN stays NaN.
template <>
inline Bf16 from_float<Bf16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (value != value) return Bf16{uint16_t((bits >> 16) | 0x40)};
  return Bf16{uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <typename T>
float round_to(float value) {
  return to_float(from_float<T>(value));
}

}  // namespace mok

#endif  // MOK_HOST_SCALAR_H_
