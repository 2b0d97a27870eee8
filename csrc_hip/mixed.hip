// Entry point of portattn/prefill_staged.h: prefill tiles and decode parts in one launch. PA_M row tiles a wave and PA_N keys
// at a time; the rest as in decode.hip.
#include "portattn/prefill_staged.h"

using namespace portattn;
using Kernel = StagedMixed<PA_T, PA_C, PA_D, PA_WAVES, PA_STAGES, PA_M, PA_N>;

PA_KERNEL(Kernel::kThreads, 1) void portattn_mixed(const AttentionParams p) {
  __attribute__((shared)) static u8 memory[Kernel::kSharedBytes] __attribute__((aligned(128)));
  Kernel::run(p, memory, block_x(), grid_x(Kernel::kThreads));
}
