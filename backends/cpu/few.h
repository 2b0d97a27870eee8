// Few rows (decode, some tokens): K and V are read where they lie, each line once for all rows of a group.
//
// Computes  s[r][j] = q[r] . k[j], then out[r] = out[r] * old[r] + sum over j of p[r][j] v[j], for all heads of a few tokens.
// Ways to read a row: Widened (to float), Halves (bfloat16 or 8-bit to two floats a word: even and odd columns), Pairs (both as bfloat16).
// Order: token by token, and a token's heads one after another, as they lie in memory; what is read now is asked for as far ahead as Stream::next says.
// Cost: bound by reading K and V; R rows need R products of vectors for each vector that is read.
#pragma once

#include <algorithm>

#include "amx.h"

namespace pa {

constexpr int kBunch = 4;
constexpr int kKeysAtOnce = kManyRegisters ? 4 : 2;
constexpr int kSpan = kManyRegisters ? 4 : 2;  // vectors of sums of a row of out
// The cache that memory is asked into, 3 the first, 2 the second. Intel's first waits for few lines at a time (a Xeon with AMX: 3 to 12 % of large decodes).
constexpr int kAskedInto = kTiles ? 2 : 3;

// Keys or values of a block, head 0; `next`: what is read after as many bytes as memory takes to answer.
struct Stream {
  const char* const* row;
  const char* const* next;
};

// N rows of it from j on; the last before `end` stands for those past it.
template <int N>
struct Window {
  const char *row[N], *next[N];
  Window(const Stream& s, int j, int end) {
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      const int at = std::min(j + i, end - 1);
      row[i] = s.row[at], next[i] = s.next[at];
    }
  }
};

// Rows [from, to) of a block for all heads of a tile. A head's keys or values are `bytes` behind those of the one before, and so are `rows` rows of q, s, p and out.
struct Part {
  int from, to, heads, rows;
  int64_t bytes;
};

template <class E>
struct Widened {
  using T = typename E::T;
  using Q = float;
  using K = vf;
  static constexpr int kStep = kLanes, kGather = 1, kWeight = 4;  // elements of a vector of K, rows of V taken at once, bytes of a weight
  static void query(const float* x, int dim, Q* to) { std::memcpy(to, x, size_t(dim) * 4); }
  static K read(const T* p, int n, const float* table) { return n >= kStep ? E::load(p, table) : load_part<E>(p, n, table); }
  static vf dot(vf sum, const Q* q, K k) { return sum + load(q) * k; }

  template <int S>
  static void values(const T* a, int n, const T*, int, const float* table, vf (&v)[S]) {
#pragma GCC unroll 4
    for (int i = 0; i < S; i++) v[i] = n >= (i + 1) * kLanes ? E::load(a + i * kLanes, table) : load_part<E>(a + i * kLanes, n - i * kLanes, table);
  }
  static vf weight(const void* p, int j) { return fill(static_cast<const float*>(p)[j]); }
  static vf add(vf sum, vf p, vf v) { return sum + p * v; }
  static void restore(float*, int64_t) {}
};

template <class E>
struct Halves {
  using T = typename E::T;
  using Q = float;
  using K = vi;
  static constexpr int kStep = kWide, kGather = 1, kWeight = 4;
  static vf even(vi x) { return (vf)(x << 16); }
  static vf odd(vi x) { return (vf)(x & (int32_t)0xffff0000); }
  static void query(const float* x, int dim, Q* to) {
    for (int d = 0; d < dim; d++) to[d / kWide * kWide + d % 2 * kLanes + d % kWide / 2] = x[d];
  }
  static K read(const T* p, int n, const float* table) { return E::words(p, n, table); }
  static vf dot(vf sum, const Q* q, K k) { return sum + load(q) * even(k) + load(q + kLanes) * odd(k); }

