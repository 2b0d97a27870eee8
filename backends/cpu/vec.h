// Vectors of float and the element types that are turned into them: float, bfloat16, float16, 8-bit by a table.
// What bfloat16 holds exactly, itself and every 8-bit float, is also read as vectors of bfloat16 (`words`; elements from n on are 0, and not read).
// One width for each instruction set; which one is decided by the compiler's flags, and no code elsewhere asks.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pa {

#if defined(__AVX512F__) || defined(PA_EMULATED)  // emulated: units that this CPU lacks, in plain C++ (tests/cpu/emulated.h)
constexpr int kLanes = 16;
constexpr bool kManyRegisters = true;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr bool kManyRegisters = false;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr bool kManyRegisters = true;
#else
constexpr int kLanes = 4;  // SSE2: the widest that every x86-64 has
constexpr bool kManyRegisters = false;
#endif
constexpr int kRows = kManyRegisters ? 12 : 6;  // rows of a register tile: 24 of 32 registers hold sums, or 12 of 16
constexpr int kPanel = 2 * kLanes;  // columns of a register tile
constexpr int kWide = 2 * kLanes;   // 16-bit elements of a vector
constexpr int kKeys = 64;           // keys of one softmax step
constexpr float kInf = std::numeric_limits<float>::infinity();
static_assert(kKeys % kPanel == 0, "a step of keys is whole panels");

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef vf vf_any __attribute__((aligned(4), may_alias));
typedef vi vi_any __attribute__((aligned(2), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }
inline vf fill(float x) { return vf{} + x; }
inline vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
#if defined(__AVX512F__)
inline vf max_number(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }  // b where one is NaN
#elif defined(__AVX2__)
inline vf max_number(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
#else
inline vf max_number(vf a, vf b) { return select(a > b, a, b); }
#endif
inline vf abs(vf x) { return (vf)((vi)x & 0x7fffffff); }

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline vi load_16(const uint16_t* p) { return *reinterpret_cast<const vi_any*>(p); }
inline void store_16(uint16_t* p, vi x) { *reinterpret_cast<vi_any*>(p) = x; }

inline vi load_16(const uint16_t* p, int n) {  // elements from n on are 0, and not read
  if (n >= kWide) return load_16(p);
#if defined(__AVX512BW__)
  return (vi)_mm512_maskz_loadu_epi16(n > 0 ? ~0u >> (32 - n) : 0, p);
#else
  uint16_t x[kWide] = {};
  if (n > 0) std::memcpy(x, p, size_t(n) * 2);
  return load_16(x);
#endif
}

// ---------------------------------------------------------------- element types
struct F32 {
  using T = float;
  static vf load(const T* p, const float*) { return pa::load(p); }
  static float one(const T* p, const float*) { return *p; }
};

struct BF16 {
  using T = uint16_t;
  static vf load(const T* p, const float*) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__aarch64__) && !defined(PA_EMULATED)
    return (vf)vshll_n_u16(vld1_u16(p), 16);
#else
    vi x{};
    for (int i = 0; i < kLanes; i++) x[i] = int32_t(uint32_t(p[i]) << 16);
    return (vf)x;
#endif
  }
  static vi words(const T* p, int n, const float*) { return load_16(p, n); }
  static float one(const T* p, const float*) { return as_float(uint32_t(*p) << 16); }
};

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  const float size = as_float((rest << 13) + (112u << 23));  // the exponent's offset moves from 15 to 127
  const float value = rest >= 0x400 ? size : float(rest) * 0x1p-24f;
  return as_float(as_bits(value) | sign);
#endif
}

struct F16 {
  using T = uint16_t;
  static vf load(const T* p, const float*) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__) && defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__) && !defined(PA_EMULATED)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vf x{};
    for (int i = 0; i < kLanes; i++) x[i] = half_to_float(p[i]);
    return x;
#endif
  }
  static float one(const T* p, const float*) { return half_to_float(*p); }
};

struct F8 {  // any 8-bit type: the table has its 256 values, and behind them the same in bfloat16; code 0 is 0
  using T = uint8_t;
#if defined(__AVX512BW__)
  static __m512i look_up(__m512i code, const float* table) {  // 16-bit codes to bfloat16: a fifth of the time of single loads (Zen 4)
    const float* t = table + 256;
    auto quarter = [&](int i) { return _mm512_permutex2var_epi16(_mm512_loadu_si512(t + 32 * i), code, _mm512_loadu_si512(t + 32 * i + 16)); };
    const __mmask32 odd = _mm512_test_epi16_mask(code, _mm512_set1_epi16(64)), upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(128));
    return _mm512_mask_blend_epi16(upper, _mm512_mask_blend_epi16(odd, quarter(0), quarter(1)), _mm512_mask_blend_epi16(odd, quarter(2), quarter(3)));
  }
  static vf load(const T* p, const float* table) {
    return (vf)_mm512_slli_epi32(look_up(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), table), 16);
  }
  static vi words(const T* p, int n, const float* table) {
    const __m256i codes = n >= kWide ? _mm256_loadu_si256((const __m256i*)p) : _mm256_maskz_loadu_epi8(n > 0 ? ~0u >> (32 - n) : 0, p);
    return (vi)look_up(_mm512_cvtepu8_epi16(codes), table);
  }
