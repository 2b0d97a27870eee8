// The warp abstraction on AMD. A logical warp is 32 lanes on every vendor; a wave of 64 carries two of them, side by
// side, which may take different paths; a wave of 32 is one.
//
// Contract, as shared-memory code (x[i] is lane i's argument, W a power of two up to 32, g = lane / W * W):
//   shfl_xor<W>(x, m)   x[lane ^ m]                                 m < W
//   shfl_idx<W>(x, i)   x[g + i % W]
//   shfl_down<W>(x, d)  lane % W + d < W ? x[lane + d] : x[lane]
//   shfl_up<W>(x, d)    lane % W >= d ? x[lane - d] : x[lane]
//   reduce_sum<W>(x)    the sum of x[g .. g + W), the same bits in every lane (a butterfly)
//   reduce_max<W>(x)    the largest of them; a NaN loses against a number
//   any(b), all(b)      over the 32 lanes; ballot(b): bit i is lane i's
//   sync()              orders the lanes' shared-memory accesses before it with those after it
// Every lane of the warp must call them together; the wave's other warp need not. wave_*: the same for the hardware's
// wave of kWave lanes, all of which must call them together.
//
// Cost: a reduction's steps by 1, 2, 8 (and 4 on gfx11 and gfx12) are DPP moves that the compiler folds into the
// addition; by 16 permlanex16 on gfx11 and gfx12; the others cross the shared memory's crossbar without touching it.
#pragma once

#include <vendor.h>  // in angle brackets: tests/simt compiles this file with its own vendor.h in front

namespace portattn {
namespace warp {

constexpr int kLanes = 32;
constexpr int kWave = kWaveLanes;

PA_DEVICE int lane() { return thread_kept() & 31; }
PA_DEVICE int wave_lane() { return thread_kept() & (kWave - 1); }
PA_DEVICE int wave_index() { return uniform(thread_kept() / kWave); }

template <class T>
PA_DEVICE u32 to_bits(T x) {
  static_assert(sizeof(T) == 4, "shuffles move 32 bits");
  return __builtin_bit_cast(u32, x);
}

template <int W = 32, class T>
PA_DEVICE T shfl_idx(T x, int i) {
  static_assert(W <= 32 && (W & (W - 1)) == 0, "a logical warp has 32 lanes");
  return __builtin_bit_cast(T, lane_of_wave(to_bits(x), (wave_lane() & ~(W - 1)) | (i & (W - 1))));
}
template <int W = 32, class T>
PA_DEVICE T shfl_down(T x, int d) {
  const int from = (wave_lane() & (W - 1)) + d < W ? wave_lane() + d : wave_lane();
  return __builtin_bit_cast(T, lane_of_wave(to_bits(x), from));
}
template <int W = 32, class T>
PA_DEVICE T shfl_up(T x, int d) {
  const int from = (wave_lane() & (W - 1)) >= d ? wave_lane() - d : wave_lane();
  return __builtin_bit_cast(T, lane_of_wave(to_bits(x), from));
}
template <int W = 32, class T>
PA_DEVICE T shfl_xor(T x, int mask) {
  const u32 bits = to_bits(x);
  switch (mask) {  // constant once inlined: one of these
    case 1: return __builtin_bit_cast(T, lane_xor<1>(bits));
    case 2: return __builtin_bit_cast(T, lane_xor<2>(bits));
    case 4: return __builtin_bit_cast(T, lane_xor<4>(bits));
    case 8: return __builtin_bit_cast(T, lane_xor<8>(bits));
    case 16: return __builtin_bit_cast(T, lane_xor<16>(bits));
    default: return __builtin_bit_cast(T, lane_of_wave(bits, wave_lane() ^ mask));
  }
}

template <int W = 32, class T>
PA_DEVICE T reduce_sum(T x) {
  if constexpr (W == 1) return x;
  else return reduce_sum<W / 2>(x + shfl_xor<W>(x, W / 2));
}
template <int W = 32>
PA_DEVICE float reduce_max(float x) {
  if constexpr (W == 1) return x;
  else return reduce_max<W / 2>(max_of(x, shfl_xor<W>(x, W / 2)));
}

PA_DEVICE u32 ballot(bool b) { return half_ballot(b); }
PA_DEVICE bool any(bool b) { return half_ballot(b) != 0; }
PA_DEVICE bool all(bool b) { return half_ballot(b) == 0xffffffffu; }
PA_DEVICE void sync() { warp_fence(); }

PA_DEVICE void wave_sync() { wave_fence(); }
PA_DEVICE bool wave_any(bool b) { return any_of_wave(b); }

// Lane ^ 16, and lane ^ 32 where the wave has it: the lanes that see the same row of a matrix (mma.h).
PA_DEVICE float wave_xor_16(float x) { return bits_float(lane_xor<16>(float_bits(x))); }
PA_DEVICE float wave_xor_32(float x) { return bits_float(lane_xor_32(float_bits(x))); }

}  // namespace warp
}  // namespace portattn