  template <int S>
  static void values(const T* a, int n, const T*, int, const float* table, vf (&v)[S]) {
#pragma GCC unroll 4
    for (int i = 0; i < S; i += 2) {
      const vi x = E::words(a + i * kLanes, n - i * kLanes, table);
      v[i] = even(x), v[i + 1] = odd(x);
    }
  }
  static vf weight(const void* p, int j) { return fill(static_cast<const float*>(p)[j]); }
  static vf add(vf sum, vf p, vf v) { return sum + p * v; }
  static void restore(float* x, int64_t n) {
    for (int64_t c = 0; c < n; c += kWide) {
      float t[kWide];
      std::memcpy(t, x + c, sizeof(t));
      for (int i = 0; i < kLanes; i++) x[c + 2 * i] = t[i], x[c + 2 * i + 1] = t[kLanes + i];
    }
  }
};

template <class E>
struct Pairs {
  using T = typename E::T;
  using Q = uint16_t;
  using K = vi;
  static constexpr int kStep = kWide, kGather = 2, kWeight = 2;
  static void query(const float* x, int dim, Q* to) { to_bf16_row(x, dim, to); }
  static K read(const T* p, int n, const float* table) { return E::words(p, n, table); }
  static vf dot(vf sum, const Q* q, K k) { return dot2(sum, load_16(q), k); }

  template <int S>
  static void values(const T* a, int n, const T* b, int n_b, const float* table, vf (&v)[S]) {
#pragma GCC unroll 4
    for (int i = 0; i < S; i += 2) {
      vi lo, hi;
      interleave(E::words(a + i * kLanes, n - i * kLanes, table), E::words(b + i * kLanes, n_b - i * kLanes, table), lo, hi);
      v[i] = (vf)lo, v[i + 1] = (vf)hi;
    }
  }
  static vi weight(const void* p, int j) { return repeat(static_cast<const uint16_t*>(p) + j); }
  static vf add(vf sum, vi p, vf v) { return dot2(sum, p, (vi)v); }
  static void restore(float* x, int64_t n) { pa::restore(x, n); }
};

// s[r * kKeys + i] of R rows and kKeysAtOnce keys.
template <class P, int R>
__attribute__((always_inline)) inline void few_dots(const Window<kKeysAtOnce>& k, int64_t at, const typename P::Q* q, int stride, int dim,
                                                    float* s, const float* table) {
  using T = typename P::T;
  const int whole = dim / P::kStep * P::kStep;
  vf x[kKeysAtOnce * R]{};
  auto step = [&](int d, int n) __attribute__((always_inline)) {
    typename P::K v[kKeysAtOnce];
#pragma GCC unroll 4
    for (int i = 0; i < kKeysAtOnce; i++) {
      __builtin_prefetch(k.next[i] + at + d * int64_t(sizeof(T)), 0, kAskedInto);
      v[i] = P::read(reinterpret_cast<const T*>(k.row[i] + at) + d, n, table);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kKeysAtOnce; i++)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) x[i * R + r] = P::dot(x[i * R + r], q + r * stride + d, v[i]);
  };
  for (int d = 0; d < whole; d += P::kStep) step(d, P::kStep);
  if (whole < dim) step(whole, dim - whole);
  sums<kKeysAtOnce, R>(x, s, kKeys);
}

// s[r * kKeys + j] for all rows of all heads; rows of q are padded with zeros to whole vectors. The last key stands for those past it.
template <class P>
void few_scores(const Stream& keys, const Part& t, const void* queries, int stride, int dim, float* s, const float* table) {
  for (int j = t.from; j < t.to; j += kKeysAtOnce) {
    const Window<kKeysAtOnce> k(keys, j, t.to);
    const auto* q = static_cast<const typename P::Q*>(queries);
    float* to = s + j;
    for (int h = 0; h < t.heads; h++) {
      const int64_t at = h * t.bytes;
      int r = t.rows;
      for (; r >= kBunch; r -= kBunch, q += kBunch * stride, to += kBunch * kKeys) few_dots<P, kBunch>(k, at, q, stride, dim, to, table);
      if (r == 3) few_dots<P, 3>(k, at, q, stride, dim, to, table);
      if (r == 2) few_dots<P, 2>(k, at, q, stride, dim, to, table);
      if (r == 1) few_dots<P, 1>(k, at, q, stride, dim, to, table);
      q += r * stride, to += r * kKeys;
    }
  }
}

