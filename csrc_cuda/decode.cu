// Entry point of portattn/decode.h. One instance an object: PA_T, PA_C (types of q and of the cache), PA_D, PA_WAVES,
// PA_STAGES and PA_BLOCKS (blocks that an SM shall hold) come from the compiler's command line.
#include "portattn/decode.h"

using namespace portattn;
using Kernel = Decode<PA_T, PA_C, PA_D, PA_WAVES, PA_STAGES>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, PA_BLOCKS)
portattn_decode(const __grid_constant__ AttentionParams p) {
  await_launch_before();
  if (p.flags & kTiled) let_next_launch_begin();  // of the tiles: the two have nothing to do with each other
  Kernel(p, shared_memory()).run(block_x(), block_y(), p.flags & kTiled);
}
