// As tiles.cpp, of csrc_hip's tiles of 32 rows: what prefill_staged.h does with them.
#include <mma.h>  // in angle brackets: the command line decides whose

using namespace portattn;
using Tiles = MatrixTiles<32>;

struct LargeTilesParams {
  const PA_T* a;   // 32 x 32, row-major
  const PA_T* b;   // 32 x 32
  float* product;  // a b^T: load_a with load_b_rows
  float* chained;  // (a b^T rounded to PA_T) b: to_a with load_b_turned
  float* rows;     // 32 largest, 32 sums of the product's rows
  float* stored;   // twice the product by scale and store_row, float32
  PA_T* narrow;    // half the product by store_row, PA_T
};

extern "C" int portattn_simt_large_tiles(const LargeTilesParams* p, int, int, int order, unsigned seed, char* error, int capacity) {
  constexpr int kPitch = 40, kTurnedPitch = 32 + Tiles::kTurnedPad;
  const std::string text = simt::launch(1, 1, warp::kWave, 32 * (2 * kPitch + kTurnedPitch) * 2 + 64, static_cast<simt::Order>(order), seed, [&] {
    PA_T* a = reinterpret_cast<PA_T*>(shared_memory());
    PA_T* b = a + 32 * kPitch;
    PA_T* turned = b + 32 * kPitch;
    for (int i = thread_x(); i < 1024; i += warp::kWave) {
      a[i / 32 * kPitch + i % 32] = p->a[i];
      b[i / 32 * kPitch + place_in_row(i / 32, i % 32)] = p->b[i];
    }
    for (int i = thread_x(); i < 32; i += warp::kWave) {  // four rows, eight columns
      const int key = i / 4 * 4, d = i % 4 * 8;
      Bytes16 rows[4];
      for (int r = 0; r < 4; ++r) rows[r] = *reinterpret_cast<const Bytes16*>(p->b + (key + r) * 32 + d);
      Tiles::store_turned<PA_T>(turned + d * kTurnedPitch, kTurnedPitch, key, rows);
    }
    block_sync();
    Tiles::Acc product = {}, chained = {};
    for (int k = 0; k < 32; k += 16) {
      Tiles::FragA fa;
      Tiles::FragB fb;
      Tiles::load_a(fa, a + k, kPitch);
      Tiles::load_b_rows(fb, b + k, kPitch);
      Tiles::multiply<PA_T>(product, fa, fb);
    }
    Tiles::FragB first, second;
    Tiles::load_b_turned(first, turned, kTurnedPitch);
    Tiles::load_b_turned(second, turned + 16, kTurnedPitch);
    Tiles::multiply_twice<PA_T>(chained, Tiles::to_a<PA_T>(product, 0), Tiles::to_a<PA_T>(product, 1), first, second);
    const int row = Tiles::row(0);
    float top[Tiles::kSlots] = {-bits_float(0x7f800000u)}, sum[Tiles::kSlots] = {0.0f};
    for (int e = 0; e < Tiles::kAcc; ++e) {
      p->product[row * 32 + Tiles::col(e)] = product.x[e];
      p->chained[row * 32 + Tiles::col(e)] = chained.x[e];
      top[0] = max_of(top[0], product.x[e]);
      sum[0] += product.x[e];
    }
    Tiles::row_max(top);
    Tiles::row_sum(sum);
    p->rows[row] = top[0];
    p->rows[32 + row] = sum[0];
    Tiles::store_row<PA_T>(product, 0, 0.5f, p->narrow + row * 32);
    Tiles::scale(product, {2.0f});
    Tiles::store_row(product, 0, p->stored + row * 32);
  });
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}
