// 8-bit floats in 16 bits, exactly: by the device's own conversions where it has them for the format, else two at a time by
// arithmetic on bit patterns.
#pragma once

#include "portattn/vec.h"

namespace portattn {

template <class C>
constexpr bool kConverts = Fp8<C>::kFnuz ? kConvertsFnuz : kConvertsOcp;

// Two 8-bit floats, each the upper byte of 16 bits. Exponent and mantissa move to where the wider format has them, a multiplication
// mends the bias and normalises subnormal numbers.
template <class C, class T>
PA_DEVICE u32 widen_two(u32 two) {
  using F = Fp8<C>;
  if constexpr (__is_same(C, e5m2)) {  // the upper half of an f16
    return __is_same(T, f16) ? two : pack2_exact<T>(to_float(f16{static_cast<u16>(two)}), to_float(f16{static_cast<u16>(two >> 16)}));
  } else {
    const u32 sign = two & 0x80008000u, magnitude = two & 0x7f007f00u;
    const u32 nan = F::kFnuz ? sign & ~(magnitude + 0x7f007f00u) : (magnitude + 0x01000100u) & 0x80008000u;  // the sign alone; all ones
    u32 x;
    if constexpr (__is_same(T, f16) && F::kMantissa == 3) {
      x = times_pair(sign | magnitude >> 1, static_cast<u16>((30 - F::kBias) << 10));
    } else {
      const u32 y = sign | magnitude >> (F::kMantissa + 1);
      const float factor = bits_float(static_cast<u32>(254 - F::kBias) << 23);
      x = pack2_exact<T>(bits_float(y << 16) * factor, bits_float(y & 0xffff0000u) * factor);
    }
    return x | (nan - (nan >> 15));
  }
}

// Four 8-bit floats of type C as two pairs of T; `lo` has the first two.
template <class C, class T>
PA_DEVICE void widen4(C, T, u32 four, u32& lo, u32& hi) {
  if constexpr (kConverts<C> && !(__is_same(C, e5m2) && __is_same(T, f16))) {
    float x[2], y[2];
    convert_two<Fp8<C>::kMantissa, false>(four, x);
    convert_two<Fp8<C>::kMantissa, true>(four, y);
    lo = pack2_exact<T>(x[0], x[1]);
    hi = pack2_exact<T>(y[0], y[1]);
  } else {
    lo = widen_two<C, T>((four & 0xffu) << 8 | (four & 0xff00u) << 16);
    hi = widen_two<C, T>((four & 0xff0000u) >> 8 | (four & 0xff000000u));
  }
}

}  // namespace portattn
