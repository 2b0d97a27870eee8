// One block of scores to probabilities: scale, softcap, ALiBi, bias, mask and the running softmax of a row, in this order.
// Rows keep their maximum and their sum of exponentials; columns that a row does not see have probability 0.
#pragma once

#include "vec.h"

namespace pa {

struct Row {
  int64_t position;  // of its query
  int64_t lo, hi;    // the keys that it sees
  float top, sum;    // running maximum and sum of exponentials
  float slope;
  const char* bias;  // at key 0; null: none
};

struct Logit {
  float scale, softcap;
  int64_t bias_type, bias_stride;
};

// Scores s[0, kKeys) of keys from `first` on to probabilities. The factor for the row's old sum and out.
inline float softmax(float* s, int64_t first, Row& row, const Logit& c) {
  const int64_t lo = row.lo - first, hi = row.hi - first;
  const int a = lo > 0 ? int(lo < kKeys ? lo : kKeys) : 0, b = hi < kKeys ? int(hi > 0 ? hi : 0) : kKeys;
  if (b <= a) {
    std::memset(s, 0, kKeys * sizeof(float));
    return 1.0f;
  }
  const int va = a / kLanes * kLanes, vb = (b + kLanes - 1) / kLanes * kLanes;
  for (int j = 0; j < va; j += kLanes) store(s + j, vf{});
  for (int j = vb; j < kKeys; j += kLanes) store(s + j, vf{});

  for (int j = va; j < vb; j += kLanes) {
    vf x = load(s + j) * c.scale;
    if (c.softcap > 0) x = c.softcap * tanh(x / c.softcap);
    store(s + j, x);
  }
  if (row.slope != 0)
    for (int j = a; j < b; j++) s[j] -= row.slope * std::fabs(float(row.position - first - j));
  if (row.bias) {
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
  for (int j = va; j < a; j++) s[j] = -kInf;
  for (int j = b; j < vb; j++) s[j] = -kInf;

  vf tops = fill(-kInf);
  for (int j = va; j < vb; j += kLanes) tops = max_number(load(s + j), tops);
  const float most = largest(tops), top = most > row.top ? most : row.top;
  const float base = top == -kInf ? 0.0f : top;  // nothing but -inf so far: exp(-inf - 0) = 0
  vf total{};
  for (int j = va; j < vb; j += kLanes) {
    const vf p = exp(load(s + j) - base);
    store(s + j, p);
    total += p;
  }
  const float old = row.top == top ? 1.0f : exp(fill(row.top - base))[0];
  row.top = top;
  row.sum = row.sum * old + pa::sum(total);
  return old;
}

}  // namespace pa
