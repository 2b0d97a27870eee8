// vendor.h on the host: the same names as csrc_cuda/vendor.h, by simt.h. 16-bit conversions and the matrix
// instructions are written from their definitions, not from the device's code.
#pragma once

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "simt.h"

#define PA_DEVICE inline

namespace portattn {

using i32 = std::int32_t;
using i64 = long long;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = unsigned long long;

struct alignas(2) f16 { u16 bits; };
struct alignas(2) bf16 { u16 bits; };

inline int thread_x() { return simt::block()->current; }
inline int block_x() { return simt::block()->index % simt::block()->grid_x; }
inline int grid_x() { return simt::block()->grid_x; }
inline int block_y() { return simt::block()->index / simt::block()->grid_x; }
inline void block_sync(SIMT_HERE) { simt::meet(simt::block()->all, here); }
inline u8* shared_memory() { return simt::block()->shared; }

template <class T>
inline T uniform(T x) { return x; }
template <class T>
inline T* in_global(T* p) { return p; }
// An index of 64 bits where `wide`, else of 32.
inline i64 read_index(const void* p, i64 i, bool wide) {
  return wide ? static_cast<const i64*>(p)[i] : static_cast<const i32*>(p)[i];
}
inline i64 read_whole_index(const void* p, i64 i, bool wide) { return read_index(p, i, wide); }
template <class P>
inline const P& anew(const P& params) { return params; }
inline int anew(int x) { return x; }
template <class T>
inline T kept(T x) { return x; }
inline u8* kept_shared(u8* p) { return p; }
inline void publish_to_blocks() {}

inline void copy_async16(void* shared, const void* global, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(shared) % 16 || reinterpret_cast<std::uintptr_t>(global) % 16)
    simt::fail("an asynchronous copy is not 16-byte aligned");
  simt::Copy c = {shared, {}};
  if (bytes) std::memcpy(c.bytes, global, bytes);
  const simt::Order order = simt::block()->order;
  const bool early = order == simt::kReverse || (order == simt::kRandom && (reinterpret_cast<std::uintptr_t>(global) / 4096 + simt::block()->current / 32) % 2);
  if (early) std::memcpy(shared, c.bytes, 16);
  else simt::lane().open.push_back(c);
}
inline void copy_async16_once(void* shared, const void* global, int bytes = 16) { copy_async16(shared, global, bytes); }
inline void copy_commit() {
  simt::lane().groups.push_back(std::move(simt::lane().open));
  simt::lane().open.clear();
}
template <int kPending>
inline void copy_wait() {
  auto& groups = simt::lane().groups;
  while (static_cast<int>(groups.size()) > kPending) {
    for (const simt::Copy& c : groups.front()) std::memcpy(c.to, c.bytes, 16);
    groups.erase(groups.begin());
  }
}

inline int atomic_add_ordered(int* p, int x) {
  const int before = *p;
  *p += x;
  return before;
}
inline float load_shared_by_blocks(const float* p) { return *p; }
inline void load4_shared_by_blocks(const float* p, float (&x)[4]) { std::memcpy(x, p, 16); }