#else
  static vf load(const T* p, const float* table) {
    vf x{};
    for (int i = 0; i < kLanes; i++) x[i] = table[p[i]];
    return x;
  }
  static vi words(const T* p, int n, const float* table) {
    const uint16_t* t = reinterpret_cast<const uint16_t*>(table + 256);
    typedef uint16_t v16 __attribute__((vector_size(kWide * 2)));
    v16 x{};
    if (n >= kWide)
      for (int i = 0; i < kWide; i++) x[i] = t[p[i]];
    else
      for (int i = 0; i < n; i++) x[i] = t[p[i]];
    return (vi)x;
  }
#endif
  static float one(const T* p, const float* table) { return table[*p]; }
};

template <class E>
inline vf load_part(const typename E::T* p, int n, const float* table) {  // lanes from n on are 0, and not read
  vf x{};
  for (int i = 0; i < n; i++) x[i] = E::one(p + i, table);
  return x;
}

template <class E>
void widen(const char* row, int dim, float* to, const float* table) {  // to whole vectors, zeros behind
  const auto* p = (const typename E::T*)row;
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, E::load(p + d, table));
  if (d < dim) store(to + d, load_part<E>(p + d, dim - d, table));
}

enum Type : int64_t { kF32 = 0, kF16 = 1, kBF16 = 2, kF8 = 3, kBool = 4 };
inline int64_t size_of(int64_t type) { return type == kF32 ? 4 : type >= kF8 ? 1 : 2; }

inline float number(const void* base, int64_t i, int64_t type) {  // a float32, float16 or bfloat16 element
  if (type == kF32) return static_cast<const float*>(base)[i];
  const uint16_t* p = static_cast<const uint16_t*>(base) + i;
  return type == kF16 ? F16::one(p, nullptr) : BF16::one(p, nullptr);
}

inline uint16_t to_bf16(float x) {  // to nearest, ties to even
  if (x != x) return 0x7fc0;
  const uint32_t bits = as_bits(x);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t to_half(float x) {
#if defined(__F16C__)
  return uint16_t(_cvtss_sh(x, 0));
#else
  const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);                       // 65520 and more round to infinity
  if (size < 0x38800000)                                                        // below 2^-14: steps of 2^-24
    return uint16_t(sign | (as_bits(as_float(size) + 0.5f) - as_bits(0.5f)));  // the sum's last place is 2^-24: it rounds
  return uint16_t(sign | ((size + 0xfff + (size >> 13 & 1)) - (112u << 23)) >> 13);
#endif
}

inline void put(void* base, int64_t i, float x, int64_t type) {
  if (type == kF32)
    static_cast<float*>(base)[i] = x;
  else
    static_cast<uint16_t*>(base)[i] = type == kF16 ? to_half(x) : to_bf16(x);
}

// to[0, 2 kLanes) = x, then y, in bfloat16.
inline void to_bf16(vf x, vf y, uint16_t* to) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(PA_EMULATED)
  vst1q_u16(to, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)x), (float32x4_t)y)));
#else
  auto rounded = [](vf z) {
    const vi bits = (vi)z, even = bits + 0x7fff + ((bits >> 16) & 1);
    return ((vi)select(z == z, (vf)even, fill(as_float(0x7fc00000))) >> 16) & 0xffff;
  };
  const vi a = rounded(x), b = rounded(y);
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)a));
  _mm256_storeu_si256((__m256i*)(to + kLanes), _mm512_cvtepi32_epi16((__m512i)b));
#elif defined(__AVX2__)
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a, (__m256i)b), 0xd8));
#else
  for (int i = 0; i < kLanes; i++) to[i] = uint16_t(a[i]), to[kLanes + i] = uint16_t(b[i]);
#endif
#endif
}

// x[0, n) times a factor to consecutive elements of a float32, float16 or bfloat16 row.
inline void put_row(void* base, int64_t at, const float* x, int64_t n, float factor, int64_t type) {
  int64_t d = 0;
  if (type == kF32) {
    for (float* to = static_cast<float*>(base) + at; d + kLanes <= n; d += kLanes) store(to + d, load(x + d) * factor);
  } else if (type == kBF16) {
    for (uint16_t* to = static_cast<uint16_t*>(base) + at; d + 2 * kLanes <= n; d += 2 * kLanes)
      to_bf16(load(x + d) * factor, load(x + d + kLanes) * factor, to + d);
  } else {
#if defined(__AVX512F__)
    for (uint16_t* to = static_cast<uint16_t*>(base) + at; d + kLanes <= n; d += kLanes)
      _mm256_storeu_si256((__m256i*)(to + d), _mm512_cvtps_ph((__m512)(load(x + d) * factor), 0));
#elif defined(__F16C__) && defined(__AVX2__)
    for (uint16_t* to = static_cast<uint16_t*>(base) + at; d + kLanes <= n; d += kLanes)
      _mm_storeu_si128((__m128i*)(to + d), _mm256_cvtps_ph((__m256)(load(x + d) * factor), 0));
#endif
  }
  for (; d < n; d++) put(base, at + d, x[d] * factor, type);
}

