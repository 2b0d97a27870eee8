// All 256 codes of an 8-bit type, PA_C, through csrc_hip/fp8.h: thread i has four of them; out[4i ..] are they in float16, two
// words, and in bfloat16.
#include "fp8.h"

using namespace portattn;

struct WidenParams { u32* out; };

PA_KERNEL(64, 1) void portattn_widen(const WidenParams p) {
  const u32 first = 4 * thread_x(), four = first | (first + 1) << 8 | (first + 2) << 16 | (first + 3) << 24;
  u32* out = in_global(p.out) + first;
  widen4(PA_C{}, f16{}, four, out[0], out[1]);
  widen4(PA_C{}, bf16{}, four, out[2], out[3]);
}
