// Entry point of portattn/plain.h: macros as in decode.cu.
#include "portattn/plain.h"

using namespace portattn;
using Kernel = PlainDecode<PA_T, PA_C, PA_D, PA_WAVES, PA_STAGES>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, PA_BLOCKS)
portattn_plain(const __grid_constant__ PlainParams<PA_D> p) {
  Kernel(p, shared_memory(), block_x()).run();
}
