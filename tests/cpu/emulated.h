// Units that most machines lack, in plain C++ on vectors of 16 lanes: AVX512-BF16's products of pairs and its interleaving
// within 128-bit lanes, and AMX's tiles under the names that compilers give them. With -DPA_EMULATED the kernels are
// compiled over these, so that every machine runs their packing, bounds and order of columns.
#pragma once

#include <cstring>

#include "vec.h"

namespace pa::emulated {

inline vf dot2(vf sum, vi a, vi b) {
  return sum + (vf)(a << 16) * (vf)(b << 16) + (vf)(a & (int32_t)0xffff0000) * (vf)(b & (int32_t)0xffff0000);
}

inline void interleave(vi a, vi b, vi& lo, vi& hi) {
  uint16_t x[32], y[32], l[32], h[32];
  std::memcpy(x, &a, 64), std::memcpy(y, &b, 64);
  for (int lane = 0; lane < 4; lane++)
    for (int i = 0; i < 4; i++) {
      l[8 * lane + 2 * i] = x[8 * lane + i], l[8 * lane + 2 * i + 1] = y[8 * lane + i];
      h[8 * lane + 2 * i] = x[8 * lane + 4 + i], h[8 * lane + 2 * i + 1] = y[8 * lane + 4 + i];
    }
  std::memcpy(&lo, l, 64), std::memcpy(&hi, h, 64);
}

struct Tile {
  uint32_t x[16][16];
};

inline Tile* tiles() {
  static thread_local Tile all[8];
  return all;
}
inline bool& configured() {
  static thread_local bool yes = false;
  return yes;
}

inline void load(int t, const void* from, int64_t stride) {
  if (!configured()) __builtin_trap();
  for (int r = 0; r < 16; r++) std::memcpy(tiles()[t].x[r], static_cast<const char*>(from) + r * stride, 64);
}
inline void store(int t, void* to, int64_t stride) {
  if (!configured()) __builtin_trap();
  for (int r = 0; r < 16; r++) std::memcpy(static_cast<char*>(to) + r * stride, tiles()[t].x[r], 64);
}
inline void dot(int c, int a, int b) {
  for (int m = 0; m < 16; m++) {
    vf sum;
    std::memcpy(&sum, tiles()[c].x[m], 64);
    for (int k = 0; k < 16; k++) {
      vi pairs;
      std::memcpy(&pairs, tiles()[b].x[k], 64);
      sum = dot2(sum, vi{} + (int32_t)tiles()[a].x[m][k], pairs);
    }
    std::memcpy(tiles()[c].x[m], &sum, 64);
  }
}

}  // namespace pa::emulated

#if defined(PA_EMULATED_AMX)
#define _tile_loadconfig(config) (void)(config), pa::emulated::configured() = true
#define _tile_release() pa::emulated::configured() = false
#define _tile_zero(t) std::memset(&pa::emulated::tiles()[t], 0, sizeof(pa::emulated::Tile))
#define _tile_loadd(t, from, stride) pa::emulated::load(t, from, stride)
#define _tile_stored(t, to, stride) pa::emulated::store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) pa::emulated::dot(c, a, b)
#endif
