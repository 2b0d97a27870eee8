// Entry point of portattn/merge.h: PA_T is the type of the outs.
#include "portattn/merge.h"

using namespace portattn;

extern "C" __global__ void __launch_bounds__(128) portattn_merge(const __grid_constant__ MergeParams p) {
  await_launch_before();
  merge<PA_T, 128>(p, block_x());
}
