// Element types: 16-byte vectors, 8-bit floats and their conversions by bit patterns, so that they mean the same on
// every vendor and architecture (instructions for them differ, and are missing before sm_89 and on gfx90a).
#pragma once

#include "vendor.h"

namespace portattn {

struct alignas(16) Bytes16 { u32 x[4]; };
struct alignas(8) Bytes8 { u32 x[2]; };
struct alignas(16) Float4 { float x[4]; };

// The first `bytes` of 16; the rest become zero.
PA_DEVICE Bytes16 keep_bytes(Bytes16 x, int bytes) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = bytes - 4 * i;  // of this word
    if (n < 4) x.x[i] = n <= 0 ? 0 : x.x[i] & ((1u << (8 * n)) - 1);
  }
  return x;
}

// The 8-bit floats of the caches. fn: no infinity, one NaN; fnuz: no negative zero, 0x80 is NaN, bias one higher.
struct e4m3fn { u8 bits; };
struct e5m2 { u8 bits; };
struct e4m3fnuz { u8 bits; };
struct e5m2fnuz { u8 bits; };

template <class C> struct Fp8;
template <> struct Fp8<e4m3fn> { static constexpr int kMantissa = 3, kBias = 7; static constexpr bool kFnuz = false; static constexpr u32 kMax = 0x7e; };
template <> struct Fp8<e5m2> { static constexpr int kMantissa = 2, kBias = 15; static constexpr bool kFnuz = false; static constexpr u32 kMax = 0x7b; };
template <> struct Fp8<e4m3fnuz> { static constexpr int kMantissa = 3, kBias = 8; static constexpr bool kFnuz = true; static constexpr u32 kMax = 0x7f; };
template <> struct Fp8<e5m2fnuz> { static constexpr int kMantissa = 2, kBias = 16; static constexpr bool kFnuz = true; static constexpr u32 kMax = 0x7f; };

constexpr u32 kNaN = 0x7fc00000u;

// An 8-bit float's value, exactly: its exponent and mantissa are placed in a float32 and the bias is mended by a
// multiplication, which also normalises subnormal numbers.
template <class C>
PA_DEVICE float fp8_to_float(u32 byte) {
  using F = Fp8<C>;
  const u32 magnitude = byte & 0x7f, sign = (byte & 0x80) << 24;
  const float value = bits_float(magnitude << (23 - F::kMantissa)) * bits_float(static_cast<u32>(254 - F::kBias) << 23);
  bool nan, infinite = false;
  if (F::kFnuz) {
    nan = byte == 0x80;
  } else if (F::kMantissa == 3) {
    nan = magnitude == 0x7f;
  } else {
    nan = magnitude > 0x7c;
    infinite = magnitude == 0x7c;
  }
  const u32 bits = nan ? kNaN : infinite ? 0x7f800000u : float_bits(value);
  return bits_float(bits | sign);
}
PA_DEVICE float to_float(e4m3fn x) { return fp8_to_float<e4m3fn>(x.bits); }
PA_DEVICE float to_float(e5m2 x) { return fp8_to_float<e5m2>(x.bits); }
PA_DEVICE float to_float(e4m3fnuz x) { return fp8_to_float<e4m3fnuz>(x.bits); }
PA_DEVICE float to_float(e5m2fnuz x) { return fp8_to_float<e5m2fnuz>(x.bits); }

// Whether one of four 8-bit floats is NaN or infinite.
template <class C>
PA_DEVICE bool any_special(u32 four) {
  using F = Fp8<C>;
  if (F::kFnuz) {
    const u32 x = four ^ 0x80808080u;  // NaN, 0x80, becomes a zero byte
    return ((x - 0x01010101u) & ~x & 0x80808080u) != 0;
  }
  constexpr u32 kMask = F::kMantissa == 3 ? 0x7f7f7f7fu : 0x7c7c7c7cu, kStep = F::kMantissa == 3 ? 0x01010101u : 0x04040404u;
  return (((four & kMask) + kStep) & 0x80808080u) != 0;
}

