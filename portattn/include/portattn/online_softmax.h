// Softmax by pieces: scores in units of log2, a running maximum and sum, and their exact merge.
// A state (m, l, o) stands for sum(2^x) = l * 2^m and out = o / l; the empty state has m = -inf, l = 0, o = 0.
#pragma once

#include "portattn/params.h"
#include "portattn/vec.h"

namespace portattn {

// tanh within 2e-7: 1 - 2 / (1 + e^2x).
PA_DEVICE float tanh_of(float x) { return 1.0f - 2.0f * reciprocal(1.0f + exp2_fast(x * (2.0f * kLog2e))); }

// What turns q.k into a score in units of log2: x = dot * scale, then cap * tanh(x) where there is a cap.
struct Score { float scale, cap; };
template <class P>
PA_DEVICE Score score_of(const P& p, float k_scale) {
  const float scale = p.scale * k_scale;
  if (p.softcap > 0.0f) return {scale / p.softcap, p.softcap * kLog2e};
  return {scale * kLog2e, 0.0f};
}

// 2^(m - base), 0 for the empty state whatever base is.
PA_DEVICE float weight(float m, float base) { return m == -PA_INFINITY ? 0.0f : exp2_fast(m - base); }

template <class P>
PA_DEVICE float sink_of(const P& p, int head, bool bf16_sinks) {
  if (p.dialect() & kSinksFloat) return in_global(static_cast<const float*>(p.sinks))[head];
  const u16* sinks = in_global(static_cast<const u16*>(p.sinks));
  return bf16_sinks ? to_float(bf16{sinks[head]}) : to_float(f16{sinks[head]});
}

template <class T> constexpr bool kIsBf16 = false;
template <> constexpr bool kIsBf16<bf16> = true;

// A finished row: what to multiply o by, and its lse (natural logarithm).
struct Finish { float factor, lse; };
template <class T, class P>
PA_DEVICE Finish finish(const P& p, float m, float l, int head) {
  if (l != l) return {l, l};  // NaN in a key that the row sees
  if (!p.sinks) {
    if (l == 0.0f) return {0.0f, p.dialect() & kUnseenInf ? PA_INFINITY : -PA_INFINITY};
    return {1.0f / l, (m + log2_fast(l)) * kLn2};
  }
  const float sink = sink_of(p, head, kIsBf16<T>);
  if (l == 0.0f) return {0.0f, sink};
  const float top = max_of(m, sink * kLog2e);
  const float sum = l * weight(m, top) + weight(sink * kLog2e, top);
  return {weight(m, top) / sum, (top + log2_fast(sum)) * kLn2};
}

}  // namespace portattn
