// Products of bfloat16 pairs, summed in float32: by an instruction where the CPU has one (AVX512-BF16, Armv8.6).
// A vector of pairs has in lane i the elements 2 i and 2 i + 1 of a row, or one column of two rows (interleaved).
#pragma once

#include "vec.h"

#if defined(PA_EMULATED)
#include "emulated.h"
#endif

namespace pa {

inline vi repeat(const void* word) {
  int32_t x;
  std::memcpy(&x, word, 4);
  return vi{} + x;
}

// to[0, n) = x in bfloat16, then zeros up to a whole vector.
inline void to_bf16_row(const float* x, int n, uint16_t* to) {
  int i = 0;
  for (; i + kWide <= n; i += kWide) to_bf16(load(x + i), load(x + i + kLanes), to + i);
  for (; i < n; i++) to[i] = to_bf16(x[i]);
  for (; i % kWide; i++) to[i] = 0;
}

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;
inline vf dot2(vf sum, vi a, vi b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

// Columns of two rows as pairs; columns come in the order that restore() undoes: blocks of 4 of the first and the second half.
inline void interleave(vi a, vi b, vi& lo, vi& hi) {
  lo = (vi)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b), hi = (vi)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(PA_EMULATED)
constexpr bool kPairs = true;
inline vf dot2(vf sum, vi a, vi b) { return (vf)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_s32((int32x4_t)a), vreinterpretq_bf16_s32((int32x4_t)b)); }

inline void interleave(vi a, vi b, vi& lo, vi& hi) {
  const uint16x8_t x = vreinterpretq_u16_s32((int32x4_t)a), y = vreinterpretq_u16_s32((int32x4_t)b);
  lo = (vi)vzip1q_u16(x, y), hi = (vi)vzip2q_u16(x, y);
}
#elif defined(PA_EMULATED)
constexpr bool kPairs = true;
using emulated::dot2;
using emulated::interleave;
#else
constexpr bool kPairs = false;
inline vf dot2(vf sum, vi, vi) { return sum; }  // never called: kPairs
inline void interleave(vi, vi, vi&, vi&) {}
#endif

// Sums over interleaved columns, x[0, n), to the order of the columns; n is whole vectors of pairs.
inline void restore(float* x, int64_t n) {
  if (kLanes < 16) return;  // vzip keeps the order
  for (int64_t c = 0; c < n; c += kWide) {
    float t[kWide];
    std::memcpy(t, x + c, sizeof(t));
    for (int i = 0; i < kLanes; i += 4) {
      std::memcpy(x + c + 2 * i, t + i, 16);
      std::memcpy(x + c + 2 * i + 4, t + kLanes + i, 16);
    }
  }
}

}  // namespace pa
