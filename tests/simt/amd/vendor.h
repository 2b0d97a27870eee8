// An AMD device on the host: what csrc_hip/vendor.h gives to csrc_hip/warp.h and csrc_hip/mma.h, by simt.h. SIMT_GFX is
// 9 (waves of 64, MFMA), 11 or 12 (waves of 32, WMMA). Nothing here is read from csrc_hip: lane moves are written from
// the instructions' descriptions, matrix layouts from the output of AMD's Matrix Instruction Calculator.
#pragma once

#include "../vendor.h"

namespace portattn {

constexpr int kWaveLanes = SIMT_WAVE;
static_assert(kWaveLanes == (SIMT_GFX == 9 ? 64 : 32), "gfx9 has waves of 64 lanes, the others of 32");

inline void schedule_fence() {}
template <class P>
struct Params {
  const P& p;
  const P& anew() const { return p; }
};
template <class P>
inline Params<P> params_of(const P& p) { return {p}; }
template <class T>
inline u32 pack2_exact(float lo, float hi) { return pack2<T>(lo, hi); }
template <class T>
inline u32 pack2_numbers(float lo, float hi) { return pack2<T>(std::isnan(lo) ? 0.0f : lo, std::isnan(hi) ? 0.0f : hi); }
inline u32 times_pair(u32 two, u16 factor) {
  auto one = [&](u32 x) { return static_cast<u32>(from_float<f16>(to_float(f16{static_cast<u16>(x)}) * to_float(f16{factor})).bits); };
  return one(two) | one(two >> 16) << 16;
}
constexpr bool kConvertsFnuz = false, kConvertsOcp = false;  // tests/isa runs the instructions
template <int kMantissa, bool kHigh>
inline void convert_two(u32, float (&)[2]) {}
inline int thread_kept() { return thread_x(); }
inline simt::Group& simt_wave() { return simt::block()->waves[thread_x() / kWaveLanes]; }
inline void wave_fence(SIMT_HERE) { simt::meet(simt_wave(), here); }
inline void warp_fence(SIMT_HERE) { simt::meet(simt::block()->warps[thread_x() / 32], here); }

// ds_bpermute_b32. The other logical warp of a wave may be elsewhere: reading its lanes is an error.
inline u32 lane_of_wave(u32 x, int from, SIMT_HERE) {
  if (from < 0 || from >= kWaveLanes || from / 32 != thread_x() % kWaveLanes / 32) simt::fail("a shuffle leaves its 32 lanes, at " + simt::text(here));
  return simt::exchange(simt::block()->warps[thread_x() / 32], thread_x() % 32, x, here)(from % 32);
}
template <int kMask>
inline u32 lane_xor(u32 x, SIMT_HERE) {
  static_assert(kMask >= 0 && kMask < 32, "a logical warp has 32 lanes");
  return simt::exchange(simt::block()->warps[thread_x() / 32], thread_x() % 32, x, here)(thread_x() % 32 ^ kMask);
}
inline u32 lane_xor_32(u32 x, SIMT_HERE) { return simt::exchange(simt_wave(), thread_x() % kWaveLanes, x, here)(thread_x() % kWaveLanes ^ 32); }
inline u32 half_ballot(bool b, SIMT_HERE) {
  auto of = simt::exchange(simt::block()->warps[thread_x() / 32], thread_x() % 32, b, here);
  u32 bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<u32>(of(i)) << i;
  return bits;
}
inline bool any_of_wave(bool b, SIMT_HERE) {
  auto of = simt::exchange(simt_wave(), thread_x() % kWaveLanes, b, here);
  bool found = false;
  for (int i = 0; i < kWaveLanes; ++i) found |= of(i);
  return found;
}

// ---- matrix instructions

enum MatrixLayout { kMfma, kWmmaGfx11, kWmmaGfx12 };
constexpr MatrixLayout kMatrixLayout = SIMT_GFX == 9 ? kMfma : SIMT_GFX == 11 ? kWmmaGfx11 : kWmmaGfx12;
constexpr int kMatrixIn = SIMT_GFX == 9 ? 2 : SIMT_GFX == 11 ? 8 : 4;
constexpr int kMatrixOut = SIMT_GFX == 9 ? 4 : 8;
template <int kWords>
struct Words { u32 r[kWords]; };
using MatrixOperand = Words<kMatrixIn>;

// Where an element stands. All these layouts are linear: the place of (lane, element) is the exclusive or of the places
// of the bits that are set in them. v_mfma_f32_16x16x16_{f16,bf16} of CDNA 2 and 3; v_wmma_f32_16x16x16_{f16,bf16} of
// RDNA 3 and 4 in waves of 32. `across` is A's row and B's column; `k` the other index; for D: `row` and `across`.
struct MatrixPlace { int across, k; };
struct PlacesOf {
  MatrixPlace lane[6], element[4];
  MatrixPlace of(int l, int e) const {
    MatrixPlace p = {0, 0};
    for (int b = 0; b < 6; ++b)
      if (l >> b & 1) p = {p.across ^ lane[b].across, p.k ^ lane[b].k};
    for (int b = 0; b < 4; ++b)
      if (e >> b & 1) p = {p.across ^ element[b].across, p.k ^ element[b].k};
    return p;
  }
};
#if SIMT_GFX == 9
constexpr PlacesOf kOperandPlaces = {{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {0, 4}, {0, 8}}, {{0, 1}, {0, 2}, {0, 0}, {0, 0}}};
constexpr PlacesOf kResultPlaces = {{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {0, 4}, {0, 8}}, {{0, 1}, {0, 2}, {0, 0}, {0, 0}}};
#elif SIMT_GFX == 11
constexpr PlacesOf kOperandPlaces = {{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {0, 0}, {0, 0}}, {{0, 1}, {0, 2}, {0, 4}, {0, 8}}};
constexpr PlacesOf kResultPlaces = {{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {0, 1}, {0, 0}}, {{0, 2}, {0, 4}, {0, 8}, {0, 0}}};
#else
constexpr PlacesOf kOperandPlaces = {{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {0, 4}, {0, 0}}, {{0, 1}, {0, 2}, {0, 8}, {0, 0}}};
constexpr PlacesOf kResultPlaces = {{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {0, 8}, {0, 0}}, {{0, 1}, {0, 2}, {0, 4}, {0, 0}}};
#endif
// v_mfma_f32_32x32x8_{f16,bf16} of CDNA 2 and 3.
constexpr PlacesOf kLargeOperandPlaces = {{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {16, 0}, {0, 4}}, {{0, 1}, {0, 2}, {0, 0}, {0, 0}}};
constexpr PlacesOf kLargeResultPlaces = {{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {16, 0}, {0, 4}}, {{0, 1}, {0, 2}, {0, 8}, {0, 16}}};

// D (kSide x kSide) += A (kSide x kDepth) B (kDepth x kSide), whose operands are kWords registers.
template <class T, int kSide, int kDepth, int kWords, int kOut>
inline void multiply_by_places(float (&c)[kOut], const Words<kWords>& a, const Words<kWords>& b, const PlacesOf& operands, const PlacesOf& results, simt::Place here) {
  struct Operands { Words<kWords> a, b; };
  auto given = simt::exchange(simt_wave(), thread_x() % kWaveLanes, Operands{a, b}, here);
  u16 rows[kSide][kDepth], columns[kSide][kDepth];
  bool known[kSide][kDepth] = {};
  for (int l = 0; l < kWaveLanes; ++l) {
    const Operands o = given(l);
    for (int e = 0; e < 2 * kWords; ++e) {
      const MatrixPlace p = operands.of(l, e);
      const u16 x = static_cast<u16>(o.a.r[e / 2] >> 16 * (e % 2)), y = static_cast<u16>(o.b.r[e / 2] >> 16 * (e % 2));
      if (known[p.across][p.k] && (rows[p.across][p.k] != x || columns[p.across][p.k] != y))
        simt::fail("lanes that must hold the same element do not, at " + simt::text(here));
      known[p.across][p.k] = true;
      rows[p.across][p.k] = x;
      columns[p.across][p.k] = y;
    }
  }
  for (int e = 0; e < kOut; ++e) {
    const MatrixPlace p = results.of(thread_x() % kWaveLanes, e);
    for (int k = 0; k < kDepth; ++k) c[e] += to_float(T{rows[p.k][k]}) * to_float(T{columns[p.across][k]});
  }
}
template <class T>
inline void multiply_matrices(float (&c)[kMatrixOut], const MatrixOperand& a, const MatrixOperand& b, SIMT_HERE) {
  multiply_by_places<T, 16, 16>(c, a, b, kOperandPlaces, kResultPlaces, here);
}

template <int kCount>
inline void keep_as_result(float (&)[kCount]) {}

constexpr int kLargeIn = 4, kLargeOut = 16;
using LargeOperand = Words<kLargeIn>;
template <class T>
inline void multiply_large_matrices(float (&c)[kLargeOut], const LargeOperand& a, const LargeOperand& b, SIMT_HERE) {
  for (int i = 0; i < 2; ++i)  // an instruction each: registers 0 and 1, then 2 and 3
    multiply_by_places<T, 32, 8>(c, Words<2>{{a.r[2 * i], a.r[2 * i + 1]}}, Words<2>{{b.r[2 * i], b.r[2 * i + 1]}}, kLargeOperandPlaces, kLargeResultPlaces, here);
}

constexpr bool kMatrixTwice = false;  // gfx950 alone; tests/isa runs its instruction
template <class T>
inline void multiply_matrices_twice(float (&)[kMatrixOut], const MatrixOperand&, const MatrixOperand&, const MatrixOperand&, const MatrixOperand&) {}

}  // namespace portattn
