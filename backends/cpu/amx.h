// AMX's tiles: products of 16 or 32 rows of bfloat16 with panels of pairs, summed in float32.
// Computes c[r][j] (+)= sum over pairs i of a[r][2 i] b[i][j][0] + a[r][2 i + 1] b[i][j][1], j < kPanel = 32.
// Tiling: 2 x 2 tiles of sums of 16 x 16, two tiles of a (16 rows x 32 elements), two of b (16 pairs x 16 columns).
#pragma once

#include "pairs.h"

namespace pa {

constexpr int kTileKeys = 256;      // keys of a block: sums of out go to memory and back once for each
constexpr int kTileRowsAtOnce = 32;  // rows whose scores of a block stay in the first cache: 32 KB

#if (defined(__AMX_TILE__) && defined(__AMX_BF16__)) || defined(PA_EMULATED_AMX)
constexpr bool kTiles = true;
static_assert(kPanel == 32, "a panel is two tiles wide");

class TileUnit {  // this thread's tiles, for as long as it lives: threads that do not hold them switch faster
 public:
  TileUnit() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof(config) == 64, "the operand of ldtilecfg");
    _tile_loadconfig(&config);
  }
  ~TileUnit() { _tile_release(); }
};

// rows: 16 or 32. steps: of 16 pairs (32 elements of a row). Strides are in bytes.
inline void tile_product(int rows, const void* a, int64_t a_stride, const void* b, int steps, float* c, int64_t c_stride, bool add) {
  const char *a0 = static_cast<const char*>(a), *a1 = a0 + 16 * a_stride, *b0 = static_cast<const char*>(b);
  constexpr int64_t kRow = kPanel * 4;  // bytes of a panel's row
  char *c0 = reinterpret_cast<char*>(c), *c1 = c0 + 16 * c_stride;
  asm volatile("" ::: "memory");  // what the tiles read is in memory by now
  if (add) {
    _tile_loadd(0, c0, c_stride); _tile_loadd(1, c0 + 64, c_stride);
    if (rows == 32) { _tile_loadd(2, c1, c_stride); _tile_loadd(3, c1 + 64, c_stride); }
  } else {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  }
  for (int i = 0; i < steps; i++, a0 += 64, a1 += 64, b0 += 16 * kRow) {
    _tile_loadd(6, b0, kRow); _tile_loadd(7, b0 + 64, kRow);
    _tile_loadd(4, a0, a_stride);
    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
    if (rows == 32) {
      _tile_loadd(5, a1, a_stride);
      _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c0, c_stride); _tile_stored(1, c0 + 64, c_stride);
  if (rows == 32) { _tile_stored(2, c1, c_stride); _tile_stored(3, c1 + 64, c_stride); }
  asm volatile("" ::: "memory");
}
#else
constexpr bool kTiles = false;
class TileUnit {};
inline void tile_product(int, const void*, int64_t, const void*, int, float*, int64_t, bool) {}  // never called: kTiles
#endif

}  // namespace pa
