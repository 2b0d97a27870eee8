// Many rows (prefill): K and V are packed into panels once for a tile of rows, and register tiles run over them.
//
// Computes  s = q K^T and out = out * old + p V for all rows of a tile and one block of keys.
// Layouts: a panel is kPanel columns wide: [key / kPanel][d][key % kPanel] of K, [d / kPanel][key][d % kPanel] of V.
//   With Single a place holds a float; with Double (bfloat16) it holds a pair: two d of a key of K, two keys of a d of V.
// Cost: FMAs; packing a block is worth about 15 of its rows' products.
#pragma once

#include <type_traits>

#include "amx.h"
#include "few.h"

namespace pa {

constexpr int kTileRows = kTiles ? 256 : kLanes == 16 ? 192 : 96;  // rows that a block is packed for; the faster the products, the more

// Single and Double say what a product of two places is; rows of the left factor are whole places.
struct Single {
  static constexpr int kDepth = 1;  // elements of a place
  static vf fma(vf sum, const float* a, vf b) { return sum + *a * b; }
};
struct Double {
  static constexpr int kDepth = 2;
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

inline void transpose(const float* const from[8], float* to, int64_t to_stride) {  // 8 x 8 words
#if defined(__AVX2__)
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(from[i]);
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
  for (int j = 0; j < 8; j++)
    for (int i = 0; i < 8; i++) std::memcpy(to + j * to_stride + i, reinterpret_cast<const char*>(from[i]) + 4 * j, 4);
#endif
}

// Places of a K panel's column: with AMX whole tiles of 16.
template <class D>
constexpr int places(int dim) {
  const int n = (dim + D::kDepth - 1) / D::kDepth;
  return kTiles && D::kDepth == 2 ? (n + 15) / 16 * 16 : n;
}

// K to panels; keys past n, and places past dim, are 0. `wide` holds 8 rows of up(4 dim, 64) bytes.
template <class E, class D>
void pack_keys(const Rows& block, int dim, float* to, float* wide, const float* table) {
  constexpr bool kAsIs = sizeof(typename E::T) * D::kDepth == 4;  // a row's bytes are places
  const int height = places<D>(dim), whole = dim / D::kDepth / 8 * 8, stride = (dim + 15) / 16 * 16;
  for (int j = 0; j < kKeys; j += 8) {
    float* panel = to + int64_t(j / kPanel) * height * kPanel + j % kPanel;
    const float* row[8];
    const bool full = kAsIs && j + 8 <= block.n;
    for (int i = 0; i < 8; i++) {
      float* copy = wide + i * stride;
      row[i] = full ? reinterpret_cast<const float*>(block[j + i]) : copy;
      if (j >= block.n || full) continue;
      if (j + i >= block.n)
        std::memset(copy, 0, size_t(stride) * 4);
      else if (kAsIs)
        std::memcpy(copy, block[j + i], size_t(dim) * sizeof(typename E::T));
      else
        widen<E>(block[j + i], dim, copy, table);
    }
    int d = 0;
    if (j < block.n) {
      for (; d < whole; d += 8) {
        const float* at[8];
        for (int i = 0; i < 8; i++) at[i] = reinterpret_cast<const float*>(reinterpret_cast<const char*>(row[i]) + 4 * d);
        transpose(at, panel + int64_t(d) * kPanel, kPanel);
      }
      for (; d * D::kDepth < dim; d++)
        for (int i = 0; i < 8; i++) {
          float place = 0;
          std::memcpy(&place, reinterpret_cast<const char*>(row[i]) + 4 * d, dim - d * D::kDepth < D::kDepth ? 2 : 4);
          std::memcpy(panel + int64_t(d) * kPanel + i, &place, 4);
        }
    }
    for (; d < height; d++) std::memset(panel + int64_t(d) * kPanel, 0, 32);
  }
}

// V to panels; columns past dim are 0, and so are keys past n up to a whole place (with AMX: 16 places).
template <class E, class D>
void pack_values(const Rows& block, int dim, float* to, const float* table) {
  using T = typename E::T;
  constexpr int kEnd = kTiles && D::kDepth == 2 ? 32 : D::kDepth, kHeight = kKeys / D::kDepth;
  using P = std::conditional_t<D::kDepth == 2, Pairs, Widened<E>>;
  const int end = (block.n + kEnd - 1) / kEnd * kEnd;
  for (int j = 0; j < end; j += D::kDepth) {
    float* row = to + j / D::kDepth * kPanel;
    const T* a = j < block.n ? (const T*)block[j] : nullptr;
    const T* b = D::kDepth == 2 && j + 1 < block.n ? (const T*)block[j + 1] : nullptr;
    for (int d = 0; d < dim; d += kPanel, row += kHeight * kPanel) {
      vf v[2]{};
      if (a && dim - d >= kPanel)
        P::template values<2>((const typename P::T*)a + d, b ? (const typename P::T*)b + d : nullptr, kPanel, table, v);
      else if (a)
        P::template values<2>((const typename P::T*)a + d, b ? (const typename P::T*)b + d : nullptr, dim - d, table, v);
      store(row, v[0]), store(row + kLanes, v[1]);
    }
  }
}

}  // namespace pa
