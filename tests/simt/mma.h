// mma.h on the host. At wave 32 it is CUDA's own file over emulated ldmatrix and mma.sync; at wave 64 it is the layout
// of AMD's v_mfma_f32_16x16x16 (CDNA ISA: A lane l holds row l % 16, k = 4 (l / 16) + i; B likewise by column; C column
// l % 16, row 4 (l / 16) + i), so that the kernels are seen to assume neither.
#pragma once

#include "warp.h"

#if SIMT_WAVE == 32
#include "../../csrc_cuda/mma.h"
#else

namespace portattn {
namespace mma {

constexpr int kAcc = 4;
constexpr int kSlots = 4;

struct Acc { float x[kAcc]; };
struct FragA { u16 x[4]; };
struct FragB { u16 x[4]; };

constexpr int slot_of(int e) { return e; }
inline int row(int slot) { return 4 * (warp::wave_lane() / 16) + slot; }
inline int col(int) { return warp::wave_lane() % 16; }

template <class T>
inline void load_a(FragA& a, const T* tile, int pitch) {
  for (int i = 0; i < 4; ++i) a.x[i] = tile[warp::wave_lane() % 16 * pitch + 4 * (warp::wave_lane() / 16) + i].bits;
}
template <class T>
inline void load_b_rows(FragB& b, const T* tile, int pitch) {
  for (int i = 0; i < 4; ++i) b.x[i] = tile[warp::wave_lane() % 16 * pitch + 4 * (warp::wave_lane() / 16) + i].bits;
}
template <class T>
inline void load_b_cols(FragB& b, const T* tile, int pitch) {
  for (int i = 0; i < 4; ++i) b.x[i] = tile[(4 * (warp::wave_lane() / 16) + i) * pitch + warp::wave_lane() % 16].bits;
}

template <class T>
inline void multiply(Acc& c, const FragA& a, const FragB& b, SIMT_HERE) {
  struct Operands { FragA a; FragB b; };
  auto of = simt::exchange(warp::wave(), warp::wave_lane(), Operands{a, b}, here);
  for (int e = 0; e < kAcc; ++e)
    for (int k = 0; k < 16; ++k)
      c.x[e] += to_float(T{of(k / 4 * 16 + row(e)).a.x[k % 4]}) * to_float(T{of(k / 4 * 16 + col(e)).b.x[k % 4]});
}

template <class T>
inline FragA to_a(const Acc& c, SIMT_HERE) {
  auto of = simt::exchange(warp::wave(), warp::wave_lane(), c, here);
  FragA a;
  const int m = warp::wave_lane() % 16;
  for (int i = 0; i < 4; ++i) a.x[i] = from_float<T>(of(m / 4 * 16 + 4 * (warp::wave_lane() / 16) + i).x[m % 4]).bits;
  return a;
}

inline void store_row(const Acc& c, int slot, float* to) { to[col(slot)] = c.x[slot]; }

template <class T>
inline void store_row(const Acc& c, int slot, float factor, T* to) { to[col(slot)] = from_float<T>(c.x[slot] * factor); }

inline void row_max(float (&x)[kSlots], SIMT_HERE) {
  for (float& s : x) s = warp::reduce_max<16>(s, here);
}
inline void row_sum(float (&x)[kSlots], SIMT_HERE) {
  for (float& s : x) s = warp::reduce_sum<16>(s, here);
}

}  // namespace mma
}  // namespace portattn
#endif