// Some columns of N times kGather keys, which stay in registers, times the weights of a head's rows: S vectors, `at` bytes behind v.
// out[r] = out[r] * old[r] + sum over i of w[r][i] v[i]; without kFirst, old is 1. The last key is there only if `even`.
template <class P, int S, int N, bool kFirst>
__attribute__((always_inline)) inline void few_span(const Window<N * P::kGather>& v, int64_t at, int n, bool even, const char* w,
                                                    const float* old, float* out, int rows, int stride, const float* table) {
  using T = typename P::T;
  vf x[N][S];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
#pragma GCC unroll 2
    for (int g = 0; g < P::kGather; g++)
#pragma GCC unroll 4
      for (int line = 0; line < S * kLanes * int(sizeof(T)); line += 64) __builtin_prefetch(v.next[i * P::kGather + g] + at + line, 0, kAskedInto);
    const char *a = v.row[i * P::kGather] + at, *b = v.row[i * P::kGather + P::kGather - 1] + at;
    P::template values<S>(reinterpret_cast<const T*>(a), n, reinterpret_cast<const T*>(b), even ? n : 0, table, x[i]);
  }
  for (int r = 0; r < rows; r++, out += stride, w += kKeys * P::kWeight) {
    vf sum[S];
#pragma GCC unroll 4
    for (int c = 0; c < S; c++) {
      sum[c] = load(out + c * kLanes);
      if (kFirst) sum[c] *= old[r];
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      const auto weight = P::weight(w, i * P::kGather);
#pragma GCC unroll 4
      for (int c = 0; c < S; c++) sum[c] = P::add(sum[c], weight, x[i][c]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < S; c++) store(out + c * kLanes, sum[c]);
  }
}

// All columns of a head; those of out beyond dim stay 0.
template <class P, int N, bool kFirst>
void few_columns(const Window<N * P::kGather>& v, int64_t at, int dim, bool even, const char* w, const float* old, float* out, int rows,
                 int stride, const float* table) {
  constexpr int kLeast = kPanel / kLanes, kBytes = kLanes * int(sizeof(typename P::T));  // 2 vectors
  int d = 0;
  for (; d + kSpan * kLanes <= dim; d += kSpan * kLanes, at += kSpan * kBytes)
    few_span<P, kSpan, N, kFirst>(v, at, kSpan * kLanes, even, w, old, out + d, rows, stride, table);
  for (; d < dim; d += kPanel, at += kLeast * kBytes) few_span<P, kLeast, N, kFirst>(v, at, dim - d, even, w, old, out + d, rows, stride, table);
}

// N times kGather keys from j on, of all heads. `old`: factors of the t.rows rows of each head, null for 1.
template <class P, int N>
void few_keys(const Stream& values, const Part& t, int j, const void* weights, const float* old, float* out, int stride, int dim, const float* table) {
  const bool even = N > 1 || j + P::kGather <= t.to;
  const Window<N * P::kGather> v(values, j, t.to);
  for (int h = 0, r = 0; h < t.heads; h++, r += t.rows) {
    const char* w = static_cast<const char*>(weights) + (r * kKeys + j) * P::kWeight;
    if (old)
      few_columns<P, N, true>(v, h * t.bytes, dim, even, w, old + r, out + r * stride, t.rows, stride, table);
    else
      few_columns<P, N, false>(v, h * t.bytes, dim, even, w, nullptr, out + r * stride, t.rows, stride, table);
  }
}

// weights: rows of kKeys, float, or bfloat16 for Pairs, for which t.from is even.
template <class P>
void few_values(const Stream& values, const Part& t, const void* weights, const float* old, float* out, int stride, int dim, const float* table) {
  constexpr int N = (kManyRegisters ? 16 : 8) / kSpan;
  int j = t.from;
  for (; j + N * P::kGather <= t.to; j += N * P::kGather, old = nullptr) few_keys<P, N>(values, t, j, weights, old, out, stride, dim, table);
  for (; j < t.to; j += P::kGather, old = nullptr) few_keys<P, 1>(values, t, j, weights, old, out, stride, dim, table);
}

}  // namespace pa
