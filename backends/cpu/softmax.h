// One block of scores to probabilities: scale, softcap, ALiBi, bias, mask and the running softmax of a row, in this order.
// Rows keep their maximum and their sum of exponentials; columns that a row does not see have probability 0.
#pragma once

#include <algorithm>

#include "pairs.h"

namespace pa {

struct Row {
  int64_t position;  // of its query
  int64_t lo, hi;    // the keys that it sees
  float top, sum;    // running maximum, before the scale, and sum of exponentials
  float unit;        // times top: a logit
  float slope;
  const char* bias;  // at key 0; null: none
};

struct Logit {
  float scale, softcap;
  int64_t bias_type, bias_stride;
};

// What is rare: softcap, ALiBi, bias, a scale that is not positive. Scores [from, to), of which the row sees [a, b), to logits.
__attribute__((noinline)) inline void to_logits(float* s, int from, int to, int a, int b, int64_t first, const Row& row, const Logit& c) {
  for (int j = from; j < to; j += kLanes) {
    vf x = load(s + j) * c.scale;
    if (c.softcap > 0) x = c.softcap * tanh(x / c.softcap);
    store(s + j, x);
  }
  if (row.slope != 0)
    for (int j = a; j < b; j++) s[j] -= row.slope * std::fabs(float(row.position - first - j));
  if (!row.bias) return;
  const int64_t at = first * c.bias_stride;
  if (c.bias_type == kBool) {
    for (int j = a; j < b; j++)
      if (!row.bias[at + j * c.bias_stride]) s[j] = -kInf;
  } else if (c.bias_type == kF32 && c.bias_stride == 1) {
    const float* bias = reinterpret_cast<const float*>(row.bias) + at;
    for (int j = a; j < b; j++) s[j] += bias[j];
  } else {
    for (int j = a; j < b; j++) s[j] += number(row.bias, at + j * c.bias_stride, c.bias_type);
  }
}

// x in the columns [j, j + kLanes) that lie in [a, b), -inf in the others.
inline vf inside(vf x, int j, int a, int b) {
  vi column{};
  for (int i = 0; i < kLanes; i++) column[i] = i;
  column += j;
  return select((column >= a) & (column < b), x, fill(-kInf));
}

// Columns of a row's scores: it sees [a, b), which whole panels [va, vb) hold.
struct Columns {
  int a, b, va, vb;
  Columns(const Row& row, int from, int to, int64_t first)
      : a(int(std::clamp<int64_t>(row.lo - first, from, to))), b(int(std::clamp<int64_t>(row.hi - first, a, to))), va(a / kPanel * kPanel),
        vb(b > a ? (b + kPanel - 1) / kPanel * kPanel : va) {}
};

// The row's greatest logit so far, before its unit; what it does not see is -inf then.
inline float raise(float* s, const Columns& at, int64_t first, Row& row, const Logit& c) {
  row.unit = c.scale;
  if (c.softcap > 0 || row.slope != 0 || row.bias || !(c.scale > 0)) to_logits(s, at.va, at.vb, at.a, at.b, first, row, c), row.unit = 1;
  auto mask = [&](int j) {
    for (int i = j; i < j + kPanel; i += kLanes) store(s + i, inside(load(s + i), i, at.a, at.b));
  };
  if (at.a > at.va) mask(at.va);
  if (at.b < at.vb) mask(at.vb - kPanel);
  vf tops = fill(-kInf), more = tops;
  for (int j = at.va; j < at.vb; j += kPanel) tops = max_number(load(s + j), tops), more = max_number(load(s + j + kLanes), more);
  const float most = largest(max_number(tops, more));
  return most > row.top ? most : row.top;
}

// A row's weights: 2^((s - base) scale) where it sees keys, else 0; returns their sum.
template <bool kRound>
inline float weigh(float* s, const Columns& at, int from, int to, float base, float scale, uint16_t* pairs) {
  auto put = [&](int j, vf a, vf b) __attribute__((always_inline)) {
    if (kRound)
      to_bf16(a, b, pairs + j);
    else
      store(s + j, a), store(s + j + kLanes, b);
  };
  for (int j = from; j < at.va; j += kPanel) put(j, vf{}, vf{});
  vf total{}, rest{};
  for (int j = at.va; j < at.vb; j += kPanel) {
    const vf a = exp2((load(s + j) - base) * scale), b = exp2((load(s + j + kLanes) - base) * scale);  // equal scores differ by 0, however large
    put(j, a, b);
    total += a, rest += b;
  }
  for (int j = at.vb; j < to; j += kPanel) put(j, vf{}, vf{});
  return sum(total + rest);
}

// Scores [from, to) of keys from `first` on to probabilities, for n rows that lie `stride` apart: in place, or rounded to bfloat16 into `pairs`.
// from and to are whole panels. old[r]: the factor for the row's old sum and out.
// All maxima come before all exponentials: a row's steps wait for each other, those of different rows do not.
inline void softmax(float* s, int64_t stride, int from, int to, int64_t first, Row* row, int n, const Logit& c, uint16_t* pairs, float* old) {
  constexpr int kAtOnce = 48;  // whole vectors
  float base[kAtOnce], fall[kAtOnce]{};
  for (; n > 0; n -= kAtOnce) {
    const int count = std::min(n, kAtOnce);
    for (int r = 0; r < count; r++) {
      const Columns at(row[r], from, to, first);
      const float top = at.a < at.b ? raise(s + r * stride, at, first, row[r], c) : row[r].top;
      base[r] = top == -kInf ? 0.0f : top;  // nothing but -inf so far: 2^(-inf - 0) = 0
      fall[r] = row[r].top == top ? 0.0f : (row[r].top - base[r]) * (row[r].unit * kLog2E);
      row[r].top = top;
    }
    for (int r = 0; r < count; r += kLanes) store(fall + r, exp2(load(fall + r)));
    for (int r = 0; r < count; r++, s += stride, old++, row++) {
      const Columns at(*row, from, to, first);
      const float scale = row->unit * kLog2E;
      float sum;
      if (pairs)
        sum = weigh<true>(s, at, from, to, base[r], scale, pairs), pairs += stride;
      else
        sum = weigh<false>(s, at, from, to, base[r], scale, nullptr);
      *old = fall[r];
      row->sum = row->sum * fall[r] + sum;
    }
  }
}

}  // namespace pa
