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

// Scores s[from, to) of keys from `first` on to probabilities: in place, or rounded to bfloat16 into `pairs`. from and to are whole panels.
// Returns the factor for the row's old sum and out.
inline float softmax(float* s, int from, int to, int64_t first, Row& row, const Logit& c, uint16_t* pairs) {
  const int a = int(std::clamp<int64_t>(row.lo - first, from, to)), b = int(std::clamp<int64_t>(row.hi - first, a, to));
  auto put = [&](int j, vf x, vf y) {
    if (pairs)
      to_bf16(x, y, pairs + j);
    else
      store(s + j, x), store(s + j + kLanes, y);
  };
  const int va = a / kPanel * kPanel, vb = b > a ? (b + kPanel - 1) / kPanel * kPanel : va;
  for (int j = from; j < va; j += kPanel) put(j, vf{}, vf{});
  for (int j = vb; j < to; j += kPanel) put(j, vf{}, vf{});
  if (b <= a) return 1.0f;

  row.unit = c.scale;
  if (c.softcap > 0 || row.slope != 0 || row.bias || !(c.scale > 0)) to_logits(s, va, vb, a, b, first, row, c), row.unit = 1;
  const float scale = row.unit * kLog2E;
  vf tops = fill(-kInf), more = tops;
  for (int j = va; j < vb; j += kPanel) {
    vf x = load(s + j), y = load(s + j + kLanes);
    if (j < a || j + kPanel > b) {
      x = inside(x, j, a, b), y = inside(y, j + kLanes, a, b);
      store(s + j, x), store(s + j + kLanes, y);
    }
    tops = max_number(x, tops), more = max_number(y, more);
  }
  const float most = largest(max_number(tops, more)), top = most > row.top ? most : row.top;
  const float base = top == -kInf ? 0.0f : top;  // nothing but -inf so far: 2^(-inf - 0) = 0
  vf total{}, rest{};
  for (int j = va; j < vb; j += kPanel) {
    const vf x = exp2((load(s + j) - base) * scale), y = exp2((load(s + j + kLanes) - base) * scale);  // equal scores differ by 0, however large
    put(j, x, y);
    total += x, rest += y;
  }
  const float old = row.top == top ? 1.0f : exp2(fill((row.top - base) * scale))[0];
  row.top = top;
  row.sum = row.sum * old + pa::sum(total + rest);
  return old;
}

}  // namespace pa
