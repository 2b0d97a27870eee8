// The warp abstraction on CUDA. A logical warp is 32 lanes on every vendor; here it is also the hardware's wave.
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
// Every lane of the warp must call them together. wave_*: the same for the hardware's wave of kWave lanes.
#pragma once

#include "vendor.h"

namespace portattn {
namespace warp {

constexpr int kLanes = 32;
constexpr int kWave = 32;
constexpr u32 kEveryLane = 0xffffffffu;

PA_DEVICE int lane() { return thread_x() & 31; }
PA_DEVICE int wave_lane() { return thread_x() & (kWave - 1); }
PA_DEVICE int wave_index() { return thread_x() / kWave; }

template <int W = 32, class T>
PA_DEVICE T shfl_xor(T x, int mask) { return __shfl_xor_sync(kEveryLane, x, mask, W); }
template <int W = 32, class T>
PA_DEVICE T shfl_idx(T x, int i) { return __shfl_sync(kEveryLane, x, i, W); }
template <int W = 32, class T>
PA_DEVICE T shfl_down(T x, int d) { return __shfl_down_sync(kEveryLane, x, d, W); }
template <int W = 32, class T>
PA_DEVICE T shfl_up(T x, int d) { return __shfl_up_sync(kEveryLane, x, d, W); }

template <int W = 32, class T>
PA_DEVICE T reduce_sum(T x) {
#pragma unroll
  for (int m = W / 2; m; m /= 2) x += shfl_xor<W>(x, m);
  return x;
}
template <int W = 32>
PA_DEVICE float reduce_max(float x) {
#pragma unroll
  for (int m = W / 2; m; m /= 2) x = max_of(x, shfl_xor<W>(x, m));
  return x;
}

PA_DEVICE bool any(bool b) { return __any_sync(kEveryLane, b); }
PA_DEVICE bool all(bool b) { return __all_sync(kEveryLane, b); }
PA_DEVICE u32 ballot(bool b) { return __ballot_sync(kEveryLane, b); }
PA_DEVICE void sync() { __syncwarp(); }

PA_DEVICE void wave_sync() { __syncwarp(); }
PA_DEVICE bool wave_any(bool b) { return any(b); }

}  // namespace warp
}  // namespace portattn
