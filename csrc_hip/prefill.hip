// Entry point of portattn/prefill_staged.h: prefill tiles of PA_M times 16 rows a wave, PA_N keys at a time; the rest as in decode.hip.
//
// Bound   prefill: issue, by counts of the finished object as it runs (tests/isa/test_prefill.py; bfloat16, 128 columns, dense). A wave's
//         32 rows times 64 keys are 524288 multiplications and 32 KiB read from LDS, free of bank conflicts.
//                  matrix instructions, clocks   instructions   the same clocks, four an instruction and nothing overlapped
//         gfx90a   64, 4096                      1164           0.88
//         gfx942   64, 2048                      1116           0.46
#include "portattn/prefill_staged.h"

using namespace portattn;
using Kernel = StagedPrefill<PA_T, PA_C, PA_D, PA_WAVES, PA_M, PA_N>;

// Waves a SIMD shall hold: gfx950's registers allow this many, if the compiler takes two less than it would.
constexpr int kLeastWaves = kMatrixTwice && PA_D == 96 && sizeof(PA_C) == 1 ? 3 : 1;

PA_KERNEL(Kernel::kThreads, kLeastWaves) void portattn_prefill(const AttentionParams p) {
  __attribute__((shared)) static u8 memory[Kernel::kSharedBytes] __attribute__((aligned(128)));
  Kernel::run(p, memory, block_x());
}
