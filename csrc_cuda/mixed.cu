// Entry point of portattn/prefill.h: prefill tiles and decode parts in one launch. PA_M row tiles a wave and PA_N keys
// at a time; the rest as in decode.cu.
#include "portattn/prefill.h"

using namespace portattn;
using Kernel = Mixed<PA_T, PA_C, PA_D, PA_WAVES, PA_STAGES, PA_M, PA_N>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, PA_BLOCKS)
portattn_mixed(const __grid_constant__ AttentionParams p) {
  await_launch_before();
  Kernel::run(p, shared_memory(), block_x(), grid_x());
}