// Eight 8-bit floats in 16 bits: in the common case a shift, a mask and a multiplication each.
template <class T, class C>
PA_DEVICE Bytes16 widen8(const Bytes8& from) {
  using F = Fp8<C>;
  constexpr int kShift = 23 - F::kMantissa;
  const float scale = bits_float(static_cast<u32>(254 - F::kBias) << 23);
  Bytes16 to;
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const u32 four = from.x[w];
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 byte = four >> (8 * i);
      x[i] = bits_float(((byte & 0x80) << 24) | ((byte & 0x7f) << kShift)) * scale;
    }
    if (any_special<C>(four)) {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const float exact = fp8_to_float<C>(four >> (8 * i) & 0xff);
        x[0] = i == 0 ? exact : x[0];  // no index that is known only at run time: x stays in registers
        x[1] = i == 1 ? exact : x[1];
        x[2] = i == 2 ? exact : x[2];
        x[3] = i == 3 ? exact : x[3];
      }
    }
    to.x[2 * w] = pack2<T>(x[0], x[1]);
    to.x[2 * w + 1] = pack2<T>(x[2], x[3]);
  }
  return to;
}

// Rounds to nearest even and saturates; NaN stays NaN.
template <class C>
PA_DEVICE C float_to_fp8(float x) {
  using F = Fp8<C>;
  const u32 bits = float_bits(x), sign = (bits >> 24) & 0x80, magnitude = bits & 0x7fffffffu;
  C out;
  if (magnitude > 0x7f800000u) {
    out.bits = static_cast<u8>(F::kFnuz ? 0x80 : sign | 0x7f);
    return out;
  }
  constexpr u32 kSmallestNormal = static_cast<u32>(128 - F::kBias) << 23;
  u32 y;
  if (magnitude < kSmallestNormal) {  // subnormal: a multiple of the smallest step
    const float step = bits_float(magnitude) * bits_float(static_cast<u32>(127 + F::kBias - 1 + F::kMantissa) << 23);
    y = static_cast<u32>(rint_of(step));
  } else {
    constexpr int kDrop = 23 - F::kMantissa;
    const u32 rounded = magnitude + ((1u << (kDrop - 1)) - 1) + ((magnitude >> kDrop) & 1);
    y = (rounded >> kDrop) - (static_cast<u32>(127 - F::kBias) << F::kMantissa);
    if (y > F::kMax) y = F::kMax;
  }
  out.bits = static_cast<u8>(F::kFnuz && y == 0 ? 0 : y | sign);
  return out;
}

template <class C, bool kEightBit = sizeof(C) == 1>
struct Store {
  static PA_DEVICE C of(float x) { return from_float<C>(x); }
};
template <class C>
struct Store<C, true> {
  static PA_DEVICE C of(float x) { return float_to_fp8<C>(x); }
};

constexpr PA_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr PA_DEVICE int min_of(int a, int b) { return a < b ? a : b; }
constexpr PA_DEVICE int max_of(int a, int b) { return a > b ? a : b; }

// Of numbers that are not negative: unsigned division is the shorter.
constexpr PA_DEVICE int quotient(int a, int b) { return static_cast<int>(static_cast<u32>(a) / static_cast<u32>(b)); }

// a / d for 0 <= a < 2^31 and d > 1, by the host's constants for d (native.py, division).
PA_DEVICE int quotient_by(int a, u32 inverse, int shift) {
  return static_cast<int>((static_cast<u64>(static_cast<u32>(a)) * inverse) >> 32) >> shift;
}

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
#define PA_INFINITY (::portattn::bits_float(0x7f800000u))

// Copies 16 bytes to shared memory element by element: for rows that are not 16-byte aligned. `count` elements are
// read, the rest become zero.
template <class C>
PA_DEVICE void copy_elements16(void* shared, const C* global, int count) {
  constexpr int kN = 16 / sizeof(C);
  C* to = static_cast<C*>(shared);
#pragma unroll 1
  for (int i = 0; i < kN; ++i) {
    C x = {};
    if (i < count) x = global[i];
    to[i] = x;
  }
}

}  // namespace portattn
