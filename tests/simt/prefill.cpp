// Prefill tiles whose keys and values pass through registers, on the host.
#include "portattn/prefill_staged.h"

using namespace portattn;
using Kernel = StagedPrefill<PA_T, PA_C, PA_D, PA_WAVES, PA_M, PA_N>;

extern "C" int portattn_simt_prefill(const AttentionParams* p, int grid_x, int grid_y, int order, unsigned seed, char* error, int capacity) {
  const std::string text = simt::launch(grid_x, grid_y, Kernel::kThreads, Kernel::kSharedBytes, static_cast<simt::Order>(order), seed,
                                        [&] { Kernel::run(*p, shared_memory(), block_x()); });
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}

extern "C" int portattn_simt_shared_bytes() { return Kernel::kSharedBytes; }
