// warp.h on the host: the contract of csrc_cuda/warp.h as exchanges between fibers, at wave 32 or 64 (SIMT_WAVE).
#pragma once

#include "vendor.h"

namespace portattn {
namespace warp {

constexpr int kLanes = 32;
constexpr int kWave = SIMT_WAVE;

inline int lane() { return thread_x() % 32; }
inline int wave_lane() { return thread_x() % kWave; }
inline int wave_index() { return thread_x() / kWave; }
inline simt::Group& group() { return simt::block()->warps[thread_x() / 32]; }
inline simt::Group& wave() { return simt::block()->waves[thread_x() / kWave]; }

template <int W = 32, class T>
inline T shfl_idx(T x, int i, SIMT_HERE) {
  static_assert(W <= 32 && (W & (W - 1)) == 0, "a logical warp has 32 lanes");
  return simt::exchange(group(), lane(), x, here)(lane() / W * W + (i & (W - 1)));
}
template <int W = 32, class T>
inline T shfl_xor(T x, int mask, SIMT_HERE) {
  if (mask >= W) simt::fail("shfl_xor: the mask leaves the group, at " + simt::text(here));
  return simt::exchange(group(), lane(), x, here)(lane() ^ mask);
}
template <int W = 32, class T>
inline T shfl_down(T x, int d, SIMT_HERE) {
  return simt::exchange(group(), lane(), x, here)(lane() % W + d < W ? lane() + d : lane());
}
template <int W = 32, class T>
inline T shfl_up(T x, int d, SIMT_HERE) {
  return simt::exchange(group(), lane(), x, here)(lane() % W >= d ? lane() - d : lane());
}
template <int W = 32, class T>
inline T reduce_sum(T x, SIMT_HERE) {
  for (int m = W / 2; m; m /= 2) x += shfl_xor<W>(x, m, here);
  return x;
}
template <int W = 32>
inline float reduce_max(float x, SIMT_HERE) {
  for (int m = W / 2; m; m /= 2) x = max_of(x, shfl_xor<W>(x, m, here));
  return x;
}
inline u32 ballot(bool b, SIMT_HERE) {
  auto of = simt::exchange(group(), lane(), b, here);
  u32 bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<u32>(of(i)) << i;
  return bits;
}
inline bool any(bool b, SIMT_HERE) { return ballot(b, here) != 0; }
inline bool all(bool b, SIMT_HERE) { return ballot(b, here) == 0xffffffffu; }
inline void sync(SIMT_HERE) { simt::meet(group(), here); }

inline void wave_sync(SIMT_HERE) { simt::meet(wave(), here); }
inline bool wave_any(bool b, SIMT_HERE) {
  auto of = simt::exchange(wave(), wave_lane(), b, here);
  bool found = false;
  for (int i = 0; i < kWave; ++i) found |= of(i);
  return found;
}

}  // namespace warp
}  // namespace portattn
