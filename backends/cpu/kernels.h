// The steps of attention over one block of keys, for the rows of one kv head: scores, softmax, probabilities times values.
//
// Few rows (decode) read K and V where they lie, each line once for the rows of a group; many rows (prefill) turn both
// into float32 panels first and run register tiles of kRows x kPanel over them. Softmax is one function for both.
// Numerics: float32 everywhere; rows keep their maximum and sum; columns that a row does not see have probability 0.
// Cost: decode is bound by reading K and V (4 rows a read need 2 vector FMAs for each 8 elements), prefill by FMAs.
#pragma once

#include "vec.h"

namespace pa {

constexpr int kFewRows = 16;   // at most so many rows of a kv head read K and V in place
constexpr int kTileRows = 96;  // rows of a prefill tile: panels are packed once for so many

struct Block {  // pointers to the rows of a block's keys and values; the tail repeats the last one
  const char* k[kKeys];
  const char* v[kKeys];
  int64_t first;
  int n;
};

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

// ---------------------------------------------------------------- softmax
// Scores s[0, kKeys) of keys from `first` on to probabilities; columns [from, to) are written. The factor for the row's old sum.
inline float softmax(float* s, int from, int to, int64_t first, Row& row, const Logit& c) {
  const int64_t lo = row.lo - first, hi = row.hi - first;
  const int a = lo > 0 ? int(lo < kKeys ? lo : kKeys) : 0, b = hi < kKeys ? int(hi > 0 ? hi : 0) : kKeys;
  if (b <= a) {
    for (int j = from; j < to; j += kLanes) store(s + j, vf{});
    return 1.0f;
  }
  const int va = a / kLanes * kLanes, vb = (b + kLanes - 1) / kLanes * kLanes;
  for (int j = from; j < va; j += kLanes) store(s + j, vf{});
  for (int j = vb; j < to; j += kLanes) store(s + j, vf{});

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
  float top = row.top;
  for (int i = 0; i < kLanes; i++) top = tops[i] > top ? tops[i] : top;
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

// ---------------------------------------------------------------- few rows
// s[r][j] = q[r] . k[j] for kBunch rows; q is padded with zeros to whole vectors.
constexpr int kBunch = 4;

template <class E>
void few_scores(const Block& now, const Block& next, const float* q, int stride, int dim, float* s, const float* table) {
  using T = typename E::T;
  const int whole = dim / kLanes * kLanes, bytes = dim * int(sizeof(T));
  for (int j = 0; j < now.n; j += 2) {
    const T *k0 = (const T*)now.k[j], *k1 = (const T*)now.k[j + 1 < now.n ? j + 1 : j];
    if (j < next.n)
      for (int i = 0; i < bytes; i += 64) __builtin_prefetch(next.k[j] + i), __builtin_prefetch(next.k[j + 1 < next.n ? j + 1 : j] + i);
    vf x[kBunch]{}, y[kBunch]{};
    int d = 0;
    for (; d < whole; d += kLanes) {
      const vf a = E::load(k0 + d, table), b = E::load(k1 + d, table);
#pragma GCC unroll 4
      for (int r = 0; r < kBunch; r++) {
        const vf w = load(q + r * stride + d);
        x[r] += w * a, y[r] += w * b;
      }
    }
    if (d < dim) {
      const vf a = load_part<E>(k0 + d, dim - d, table), b = load_part<E>(k1 + d, dim - d, table);
      for (int r = 0; r < kBunch; r++) {
        const vf w = load(q + r * stride + d);
        x[r] += w * a, y[r] += w * b;
      }
    }
    float to[8];
    sums4(x[0], x[1], x[2], x[3], to), sums4(y[0], y[1], y[2], y[3], to + 4);
    for (int r = 0; r < kBunch; r++) s[r * kKeys + j] = to[r], s[r * kKeys + j + 1] = to[4 + r];
  }
}

// out[r] = out[r] * old[r] + p[r] V for kBunch rows, keys [from, to).
template <class E>
void few_values(const Block& now, const Block& next, int from, int to, const float* p, const float* old, float* out, int stride, int dim,
                const float* table) {
  using T = typename E::T;
  const int bytes = dim * int(sizeof(T));
  int d = 0;
  for (; d + kPanel <= dim; d += kPanel) {
    vf x[kBunch], y[kBunch];
    for (int r = 0; r < kBunch; r++) x[r] = load(out + r * stride + d) * old[r], y[r] = load(out + r * stride + d + kLanes) * old[r];
    for (int j = from; j < to; j++) {
      const T* v = (const T*)now.v[j] + d;
      const vf a = E::load(v, table), b = E::load(v + kLanes, table);
      if (d == 0 && j < next.n)
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(next.v[j] + i);
#pragma GCC unroll 4
      for (int r = 0; r < kBunch; r++) x[r] += p[r * kKeys + j] * a, y[r] += p[r * kKeys + j] * b;
    }
    for (int r = 0; r < kBunch; r++) store(out + r * stride + d, x[r]), store(out + r * stride + d + kLanes, y[r]);
  }
  for (; d < dim; d += kLanes) {
    const int part = dim - d < kLanes ? dim - d : kLanes;
    vf x[kBunch];
    for (int r = 0; r < kBunch; r++) x[r] = load(out + r * stride + d) * old[r];
    for (int j = from; j < to; j++) {
      const T* v = (const T*)now.v[j] + d;
      const vf a = part == kLanes ? E::load(v, table) : load_part<E>(v, part, table);
      for (int r = 0; r < kBunch; r++) x[r] += p[r * kKeys + j] * a;
    }
    for (int r = 0; r < kBunch; r++) store(out + r * stride + d, x[r]);
  }
}

// ---------------------------------------------------------------- many rows
// c[r][0, kPanel) = c * old[r] + sum_i a[r][i] b[i] for kRows rows; without `old`, c is not read.
inline void tile(const float* a, int64_t a_stride, const float* b, int n, float* c, int64_t c_stride, const float* old) {
  vf x[kRows], y[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++) {
    x[r] = y[r] = vf{};
    if (old) x[r] = load(c + r * c_stride) * old[r], y[r] = load(c + r * c_stride + kLanes) * old[r];
  }
  for (int i = 0; i < n; i++) {
    const vf v = load(b + i * kPanel), w = load(b + i * kPanel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
      const float f = a[r * a_stride + i];
      x[r] += f * v, y[r] += f * w;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++) store(c + r * c_stride, x[r]), store(c + r * c_stride + kLanes, y[r]);
}

inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {  // 8 x 8
#if defined(__AVX2__)
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 4; i++) t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]), t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  for (int i = 0; i < 2; i++) {
    const __m256 *a = t + 4 * i, *b = t + 4 * i + 2;
    r[4 * i] = _mm256_shuffle_ps(a[0], b[0], 0x44), r[4 * i + 1] = _mm256_shuffle_ps(a[0], b[0], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(a[1], b[1], 0x44), r[4 * i + 3] = _mm256_shuffle_ps(a[1], b[1], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

template <class E>
void widen(const char* row, int dim, float* to, const float* table) {  // to whole vectors, zeros behind
  const auto* p = (const typename E::T*)row;
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, E::load(p + d, table));
  if (d < dim) store(to + d, load_part<E>(p + d, dim - d, table));
}

// K to panels [key / kPanel][d][key % kPanel]; keys past n are 0. `wide` holds 8 rows.
template <class E>
void pack_keys(const Block& block, int dim, float* to, float* wide, const float* table) {
  const int stride = (dim + kLanes + 7) / 8 * 8;
  for (int j = 0; j < kKeys; j += 8) {
    float* panel = to + int64_t(j / kPanel) * dim * kPanel + j % kPanel;
    if (j >= block.n) {
      for (int d = 0; d < dim; d++)
        for (int i = 0; i < 8; i++) panel[int64_t(d) * kPanel + i] = 0;
      continue;
    }
    for (int i = 0; i < 8; i++) {
      if (j + i < block.n)
        widen<E>(block.k[j + i], dim, wide + i * stride, table);
      else
        std::memset(wide + i * stride, 0, dim * sizeof(float));
    }
    int d = 0;
    for (; d + 8 <= dim; d += 8) transpose(wide + d, stride, panel + int64_t(d) * kPanel, kPanel);
    for (; d < dim; d++)
      for (int i = 0; i < 8; i++) panel[int64_t(d) * kPanel + i] = wide[i * stride + d];
  }
}

// V to panels [d / kPanel][key][d % kPanel]; columns past dim are 0.
template <class E>
void pack_values(const Block& block, int dim, float* to, const float* table) {
  using T = typename E::T;
  for (int j = 0; j < block.n; j++) {
    const T* v = (const T*)block.v[j];
    float* row = to + j * kPanel;
    int d = 0;
    for (; d + kPanel <= dim; d += kPanel, row += kKeys * kPanel)
      store(row, E::load(v + d, table)), store(row + kLanes, E::load(v + d + kLanes, table));
    for (int i = 0; d < dim && i < kPanel; i += kLanes) {
      const int part = dim - d - i;
      store(row + i, part <= 0 ? vf{} : load_part<E>(v + d + i, part < kLanes ? part : kLanes, table));
    }
  }
}

struct Kernels {  // those of one element type of K and V
  decltype(&few_scores<F32>) scores;
  decltype(&few_values<F32>) values;
  decltype(&pack_keys<F32>) keys_to_panels;
  decltype(&pack_values<F32>) values_to_panels;
};

template <class E>
constexpr Kernels kernels_of() {
  return {few_scores<E>, few_values<E>, pack_keys<E>, pack_values<E>};
}

inline const Kernels& kernels(int64_t type) {
  static const Kernels all[] = {kernels_of<F32>(), kernels_of<F16>(), kernels_of<BF16>(), kernels_of<F8>()};
  return all[type];
}

}  // namespace pa
