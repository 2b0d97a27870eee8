// Matrix tiles on AMD: MFMA on gfx90a, gfx942 and gfx950, WMMA on gfx11 and gfx12. The interface is csrc_cuda/mma.h's.
//
// Layouts (AMD's CDNA 2/3 and RDNA 3/4 instruction set documents), l = lane of the wave, h = l / 16, of 32 x 32 h = l / 32:
//              hardware's A: row l % 16, k =        hardware's B: column l % 16      D: column l % 16, row =
//   MFMA       4h + i, i < 4 (64 lanes)             the same k                       4h + i, i < 4
//   gfx11      i, i < 16, lanes l and l ^ 16 alike  the same k                       2i + h, i < 8
//   gfx12      8 values a lane, h gives which       the same k                       8h + i, i < 8
//   32x32x8    row l % 32, 4h + i, i < 4            column l % 32, the same k        column l % 32, 8 (i / 4) + 4h + i % 4, i < 16
//   32x32x16   row l % 32, 8h + i, i < 8 (gfx950)   column l % 32, the same k        as 32x32x8
// The order of k is free as long as A and B agree: the sum over k does not see it. On gfx12 it is taken as 8h + i, with 32 x 32
// as 8 (i / 4) + 4h + i % 4, i < 8, for both depths.
//
// Everything is computed transposed: C^T = B^T A^T, so our B is the hardware's A and our A its B. A lane then sees one
// row of C, its maximum is one step or two away, a C becomes an A without leaving its lane (on gfx11 with one swap of
// neighbouring rows, k in the order 0, 2, .. 14, 1, 3, .. 15), and it stores its columns side by side.
//
// Two sizes: 16 rows for decode, whose tiles have no more, and with MFMA 32 for prefill. A multiplication takes the same time in both
// (AMD's Matrix Instruction Calculator: 16x16x16 is 32 clocks on gfx90a and 16 on gfx942, 32x32x8 is twice that for twice the
// multiplications); 32 rows take half the instructions, each of which reads its operands' registers once, and half of the softmax's steps
// between lanes. From shared memory both read a key once for 32 rows: two tiles of 16 rows share what they read.
//
// Shared memory: rows are padded by 16 bytes and start 4 banks apart (of 32, and kD a multiple of 64). MFMA reads 8 bytes a lane,
// sixteen rows beside each other: rows 8 apart would meet in a bank, so in the upper eight the halves of 16 bytes change places.
// WMMA reads 16 bytes a lane, eight rows beside each other. load_b_cols reads 16-bit elements, 16 beside each other: pairs share a
// word, and the rows of a wave's lane groups lie in different banks.
#pragma once

#include "fp8.h"
#include <warp.h>  // in angle brackets: tests/simt compiles this file with its own vendor.h in front

namespace portattn {

// Where column d of key or value r stands in its row.
PA_DEVICE constexpr int place_in_row(int r, int d) { return kMatrixLayout == kMfma ? d ^ (r >> 1 & 4) : d; }
// Eight columns beside each other, `d` the first of them a multiple of 8; `upper`: of a row 8 .. 15 of sixteen.
template <class T>
PA_DEVICE void store_eight(T* to, bool upper, const Bytes16& x) {
  const bool swap = kMatrixLayout == kMfma && upper;
  const u32 a = x.x[0], b = x.x[1], c = x.x[2], d = x.x[3];  // choices between values: an address that is chosen would keep x in memory
  *reinterpret_cast<Bytes16*>(to) = {{swap ? c : a, swap ? d : b, swap ? a : c, swap ? b : d}};
}

// A wave's matrix tiles of kRows rows and columns: 16, or with MFMA 32, where a lane sees twice as many columns of a row and the
// hardware reads its operands half as often. A FragA or FragB is 16 deep in both.
template <int kRows>
struct MatrixTiles {
  static constexpr bool kLarge = kRows == 32;
  static_assert(kRows == 16 || (kLarge && kMatrixLayout == kMfma), "the tiles that instructions compute");
  static constexpr int kSide = kRows, kIn = kLarge ? kLargeIn : kMatrixIn, kAcc = kLarge ? kLargeOut : kMatrixOut, kSlots = 1;

