// Not a kernel of portattn: one wave that puts each operation of mma.h and warp.h to work and writes what came out.
#include <mma.h>  // in angle brackets: the command line decides whose

using namespace portattn;

#ifndef SIMT_GFX
constexpr int place_in_row(int, int d) { return d; }  // csrc_hip's mma.h has its own
#endif

struct TilesParams {
  const PA_T* a;      // 16 x 16, row-major
  const PA_T* b;      // 16 x 16
  float* product;     // a b^T: load_a with load_b_rows
  float* chained;     // (a b^T rounded to PA_T) b: to_a with load_b_cols
  float* rows;        // 16 largest, 16 sums of the product's rows
  float* stored;      // the product by store_row, float32
  PA_T* narrow;       // half the product by store_row, PA_T
};

extern "C" int portattn_simt_tiles(const TilesParams* p, int, int, int order, unsigned seed, char* error, int capacity) {
  const std::string text = simt::launch(1, 1, warp::kWave, 2 * 16 * 24 * 2 + 64, static_cast<simt::Order>(order), seed, [&] {
    constexpr int kPitch = 24;
    PA_T* a = reinterpret_cast<PA_T*>(shared_memory());
    PA_T* b = a + 16 * kPitch;
    for (int i = thread_x(); i < 256; i += warp::kWave) {
      a[i / 16 * kPitch + i % 16] = p->a[i];
      b[i / 16 * kPitch + place_in_row(i / 16, i % 16)] = p->b[i];
    }
    block_sync();
    mma::FragA fa;
    mma::FragB cols, rows;
    mma::load_a(fa, a, kPitch);
    mma::load_b_cols(cols, b, kPitch);
    mma::load_b_rows(rows, b, kPitch);
    mma::Acc product = {}, chained = {};
    mma::multiply<PA_T>(product, fa, rows);
    mma::multiply<PA_T>(chained, mma::to_a<PA_T>(product), cols);
    float top[mma::kSlots], sum[mma::kSlots];
    for (int s = 0; s < mma::kSlots; ++s) top[s] = -bits_float(0x7f800000u), sum[s] = 0.0f;
    for (int e = 0; e < mma::kAcc; ++e) {
      const int s = mma::slot_of(e), at = mma::row(s) * 16 + mma::col(e);
      p->product[at] = product.x[e];
      p->chained[at] = chained.x[e];
      top[s] = max_of(top[s], product.x[e]);
      sum[s] += product.x[e];
    }
    mma::row_max(top);
    mma::row_sum(sum);
    for (int s = 0; s < mma::kSlots; ++s) {
      p->rows[mma::row(s)] = top[s];
      p->rows[16 + mma::row(s)] = sum[s];
      mma::store_row(product, s, p->stored + mma::row(s) * 16);
      mma::store_row<PA_T>(product, s, 0.5f, p->narrow + mma::row(s) * 16);
    }
  });
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}
