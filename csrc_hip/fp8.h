// 8-bit floats in 16 bits, exactly: by the device's own conversions where it has them for the format, else by the bit
// patterns of portattn/vec.h.
#pragma once

#include "portattn/vec.h"

namespace portattn {

template <class C>
constexpr bool kConverts = Fp8<C>::kFnuz ? kConvertsFnuz : kConvertsOcp;

// Two of four, the higher two or the lower.
template <class C, bool kHigh>
PA_DEVICE void to_floats(u32 four, float (&x)[2]) {
  if constexpr (kConverts<C>) {
    convert_two<Fp8<C>::kMantissa, kHigh>(four, x);
  } else {
    const u32 two = kHigh ? four >> 16 : four;
    if constexpr (__is_same(C, e5m2)) {
      x[0] = to_float(f16{static_cast<u16>(two << 8)});
      x[1] = to_float(f16{static_cast<u16>(two & 0xff00u)});
    } else {
      x[0] = to_float(C{static_cast<u8>(two)});
      x[1] = to_float(C{static_cast<u8>(two >> 8)});
    }
  }
}

// Four 8-bit floats of type C as two pairs of T; `lo` has the first two.
template <class C, class T>
PA_DEVICE void widen4(C, T, u32 four, u32& lo, u32& hi) {
  if constexpr (__is_same(C, e5m2) && __is_same(T, f16)) {  // an e5m2 is the upper half of an f16
    lo = (four & 0xffu) << 8 | (four & 0xff00u) << 16;
    hi = (four & 0xff0000u) >> 8 | (four & 0xff000000u);
    return;
  }
  float x[2], y[2];
  to_floats<C, false>(four, x);
  to_floats<C, true>(four, y);
  lo = pack2_exact<T>(x[0], x[1]);
  hi = pack2_exact<T>(y[0], y[1]);
}

}  // namespace portattn