  struct Acc { float x[kAcc]; };
  using FragA = Words<kIn>;
  using FragB = Words<kIn>;

  static PA_DEVICE constexpr int slot_of(int) { return 0; }
  static PA_DEVICE int row(int) { return warp::wave_lane() & (kSide - 1); }
  static PA_DEVICE int group() { return warp::wave_lane() / kSide; }
  static PA_DEVICE int col(int e) {
    if constexpr (kLarge) return e / 4 * 8 + 4 * group() + e % 4;
    else return kMatrixLayout == kWmmaGfx11 ? 2 * e + group() : kAcc * group() + e;
  }

  // A lane's elements of one row of memory: the first from column `d` on, each further part 8 columns on.
  template <class T>
  static PA_DEVICE Words<kIn> load_row(const T* tile, int pitch, int d) {
    constexpr int kWords = kMatrixLayout == kMfma ? 2 : 4;
    struct alignas(4 * kWords) Part { u32 x[kWords]; };
    const T* from = tile + row(0) * pitch + d;
    Words<kIn> f;
#pragma unroll
    for (int i = 0; i < kIn / kWords; ++i) {
      const Part part = *reinterpret_cast<const Part*>(from + 8 * i);
#pragma unroll
      for (int j = 0; j < kWords; ++j) f.r[i * kWords + j] = part.x[j];
    }
    return f;
  }
  static PA_DEVICE int first_column() { return kMatrixLayout == kMfma ? 4 * group() : kMatrixLayout == kWmmaGfx12 ? 8 * group() : 0; }
  template <class T>
  static PA_DEVICE void load_a(FragA& a, const T* tile, int pitch) { a = load_row(tile, pitch, first_column()); }
  template <class T>
  static PA_DEVICE void load_b_rows(FragB& b, const T* tile, int pitch) { b = load_row(tile, pitch, place_in_row(row(0), first_column())); }
  template <class T>
  static PA_DEVICE void load_b_cols(FragB& b, const T* tile, int pitch) {
    static_assert(!kLarge, "larger tiles read turned memory");
    const int first = first_column();  // key
    const T* from = tile + place_in_row(first, row(0)) + first * pitch;
    auto key = [](int i) { return kMatrixLayout == kWmmaGfx11 ? 2 * (i % 8) + i / 8 : i; };
#pragma unroll
    for (int i = 0; i < kIn; ++i)
      b.r[i] = from[key(2 * i) * pitch].bits | static_cast<u32>(from[key(2 * i + 1) * pitch].bits) << 16;
  }

  template <class T>
  static PA_DEVICE void multiply(Acc& c, const FragA& a, const FragB& b) {
    if constexpr (kLarge) multiply_large_matrices<T>(c.x, b, a);
    else multiply_matrices<T>(c.x, b, a);
  }
  // c += a0 b0 + a1 b1: one instruction of twice the depth on gfx950. What is k of which element does not matter to it.
  template <class T>
  static PA_DEVICE void multiply_twice(Acc& c, const FragA& a0, const FragA& a1, const FragB& b0, const FragB& b1) {
    if constexpr (kMatrixTwice && !kLarge) {
      multiply_matrices_twice<T>(c.x, b0, b1, a0, a1);
    } else {
      multiply<T>(c, a0, b0);
      multiply<T>(c, a1, b1);
    }
  }

