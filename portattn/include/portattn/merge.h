// Merging partial results over disjoint keys, exactly: out = sum(e^(lse_i - lse) out_i), lse = log(sum e^lse_i + e^sink).
//
// Computes   one row (all axes of out but the last) a warp; lanes share its columns.
// Numerics   float32, states in order; a state of lse -inf is skipped whatever its out holds; all empty: out 0, lse -inf.
// Cost       bytes: every state read once.
// Vendor     warp coordinates only.
// Source     the combine step of FlashAttention's split keys.
#pragma once

#include "portattn/online_softmax.h"
#include "warp.h"

namespace portattn {

template <class T, int kThreads>
PA_DEVICE void merge(const MergeParams& p, i64 block) {
  const i64 row = block * (kThreads / 32) + thread_x() / 32;
  if (row >= p.rows) return;
  const float* lses = p.lses + row;
  float top = -PA_INFINITY, sink = -PA_INFINITY;
  if (p.sinks) {
    const int head = static_cast<int>(row % p.heads);
    sink = p.flags & kSinksFloat ? static_cast<const float*>(p.sinks)[head] : to_float(static_cast<const T*>(p.sinks)[head]);
    top = sink;
  }
  for (int i = 0; i < p.states; ++i) top = max_of(top, lses[i * p.lses_state]);
  const bool none = top == -PA_INFINITY;
  // Subtracted before it is scaled: lses may be thousands, and what counts is their difference.
  auto share = [&](float lse) { return lse == -PA_INFINITY ? 0.0f : exp2_fast((lse - top) * kLog2e); };
  float sum = share(sink);
  for (int i = 0; i < p.states; ++i) sum += share(lses[i * p.lses_state]);
  if (none) sum = 1.0f;
  const T* outs = static_cast<const T*>(p.outs) + row * p.head_dim;
  T* out = static_cast<T*>(p.out) + row * p.head_dim;
  for (int d = warp::lane(); d < p.head_dim; d += 32) {
    float x = 0.0f;
    for (int i = 0; i < p.states; ++i) {
      const float w = share(lses[i * p.lses_state]);
      if (w > 0.0f) x += w * to_float(outs[i * p.outs_state + d]);
    }
    out[d] = from_float<T>(x / sum);
  }
  if (warp::lane() == 0) p.lse[row] = none ? -PA_INFINITY : top + log2_fast(sum) * kLn2;
}

}  // namespace portattn
