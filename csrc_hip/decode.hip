// Entry point of portattn/decode.h. One instance an object: PA_T, PA_C (types of q and of the cache), PA_D, PA_WAVES,
// PA_STAGES and PA_BLOCKS (blocks that a compute unit shall hold) come from the compiler's command line. Shared memory
// is static: its size stands in the object's metadata, and launches ask for none.
//
// Bound   memory, by counts of the finished object as it runs (tests/isa/test_attention.py; bfloat16, 128 columns). A unit is 64
//         keys and values of 256 bytes, 32 KiB, a block's four waves beside each other; loads are 16 bytes a lane, LDS is free
//         of bank conflicts (gfx942: 640 clocks a unit, gfx1100: 1280).
//                  a compute unit's part of memory   clocks to load a unit   instructions a wave   clocks to issue
//         gfx942   8.3 bytes a clock                 3950                    775                   3290: 0.83
//         gfx1100  8.3, of a pair of units           3930                    1316                  1810: 0.46
//         So the instructions allow all of the bandwidth, even if none of them overlapped with another. In flight: the next
//         unit's 32 KiB; 1000 clocks of latency need 8.3 KiB.
#include "portattn/decode.h"

using namespace portattn;
using Kernel = Decode<PA_T, PA_C, PA_D, PA_WAVES, PA_STAGES>;

// Waves a SIMD shall hold: gfx950's registers allow this many, if the compiler takes two less than it would.
constexpr int kLeastWaves = kMatrixTwice && PA_D == 80 && __is_same(PA_C, bf16) ? 4 : 1;

PA_KERNEL(Kernel::kThreads, kLeastWaves) void portattn_decode(const AttentionParams p) {
  __attribute__((shared)) static u8 memory[Kernel::kSharedBytes] __attribute__((aligned(128)));
  Kernel(p, memory).run(block_x(), block_y(), p.flags & kTiled);
}
