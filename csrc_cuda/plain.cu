// Entry point of plain.h: macros as in decode.cu; PA_RAGGED: 1 where q has cu_seqlens; PA_CLUSTERS: 1 where a line, a column of blocks, is
// a cluster.
#include "plain.h"

using namespace portattn;
using Kernel = PlainDecode<PA_T, PA_C, PA_D, PA_WAVES, PA_STAGES, PA_RAGGED, PA_CLUSTERS>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, PA_BLOCKS)
portattn_plain(const __grid_constant__ Kernel::P p) {
  await_launch_before();
  if (PA_RAGGED && p.dialect() & kTiled) let_next_launch_begin();  // of the tiles: the two have nothing to do with each other
  Kernel(p, shared_memory(), block_x(), block_y()).run();
}
