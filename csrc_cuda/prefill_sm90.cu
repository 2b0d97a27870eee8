// Entry point of prefill_sm90.h: PA_T of q, PA_C of keys and values, PA_D, PA_CONSUMERS warpgroups that compute, PA_N keys at a time.
#include "prefill_sm90.h"

using namespace portattn;
using Kernel = PrefillSm90<PA_T, PA_C, PA_D, PA_CONSUMERS, PA_N, PA_BOXED>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
portattn_prefill_sm90(const __grid_constant__ AttentionParams p, const __grid_constant__ TileMaps maps) {
  const bool beside = p.flags & kTiled;  // the launch before computes the same call's few rows: the two need nothing of each other
  if (!beside) await_launch_before();
  Kernel(p, maps, sm90::shared_tiles()).run(block_x(), grid_x());
  if (beside) await_launch_before();  // what comes next in the stream waits for this launch alone
}
