// Query rows: the query tokens of a sequence times the query heads of one kv head, packed so that one read of the
// keys serves them all. Packed row r is token r / group, head head_kv * group + r % group.
#pragma once

#include "portattn/kv_view.h"

namespace portattn {

// The query token of a packed row.
template <class P>
PA_DEVICE int token_of(const P& p, int packed) { return quotient(packed, p.group); }

struct Rotary { float cos, sin; };
template <class T>
PA_DEVICE Rotary rotary_at(const void* cos, const void* sin, i64 i, bool floats) {
  if (floats) return {in_global(static_cast<const float*>(cos))[i], in_global(static_cast<const float*>(sin))[i]};
  return {to_float(in_global(static_cast<const T*>(cos))[i]), to_float(in_global(static_cast<const T*>(sin))[i])};
}

// Element d of a row at `position`, turned: pairs are (d, d + half), or neighbours. Negative positions use angle 0's
// row of the table (their result is unspecified, but must not read outside it).
template <class T>
PA_DEVICE float turned(const T* row, int d, int dim, int position, const void* cos, const void* sin, bool interleaved, bool floats) {
  const float x = to_float(row[d]);
  if (d >= dim) return x;
  const int half = dim / 2;
  const int pair = interleaved ? d / 2 : d % half;
  const bool second = interleaved ? d & 1 : d >= half;
  const float other = to_float(row[interleaved ? d ^ 1 : second ? d - half : d + half]);
  const Rotary r = rotary_at<T>(cos, sin, static_cast<i64>(max_of(position, 0)) * half + pair, floats);
  return second ? x * r.cos + other * r.sin : x * r.cos - other * r.sin;
}

// Fills shared rows [0, kRows) with packed rows from `first` on, zero outside the sequence and past head_dim.
template <class T, int kD, int kRows, int kThreads, class P>
PA_DEVICE void load_q(const P& p, const Sequence& s, int b, int head_kv, int first, T* shared, int pitch) {
  const int group = p.group, total = s.len_q * group;
  for (int i = thread_x(); i < kRows * (kD / 8); i += kThreads) {
    const int r = i / (kD / 8), d = i % (kD / 8) * 8;
    if (first + r < total) {
      const int token = token_of(p, first + r), head = head_kv * group + first + r - token * group;
      const T* row = in_global(static_cast<const T*>(p.q)) + q_offset(p, s, b, token, head);
      if (!p.rotary_cos && d + 8 <= p.head_dim && (reinterpret_cast<u64>(row + d) & 15) == 0) {
        *reinterpret_cast<Bytes16*>(shared + r * pitch + d) = *reinterpret_cast<const Bytes16*>(row + d);
        continue;
      } else {
#pragma unroll 1
        for (int e = 0; e < 8; ++e) {  // small code: off the hot path
          float y = 0.0f;
          if (d + e < p.head_dim)
            y = p.rotary_cos ? turned(row, d + e, p.rotary_dim, token + s.len_k - s.len_q, p.rotary_cos, p.rotary_sin,
                                      p.flags & kInterleaved, p.flags & kRotaryFloat)
                             : to_float(row[d + e]);
          shared[r * pitch + d + e] = from_float<T>(y);
        }
        continue;
      }
    }
    *reinterpret_cast<Bytes16*>(shared + r * pitch + d) = {};
  }
}

// What a mask and a bias by position need of one packed row.
struct Row {
  int position;  // may be negative
  float slope;   // alibi, times log2(e)
};
template <class P>
PA_DEVICE Row row_of(const P& p, const Sequence& s, int b, int head_kv, int packed) {
  const int group = p.group;
  const int token = token_of(p, packed);
  Row r = {token + s.len_k - s.len_q, 0.0f};
  if (p.alibi && packed < s.len_q * group) r.slope = in_global(p.alibi)[b * p.alibi_batch + head_kv * group + packed - token * group] * kLog2e;
  return r;
}
template <class P>
PA_DEVICE bool sees(const P& p, const Sequence& s, const Row& r, int key) {
  if (key >= s.len_k) return false;
  if (p.window_right >= 0 && key - p.window_right > r.position) return false;
  return p.window_left < 0 || key + p.window_left >= r.position;
}

}  // namespace portattn
