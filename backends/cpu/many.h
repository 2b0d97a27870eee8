// Many rows (prefill): K and V are packed into panels once for a tile of rows, and register tiles run over them.
//
// Computes  s = q K^T and out = out * old + p V for all rows of a tile and one block of keys.
// Layouts: a panel is kPanel columns wide: [key / kPanel][d][key % kPanel] of K, [d / kPanel][key][d % kPanel] of V.
//   With Single a place holds a float; with Double it holds a pair of bfloat16: two d of a key of K, two keys of a d of V.
// Cost: FMAs; packing a block is worth about 15 of its rows' products.
#pragma once

#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "few.h"

namespace pa {

// In the second cache stay a tile's rows with their sums, and a block of keys and values, packed for all of them; in the first the scores of a few rows.
constexpr int64_t kRowBytes = (kLanes == 16 ? 512 : 192) << 10;
constexpr int64_t kBlockBytes = (kLanes == 16 ? 512 : 128) << 10;
constexpr int64_t kScoreBytes = 24 << 10;
constexpr int kManyRows = 576, kManyKeys = 512;  // at most; more keys cost less for each row's maximum, sum and rescaled out
constexpr int kMostAtOnce = int(kScoreBytes / (4 * kKeys) / kRows * kRows);
constexpr int kTileRows = 512;  // with AMX's tiles, whose products take less of the time

// Rows of a block of keys or values.
struct Rows {
  const char* const* row;
  int n;
  const char* operator[](int j) const { return row[j]; }
};

// Single and Double say what a product of two places is; rows of the left factor are whole places.
struct Single {
  static constexpr int kDepth = 1;  // elements of a place
  template <class E>
  using Read = Widened<E>;
  template <class E>
  static void copy(const char* row, int dim, float* to, const float* table) { widen<E>(row, dim, to, table); }
  static vf fma(vf sum, const float* a, vf b) { return sum + *a * b; }
};
struct Double {
  static constexpr int kDepth = 2;
  template <class E>
  using Read = Pairs<E>;
  template <class E>
  static void copy(const char* row, int dim, float* to, const float* table) {  // to whole vectors, zeros behind
    const auto* p = reinterpret_cast<const typename E::T*>(row);
    for (int d = 0; d < dim; d += kWide) store_16(reinterpret_cast<uint16_t*>(to) + d, E::words(p + d, dim - d, table));
  }
  static vf fma(vf sum, const float* a, vf b) { return dot2(sum, repeat(a), (vi)b); }
};

// c[r][0, kPanel) = c * old[r] + sum over i of a[r][i] b[i] for kRows rows; without `old`, c is not read.
template <class D>
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
      const float* f = a + r * a_stride + i;
      x[r] = D::fma(x[r], f, v), y[r] = D::fma(y[r], f, w);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++) store(c + r * c_stride, x[r]), store(c + r * c_stride + kLanes, y[r]);
}

// Words [0, m) of kTurn rows to m rows of kTurn words. A null row is zeros, and so is what lies past `halves` 16-bit elements, which is not read.
#if defined(__AVX512BW__)
constexpr int kTurn = 16;
inline void transpose(const char* const from[kTurn], int halves, float* to, int64_t to_stride, int m) {
  const __mmask32 there = halves >= 32 ? ~0u : (1u << halves) - 1;
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = from[i] ? _mm512_maskz_loadu_epi16(there, from[i]) : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // r[i + c]: 128-bit lane l has word 4 l + c of rows i .. i + 3
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i x = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), y = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    if (c < m) _mm512_storeu_si512(to + c * to_stride, _mm512_shuffle_i32x4(a, b, 0x88));
    if (c + 4 < m) _mm512_storeu_si512(to + (c + 4) * to_stride, _mm512_shuffle_i32x4(x, y, 0x88));
    if (c + 8 < m) _mm512_storeu_si512(to + (c + 8) * to_stride, _mm512_shuffle_i32x4(a, b, 0xdd));
    if (c + 12 < m) _mm512_storeu_si512(to + (c + 12) * to_stride, _mm512_shuffle_i32x4(x, y, 0xdd));
  }
}
#else
constexpr int kTurn = 8;
inline void transpose(const char* const from[kTurn], int halves, float* to, int64_t to_stride, int m) {
#if defined(__AVX2__)
  if (halves >= 16 && m >= 8) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = from[i] ? _mm256_loadu_ps(reinterpret_cast<const float*>(from[i])) : _mm256_setzero_ps();
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
    return;
  }
#endif
  for (int j = 0; j < m; j++)
    for (int i = 0; i < kTurn; i++) {
      float word = 0;
      if (from[i] && 2 * j < halves) std::memcpy(&word, from[i] + 4 * j, 2 * j + 1 < halves ? 4 : 2);
      to[j * to_stride + i] = word;
    }
}
#endif

// Places of a K panel's column: with AMX whole tiles of 16.
template <class D>
constexpr int places(int dim) {
  const int n = (dim + D::kDepth - 1) / D::kDepth;
  return kTiles && D::kDepth == 2 ? (n + 15) / 16 * 16 : n;
}

// K to panels; keys past n, and places past dim, are 0. `wide` holds kTurn rows of up(4 dim, 64) bytes.
template <class E, class D>
void pack_keys(const Rows& block, int dim, float* to, float* wide, const float* table) {
  constexpr bool kAsIs = sizeof(typename E::T) * D::kDepth == 4;  // a row's bytes are places
  const int height = places<D>(dim), stride = (dim + 15) / 16 * 16, halves = 2 * dim / D::kDepth;
  for (int j = 0; j < kKeys; j += kTurn) {
    float* panel = to + int64_t(j / kPanel) * height * kPanel + j % kPanel;
    const char* row[kTurn];
    for (int i = 0; i < kTurn; i++) {
      float* copy = wide + i * stride;
      row[i] = j + i >= block.n ? nullptr : kAsIs ? block[j + i] : reinterpret_cast<const char*>(copy);
      if (!kAsIs && row[i]) D::template copy<E>(block[j + i], dim, copy, table);
    }
    for (int d = 0; d < height; d += kTurn) {
      transpose(row, std::max(halves - 2 * d, 0), panel + int64_t(d) * kPanel, kPanel, std::min(kTurn, height - d));
      for (int i = 0; i < kTurn; i++) row[i] = row[i] ? row[i] + 4 * kTurn : nullptr;
    }
  }
}

// V to panels of `height` places; columns past dim are 0, and so are keys past n up to a whole place (with AMX: 16 places).
template <class E, class D>
void pack_values(const Rows& block, int dim, float* to, int height, const float* table) {
  using T = typename E::T;
  constexpr int kEnd = kTiles && D::kDepth == 2 ? 32 : D::kDepth;
  using Read = typename D::template Read<E>;
  const int end = (block.n + kEnd - 1) / kEnd * kEnd;
  for (int j = 0; j < end; j += D::kDepth) {
    float* row = to + j / D::kDepth * kPanel;
    const T* a = j < block.n ? (const T*)block[j] : nullptr;
    const bool whole = j + D::kDepth <= block.n;
    const T* b = whole ? (const T*)block[j + D::kDepth - 1] : a;
    for (int d = 0; d < dim; d += kPanel, row += height * kPanel) {
      vf v[2]{};
      if (whole && dim - d >= kPanel)
        Read::template values<2>(a + d, kPanel, b + d, kPanel, table, v);
      else if (a)
        Read::template values<2>(a + d, dim - d, b + d, whole ? dim - d : 0, table, v);
      store(row, v[0]), store(row + kLanes, v[1]);
    }
  }
}

}  // namespace pa
