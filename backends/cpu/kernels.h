// The steps of attention over one block of keys, by the element types of q and of K and V.
// Numerics: scores, softmax and sums are float32; bfloat16 goes as it is into products of pairs where the CPU has them, with
// probabilities rounded to bfloat16, and so do 8-bit caches (exact in bfloat16) of bfloat16 queries; all else is widened to float32.
#pragma once

#include "few.h"
#include "many.h"
#include "softmax.h"

namespace pa {

struct Kernels {
  bool pairs;  // q and probabilities are bfloat16
  // few rows
  void (*query)(const float* x, int dim, void* to);
  void (*scores)(const Stream& keys, const Part& t, const void* q, int stride, int dim, float* s, const float* table);
  void (*values)(const Stream& values, const Part& t, const void* p, const float* old, float* out, int stride, int dim, const float* table);
  void (*restore)(float* out, int64_t n);
  // many rows
  void (*keys_to_panels)(const Rows& block, int dim, float* to, float* wide, const float* table);
  void (*values_to_panels)(const Rows& block, int dim, float* to, int height, const float* table);
  void (*product)(const float* a, int64_t a_stride, const float* b, int n, float* c, int64_t c_stride, const float* old);
  int (*places)(int dim);
};

template <class E, class P, class D>
constexpr Kernels kernels_of() {
  auto query = [](const float* x, int dim, void* to) { P::query(x, dim, static_cast<typename P::Q*>(to)); };
  return {D::kDepth == 2,
          query,
          few_scores<P>,
          few_values<P>,
          P::restore,
          pack_keys<E, D>,
          pack_values<E, D>,
          tile<D>,
          places<D>};
}

// Of bfloat16 queries.
template <class E>
constexpr Kernels brain_kernels() {
  if constexpr (kPairs)
    return kernels_of<E, Pairs<E>, Double>();
  else
    return kernels_of<E, Halves<E>, Single>();
}

inline const Kernels& kernels(int64_t q_type, int64_t kv_type) {
  static const Kernels all[] = {kernels_of<F32, Widened<F32>, Single>(), kernels_of<F16, Widened<F16>, Single>(), brain_kernels<BF16>(),
                                kernels_of<F8, Halves<F8>, Single>(), brain_kernels<F8>()};
  return all[kv_type == kF8 && q_type == kBF16 ? 4 : kv_type];
}

}  // namespace pa
