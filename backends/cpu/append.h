// New tokens: turned by their position (rotary), divided by the scale, rounded to the cache's type, written to their slots.
#pragma once

#include <algorithm>

#include "params.h"
#include "vec.h"

namespace pa {

// x[dim] of a head turned by the angles of a position; pairs (0, 1), (2, 3), ... or (0, half), (1, half + 1), ...
inline void turn(float* x, int64_t position, const Shape& s, const Args& a) {
  const int64_t half = s.rotary_half, step = s.rotary_interleaved ? 1 : half;
  position = std::min(position, s.rotary_rows - 1);  // a table too short is the caller's fault: a wrong angle, never a wild read
  for (int64_t i = 0; i < half; i++) {
    const float c = number(a.cos, position * s.cos + i, s.rotary_type), d = number(a.sin, position * s.sin + i, s.rotary_type);
    float* p = x + (s.rotary_interleaved ? 2 * i : i);
    const float u = p[0], w = p[step];
    p[0] = u * c - w * d, p[step] = w * c + u * d;
  }
}

inline double scale_of(const float* scales, double scale, const int64_t stride[2], int64_t b, int64_t head) {
  return scales ? scales[b * stride[0] + head * stride[1]] : scale;
}

// Codes of an 8-bit type: the sizes without the sign bit rise with the code up to the largest finite one.
class Codes {
 public:
  explicit Codes(const float* values) : values_(values) {
    while (last_ < 127 && std::isfinite(values[last_ + 1])) last_++;
    signed_zero_ = values[128] == 0;
    for (int i = 0; i < 256; i++)
      if (values[i] != values[i]) nan_ = i;
  }

  uint8_t operator()(double x) const {  // nearest, ties to even, saturated; NaN stays NaN
    if (x != x) return uint8_t(nan_);
    const double size = std::fmin(std::fabs(x), double(values_[last_]));
    int above = int(std::lower_bound(values_, values_ + last_, size) - values_);
    if (above) {
      const double up = values_[above] - size, down = size - values_[above - 1];
      if (down < up || (down == up && above % 2)) above--;
    }
    return uint8_t(above | (std::signbit(x) && (above || signed_zero_) ? 128 : 0));
  }

 private:
  const float* values_;
  int last_ = 0, nan_ = 127;
  bool signed_zero_ = false;
};

inline void write_row(void* cache, int64_t at, int64_t type, const float* x, int64_t dim, double scale, const Codes* codes) {
  if (codes) {
    uint8_t* p = static_cast<uint8_t*>(cache) + at;
    for (int64_t i = 0; i < dim; i++) p[i] = (*codes)(double(x[i]) / scale);
  } else {
    for (int64_t i = 0; i < dim; i++) put(cache, at + i, float(double(x[i]) / scale), type);
  }
}

// Token `row` of one kv head to a slot of both caches.
inline void write_token(const Shape& s, const Args& a, int64_t k_at, int64_t v_at, int64_t position, int64_t page, int64_t place, int64_t b,
                        int64_t head, float* x, const Codes* codes) {
  for (int64_t i = 0; i < s.dim; i++) x[i] = number(a.k_new, k_at + i, s.q_type);
  if (a.cos) turn(x, position, s, a);
  write_row(const_cast<void*>(a.k), page * s.k[0] + place * s.k[1] + head * s.k[2], s.kv_type, x, s.dim,
            scale_of(a.k_scales, a.k_scale, s.k_scale, b, head), codes);
  for (int64_t i = 0; i < s.dim_v; i++) x[i] = number(a.v_new, v_at + i, s.q_type);
  write_row(const_cast<void*>(a.v), page * s.v[0] + place * s.v[1] + head * s.v[2], s.kv_type, x, s.dim_v,
            scale_of(a.v_scales, a.v_scale, s.v_scale, b, head), codes);
}

}  // namespace pa