  // Turned memory holds B's columns as rows, k in to_a's order: load_b_turned reads it for what to_a made. The pad leaves no bank
  // conflict to these reads: 8 bytes a lane by MFMA, 16 by WMMA.
  template <class T>
  static PA_DEVICE void load_b_turned(FragB& b, const T* tile, int pitch) { b = load_row(tile, pitch, first_column()); }
  static constexpr int kTurnedPad = kMatrixLayout == kMfma ? 4 : 8;
  // Where a key stands in a row of it.
  static PA_DEVICE constexpr int turned_place(int key) {
    return kMatrixLayout == kWmmaGfx11 ? (key & ~15) + (key & 1) * 8 + (key & 15) / 2 : key;  // 0, 2, .. 14, then 1, 3, .. 15 of every sixteen
  }
  // Four keys' rows of eight elements into rows 0 .. 7 of a turned tile; `key` is a multiple of 4.
  template <class T, class Row>
  static PA_DEVICE void store_turned(T* tile, int pitch, int key, const Row (&rows)[4]) {
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      const int shift = 16 * (d & 1);
      auto pair = [&](int a, int b) { return (rows[a].x[d / 2] >> shift & 0xffff) | rows[b].x[d / 2] >> shift << 16; };
      T* to = tile + d * pitch;
      if constexpr (kMatrixLayout == kWmmaGfx11) {
        *reinterpret_cast<u32*>(to + turned_place(key)) = pair(0, 2);
        *reinterpret_cast<u32*>(to + turned_place(key + 1)) = pair(1, 3);
      } else {
        *reinterpret_cast<Bytes8*>(to + key) = {{pair(0, 1), pair(2, 3)}};
      }
    }
  }

  // Of C's columns 16 `part` .. 16 `part` + 15. A NaN may become any number: whoever adds up probabilities has it in the sum.
  template <class T>
  static PA_DEVICE FragA to_a(const Acc& c, int part = 0) {
    constexpr int kPairs = kAcc * 8 / kSide;
    FragA a;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) a.r[i] = pack2_numbers<T>(c.x[2 * (part * kPairs + i)], c.x[2 * (part * kPairs + i) + 1]);
    if constexpr (kMatrixLayout == kWmmaGfx11) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 mine = a.r[i], other = lane_xor<16>(mine);
        a.r[i] = group() ? other : mine;
        a.r[i + 4] = group() ? mine : other;
      }
    }
    return a;
  }

  // A lane's elements of its row, to the row's kSide floats.
  static PA_DEVICE void store_row(const Acc& c, int, float* to) {
    if constexpr (kMatrixLayout == kWmmaGfx11) {
#pragma unroll
      for (int e = 0; e < kAcc; ++e) to[col(e)] = c.x[e];
    } else {
#pragma unroll
      for (int e = 0; e < kAcc; e += 4) *reinterpret_cast<Float4*>(to + col(e)) = {{c.x[e], c.x[e + 1], c.x[e + 2], c.x[e + 3]}};
    }
  }

  // The same in 16 bits, times a factor.
  template <class T>
  static PA_DEVICE void store_row(const Acc& c, int, float factor, T* to) {
    if constexpr (kMatrixLayout == kWmmaGfx11) {
#pragma unroll
      for (int e = 0; e < kAcc; ++e) to[col(e)] = from_float<T>(c.x[e] * factor);
    } else {
#pragma unroll
      for (int e = 0; e < kAcc; e += 4)
        *reinterpret_cast<Bytes8*>(to + col(e)) = {{pack2<T>(c.x[e] * factor, c.x[e + 1] * factor), pack2<T>(c.x[e + 2] * factor, c.x[e + 3] * factor)}};
    }
  }

  // Multiplied where it stands: MFMA's results are kept where the other instructions do not reach them, and without the two words the
  // compiler copies all of them on every way to this place.
  static PA_DEVICE void scale(Acc& c, const float (&factor)[kSlots]) {
    keep_as_result(c.x);
#pragma unroll
    for (int e = 0; e < kAcc; ++e) c.x[e] *= factor[0];
    keep_as_result(c.x);
  }

  static PA_DEVICE void row_max(float (&x)[kSlots]) {
    if constexpr (!kLarge) x[0] = max_of(x[0], warp::wave_xor_16(x[0]));
    if constexpr (warp::kWave == 64) x[0] = max_of(x[0], warp::wave_xor_32(x[0]));
  }
  static PA_DEVICE void row_sum(float (&x)[kSlots]) {
    if constexpr (!kLarge) x[0] += warp::wave_xor_16(x[0]);
    if constexpr (warp::kWave == 64) x[0] += warp::wave_xor_32(x[0]);
  }
};

using mma = MatrixTiles<16>;

}  // namespace portattn