// ---------------------------------------------------------------- functions
constexpr float kLog2E = 1.44269504f;

// 2^x, relative error below 2e-7 from -126 to 127; -inf gives 0 and so does all that is too small, NaN stays NaN.
// The polynomial is the best of its degree for half a unit around 0.
inline vf exp2(vf x) {
#if defined(__AVX512F__)
  const vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // of -inf: 0
#else
  const vi tiny = x < -126.0f;
  x = select(x > 127.0f, fill(127.0f), select(tiny, fill(-126.0f), x));
  const vf shifted = x + 12582912.0f;  // 1.5 x 2^23: the sum's low bits are round(x)
  const vf r = x - (shifted - 12582912.0f);
#endif
  vf p = fill(1.326472731e-3f);
  p = p * r + 9.671512991e-3f;
  p = p * r + 5.550733581e-2f;
  p = p * r + 2.402224243e-1f;
  p = p * r + 6.931470037e-1f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)(x - r));
#else
  const vf power = (vf)(((vi)shifted - 0x4b400000 + 127) << 23);
  return select(tiny, vf{}, p * power);
#endif
}

// tanh with a relative error of a few 1e-7 everywhere: a polynomial below 0.625 (Cephes), exp above.
inline vf tanh(vf x) {
  const vf size = abs(x), z = x * x;
  vf p = fill(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  p = p * z * x + x;
  const vf big = 1.0f - 2.0f / (exp2(size * (2 * kLog2E)) + 1.0f);
  return select(size < 0.625f, p, (vf)((vi)big | ((vi)x & (int32_t)0x80000000)));
}

// Over the lanes of one vector, halving it: lane by lane it would take longer than the exponentials of a step.
#if defined(__AVX512F__)
inline float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
inline float largest(vf x) { return _mm512_reduce_max_ps((__m512)x); }  // no lane is NaN
#elif defined(__AVX2__)
inline float sum(vf x) {
  const __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1)), b = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
inline float largest(vf x) {
  const __m128 a = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1)), b = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
#else
inline float sum(vf x) {
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += x[i];
  return total;
}
inline float largest(vf x) {
  float top = x[0];
  for (int i = 1; i < kLanes; i++) top = x[i] > top ? x[i] : top;
  return top;
}
#endif

// to[r * stride + k] = the sum of the lanes of x[k * R + r], for K vectors of each of R rows.
template <int K, int R>
inline void sums(const vf (&x)[K * R], float* to, int stride) {
#if defined(__AVX512F__)
  static_assert(K == 4, "a tree of 16 vectors");
  auto row = [&](int r) __attribute__((always_inline)) {  // each 128-bit lane has a part of the four keys; within lanes first: unpacking takes less than moving lanes
    auto both = [&](int k) __attribute__((always_inline)) {
      const __m512 a = (__m512)x[k * R + r], b = (__m512)x[(k + 1) * R + r];
      return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    };
    const __m512d a = both(0), b = both(2);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  };
  auto halves = [](__m512 a, __m512 b) __attribute__((always_inline)) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); };
  const __m512 a = halves(row(0), row(R > 1 ? 1 : 0)), b = R > 2 ? halves(row(R > 2 ? 2 : 0), row(R > 3 ? 3 : 0)) : a;
  const __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  _mm_storeu_ps(to, _mm512_castps512_ps128(all));
  if (R > 1) _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps(all, 1));
  if (R > 2) _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps(all, 2));
  if (R > 3) _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps(all, 3));
#elif defined(__AVX2__)
  static_assert(K == 2, "pairs of keys");
#pragma GCC unroll 4
  for (int r = 0; r < R; r += 2) {  // two rows of two keys
    const int odd = r + 1 < R ? 1 : 0;
    const __m256 a = _mm256_hadd_ps((__m256)x[r], (__m256)x[R + r]), b = _mm256_hadd_ps((__m256)x[r + odd], (__m256)x[R + r + odd]);
    const __m256 c = _mm256_hadd_ps(a, b);
    const __m128 all = _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
    _mm_storel_pi((__m64*)(to + r * stride), all);
    if (odd) _mm_storeh_pi((__m64*)(to + (r + 1) * stride), all);
  }
#elif defined(__aarch64__) && !defined(PA_EMULATED)
  static_assert(K == 4, "four keys fill a vector");
  for (int r = 0; r < R; r++) {
    const float32x4_t a = vpaddq_f32((float32x4_t)x[r], (float32x4_t)x[R + r]);
    vst1q_f32(to + r * stride, vpaddq_f32(a, vpaddq_f32((float32x4_t)x[2 * R + r], (float32x4_t)x[3 * R + r])));
  }
#else
  for (int k = 0; k < K; k++)
    for (int r = 0; r < R; r++) to[r * stride + k] = sum(x[k * R + r]);
#endif
}

}  // namespace pa
