// Few rows (decode): K and V are read where they lie, each line once for up to kBunch rows of a group.
//
// Computes  s[r][j] = q[r] . k[j], then out[r] = out[r] * old[r] + sum over j of p[r][j] v[j].
// Ways to read a row: Widened (to float), Halves (bfloat16 or 8-bit to two floats a word: even and odd columns), Pairs (both as bfloat16).
// Cost: bound by reading K and V; R rows need R products of vectors for each vector that is read.
#pragma once

#include "pairs.h"

namespace pa {

constexpr int kBunch = 4;
constexpr int kKeysAtOnce = kManyRegisters ? 4 : 2;
constexpr int kSpan = kManyRegisters ? 4 : 2;  // vectors of sums of a row of out

// Rows of a block of keys or values: `at` bytes behind each pointer.
struct Rows {
  const char* const* row;
  int64_t at;
  int n;
  const char* operator[](int j) const { return row[j] + at; }
};

// Asks for the next block's memory line by line, in its order: the rows of all heads of a token, then those of the next token.
struct Ahead {
  const char* const* row;
  int n;          // rows
  int64_t bytes;  // of a row
  int j = 0;
  int64_t at = 0;

  __attribute__((always_inline)) void ask(int64_t lines) {
    for (; lines > 0 && j < n; lines--) {
      __builtin_prefetch(row[j] + at, 0, 2);  // to the second cache: a block of several heads is more than the first holds
      if ((at += 64) >= bytes) at = 0, j++;
    }
  }
};

template <class E>
struct Widened {
  using T = typename E::T;
  using Q = float;
  using K = vf;
  static constexpr int kStep = kLanes, kGather = 1;  // elements of a vector of K, rows of V taken at once
  static void query(const float* x, int dim, Q* to) { std::memcpy(to, x, size_t(dim) * 4); }
  static K read(const T* p, int n, const float* table) { return n >= kStep ? E::load(p, table) : load_part<E>(p, n, table); }
  static vf dot(vf sum, const Q* q, K k) { return sum + load(q) * k; }

  template <int S>
  static void values(const T* a, const T*, int n, const float* table, vf (&v)[S]) {
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
  static constexpr int kStep = kWide, kGather = 1;
  static vf even(vi x) { return (vf)(x << 16); }
  static vf odd(vi x) { return (vf)(x & (int32_t)0xffff0000); }
  static void query(const float* x, int dim, Q* to) {
    for (int d = 0; d < dim; d++) to[d / kWide * kWide + d % 2 * kLanes + d % kWide / 2] = x[d];
  }
  static K read(const T* p, int n, const float* table) { return E::words(p, n, table); }
  static vf dot(vf sum, const Q* q, K k) { return sum + load(q) * even(k) + load(q + kLanes) * odd(k); }

  template <int S>
  static void values(const T* a, const T*, int n, const float* table, vf (&v)[S]) {
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
  static constexpr int kStep = kWide, kGather = 2;
  static void query(const float* x, int dim, Q* to) { to_bf16_row(x, dim, to); }
  static K read(const T* p, int n, const float* table) { return E::words(p, n, table); }
  static vf dot(vf sum, const Q* q, K k) { return dot2(sum, load_16(q), k); }

  template <int S>
  static void values(const T* a, const T* b, int n, const float* table, vf (&v)[S]) {  // b null: zeros
#pragma GCC unroll 4
    for (int i = 0; i < S; i += 2) {
      vi lo, hi;
      interleave(E::words(a + i * kLanes, n - i * kLanes, table), b ? E::words(b + i * kLanes, n - i * kLanes, table) : vi{}, lo, hi);
      v[i] = (vf)lo, v[i + 1] = (vf)hi;
    }
  }
  static vi weight(const void* p, int j) { return repeat(static_cast<const uint16_t*>(p) + j); }
  static vf add(vf sum, vi p, vf v) { return dot2(sum, p, (vi)v); }
  static void restore(float* x, int64_t n) { pa::restore(x, n); }
};

// s[r * kKeys + j] for R rows; q is padded with zeros to whole vectors.
template <class P, int R>
void few_scores(const Rows& now, Ahead& ahead, const void* rows, int stride, int dim, float* s, const float* table) {
  using T = typename P::T;
  const auto* q = static_cast<const typename P::Q*>(rows);
  const int whole = dim / P::kStep * P::kStep, lines = (dim * int(sizeof(T)) + 63) / 64;
  for (int j = 0; j < now.n; j += kKeysAtOnce) {
    const T* k[kKeysAtOnce];
    for (int i = 0; i < kKeysAtOnce; i++) k[i] = reinterpret_cast<const T*>(now[j + i < now.n ? j + i : now.n - 1]);
    ahead.ask(kKeysAtOnce * lines);
    vf x[kKeysAtOnce * R]{};
    auto step = [&](int d, int n) {
      typename P::K v[kKeysAtOnce];
#pragma GCC unroll 4
      for (int i = 0; i < kKeysAtOnce; i++) v[i] = P::read(k[i] + d, n, table);
#pragma GCC unroll 4
      for (int i = 0; i < kKeysAtOnce; i++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) x[i * R + r] = P::dot(x[i * R + r], q + r * stride + d, v[i]);
    };
    for (int d = 0; d < whole; d += P::kStep) step(d, P::kStep);
    if (whole < dim) step(whole, dim - whole);
    sums<kKeysAtOnce, R>(x, s + j, kKeys);
  }
}

// Columns [d, d + S vectors) of out for R rows and keys [from, to); lines: how many to ask for with each key.
template <class P, int R, int S>
inline void few_span(const Rows& now, Ahead& ahead, int from, int to, const void* p, const float* old, float* out, int stride, int d,
                     int dim, int64_t lines, const float* table) {
  using T = typename P::T;
  vf x[R][S];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < S; i++) x[r][i] = load(out + r * stride + d + i * kLanes) * old[r];
  auto step = [&](int j, int n) {
    vf v[S];
    P::template values<S>(reinterpret_cast<const T*>(now[j]) + d, P::kGather > 1 && j + 1 < to ? reinterpret_cast<const T*>(now[j + 1]) + d : nullptr,
                          n, table, v);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const auto w = P::weight(p, r * kKeys + j);
#pragma GCC unroll 4
      for (int i = 0; i < S; i++) x[r][i] = P::add(x[r][i], w, v[i]);
    }
  };
  const bool whole = dim - d >= S * kLanes;
  for (int j = from; j < to; j += P::kGather) {
    ahead.ask(P::kGather * lines);
    if (whole)
      step(j, S * kLanes);
    else
      step(j, dim - d);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < S; i++) store(out + r * stride + d + i * kLanes, x[r][i]);
}

// p: R x kKeys, float, or bfloat16 for Pairs; columns of out beyond dim, to whole panels, are 0.
template <class P, int R>
void few_values(const Rows& now, Ahead& ahead, int from, int to, const void* p, const float* old, float* out, int stride, int dim,
                const float* table) {
  constexpr int kLeast = kPanel / kLanes;  // 2
  from -= from % P::kGather;
  const int64_t lines = (dim * int64_t(sizeof(typename P::T)) + 63) / 64;
  int d = 0;
  for (; d + kSpan * kLanes <= stride; d += kSpan * kLanes) few_span<P, R, kSpan>(now, ahead, from, to, p, old, out, stride, d, dim, d ? 0 : lines, table);
  for (; d < stride; d += kPanel) few_span<P, R, kLeast>(now, ahead, from, to, p, old, out, stride, d, dim, d ? 0 : lines, table);
}

}  // namespace pa
