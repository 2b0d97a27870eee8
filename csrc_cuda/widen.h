// 8-bit floats to f16, which holds all of them exactly.
#pragma once

#include "portattn/vec.h"

namespace portattn {

// Four values to two pairs, NaN and infinities too.
template <class C>
PA_DEVICE void widen4(u32 four, u32& low, u32& high) {
  if constexpr (Fp8<C>::kMantissa == 3) {
    halves_of_e4m3(four, low, high);
  } else {  // e5m2 is the upper half of an f16
    low = pick_bytes(four, 0, 0x1404);
    high = pick_bytes(four, 0, 0x3424);
  }
}

}  // namespace portattn