inline int atomic_add(int* p, int x) {
  const int before = *p;
  *p += x;
  return before;
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float max_of(float a, float b) { return std::fmax(a, b); }
inline float rint_of(float x) { return std::nearbyint(x); }

inline u32 float_bits(float x) {
  u32 y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float bits_float(u32 x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_float(static_cast<u32>(x.bits) << 16); }
inline float to_float(f16 x) {
  const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  const float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                          : exponent     ? std::ldexp(1024.0f + mantissa, exponent - 25)
                                         : std::ldexp(static_cast<float>(mantissa), -24);
  return x.bits & 0x8000 ? -magnitude : magnitude;
}
template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline bf16 from_float<bf16>(float x) {
  const u32 b = float_bits(x);
  if (std::isnan(x)) return {0x7fff};
  return {static_cast<u16>((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
template <>
inline f16 from_float<f16>(float x) {
  const u16 sign = std::signbit(x) ? 0x8000 : 0;
  const float a = std::fabs(x);
  if (std::isnan(x)) return {0x7fff};
  if (a == 0.0f) return {sign};
  if (a >= 65520.0f) return {static_cast<u16>(sign | 0x7c00)};
  int e;
  std::frexp(a, &e);
  const int step = std::max(e - 11, -24);  // the last place's exponent
  const float units = std::nearbyint(std::ldexp(a, -step));
  const int bits = step == -24 ? static_cast<int>(units) : static_cast<int>(units) - 1024 + ((step + 25) << 10);
  return {static_cast<u16>(sign | bits)};
}
template <class T>
inline u32 pack2(float lo, float hi) { return from_float<T>(lo).bits | static_cast<u32>(from_float<T>(hi).bits) << 16; }

// OCP's E4M3: exponents are seven more than they say, 0x7f is NaN.
inline float of_e4m3(u32 byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float magnitude = (byte & 0x7f) == 0x7f ? NAN : exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
  return byte & 0x80 ? -magnitude : magnitude;
}
inline void halves_of_e4m3(u32 four, u32& low, u32& high) {
  low = pack2<f16>(of_e4m3(four & 255), of_e4m3(four >> 8 & 255));
  high = pack2<f16>(of_e4m3(four >> 16 & 255), of_e4m3(four >> 24));
}
// PTX ISA, prmt: of the eight bytes of {b, a}.
inline u32 pick_bytes(u32 a, u32 b, u32 which) {
  const u64 both = static_cast<u64>(b) << 32 | a;
  u32 to = 0;
  for (int i = 0; i < 4; ++i) to |= static_cast<u32>(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return to;
}

#if SIMT_WAVE == 32
// PTX ISA, ldmatrix .m8n8 .x4: lane 8i + r names row r of matrix i; lane l receives from matrix i row l / 4, elements
// 2 (l % 4) and the next; with .trans the matrix is transposed first.
inline void ldmatrix(u32 (&r)[4], const void* row, bool transpose, simt::Place here) {
  if (reinterpret_cast<std::uintptr_t>(row) % 16) simt::fail("ldmatrix: a row is not 16-byte aligned");
  const int lane = thread_x() % 32;
  auto rows = simt::exchange(simt::block()->warps[thread_x() / 32], lane, row, here);
  for (int i = 0; i < 4; ++i) {
    u16 e[2];
    for (int j = 0; j < 2; ++j) {
      const int major = lane / 4, minor = 2 * (lane % 4) + j;
      const u16* from = static_cast<const u16*>(rows(8 * i + (transpose ? minor : major)));
      e[j] = from[transpose ? major : minor];
    }
    r[i] = e[0] | static_cast<u32>(e[1]) << 16;
  }
}
inline void load_matrices(u32 (&r)[4], const void* row, SIMT_HERE) { ldmatrix(r, row, false, here); }
inline void load_matrices_transposed(u32 (&r)[4], const void* row, SIMT_HERE) { ldmatrix(r, row, true, here); }
// PTX ISA, movmatrix: lane l holds row l / 4, elements 2 (l % 4) and the next, and gets column l / 4's.
inline u32 turn_matrix(u32 x, SIMT_HERE) {
  const int lane = thread_x() % 32;
  auto of = simt::exchange(simt::block()->warps[thread_x() / 32], lane, x, here);
  u32 y = 0;
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * (lane % 4) + i, column = lane / 4;
    y |= (of(4 * row + column / 2) >> (16 * (column % 2)) & 0xffff) << (16 * i);
  }
  return y;
}

// PTX ISA, mma .m16n8k16 for 16-bit floats, with groupID = l / 4 and t = l % 4:
//   A: a0,a1 (groupID, 2t + i); a2,a3 (groupID + 8, …); a4,a5 (groupID, 2t + 8 + …); a6,a7 (groupID + 8, 2t + 8 + …)
//   B: b0,b1 (k = 2t + i, n = groupID); b2,b3 (k = 2t + 8 + i)     C: c0,c1 (groupID, 2t + i); c2,c3 (groupID + 8, …)
template <class T>
inline void multiply_16x8x16(float* c, const u32 (&a)[4], u32 b0, u32 b1, T, SIMT_HERE) {
  struct Operands { u32 a[4], b[2]; } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const int lane = thread_x() % 32;
  auto of = simt::exchange(simt::block()->warps[thread_x() / 32], lane, mine, here);
  auto half = [](u32 x, int i) { return to_float(T{static_cast<u16>(x >> (16 * i))}); };
  auto a_at = [&](int m, int k) {
    return half(of(4 * (m % 8) + k % 8 / 2).a[(k / 8) * 2 + m / 8], k % 2);
  };
  auto b_at = [&](int k, int n) { return half(of(4 * n + k % 8 / 2).b[k / 8], k % 2); };
  for (int i = 0; i < 4; ++i) {
    const int m = lane / 4 + 8 * (i / 2), n = 2 * (lane % 4) + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k) sum += a_at(m, k) * b_at(k, n);
    c[i] = sum;
  }
}
#endif

}  // namespace portattn
