// Sums over ranks on a CPU: in rank order, in float32, so that every rank gets the same bits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace sparkjax {

inline float widen(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// To the nearest bfloat16, ties to even.
inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// term(who) is where the `bytes` of rank `who` begin; half is bfloat16, else float32.
template <class Term>
void sum(const Term& term, int ranks, int64_t bytes, char* out, bool half) {
  if (!half) {
    const int64_t n = bytes / 4;
    float* y = reinterpret_cast<float*>(out);
    std::memcpy(y, term(0), bytes);
    for (int who = 1; who < ranks; ++who) {
      const float* x = reinterpret_cast<const float*>(term(who));
      for (int64_t i = 0; i < n; ++i) y[i] = y[i] + x[i];
    }
    return;
  }
  constexpr int64_t kBlock = 2048;
  float total[kBlock];
  const int64_t n = bytes / 2;
  uint16_t* y = reinterpret_cast<uint16_t*>(out);
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t m = std::min(kBlock, n - at);
    for (int who = 0; who < ranks; ++who) {
      const uint16_t* x = reinterpret_cast<const uint16_t*>(term(who)) + at;
      if (who == 0)
        for (int64_t i = 0; i < m; ++i) total[i] = widen(x[i]);
      else
        for (int64_t i = 0; i < m; ++i) total[i] = total[i] + widen(x[i]);
    }
    for (int64_t i = 0; i < m; ++i) y[at + i] = narrow(total[i]);
  }
}

}  // namespace sparkjax
