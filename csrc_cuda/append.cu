// Entry point of portattn/append.h: PA_T, PA_C are the types of the new rows and of the cache.
#include "portattn/append.h"

using namespace portattn;

extern "C" __global__ void __launch_bounds__(128) portattn_append(const __grid_constant__ AppendParams p) {
  await_launch_before();
  append<PA_T, PA_C, 128>(p, block_x());
}
