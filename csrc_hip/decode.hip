// Entry point of portattn/decode.h. One instance an object: PA_T, PA_C (types of q and of the cache), PA_D, PA_WAVES,
// PA_STAGES and PA_BLOCKS (blocks that a compute unit shall hold) come from the compiler's command line. Shared memory
// is static: its size stands in the object's metadata, and launches ask for none.
#include "portattn/decode.h"

using namespace portattn;
using Kernel = Decode<PA_T, PA_C, PA_D, PA_WAVES, PA_STAGES>;

PA_KERNEL(Kernel::kThreads, 1) void portattn_decode(const AttentionParams p) {
  __attribute__((shared)) static u8 memory[Kernel::kSharedBytes] __attribute__((aligned(128)));
  Kernel(p, memory).run(block_x(), block_y(), false);
}
