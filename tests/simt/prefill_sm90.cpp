// The Hopper prefill kernel on the host.
#include "../../csrc_cuda/prefill_sm90.h"

using namespace portattn;
using Kernel = PrefillSm90<PA_T, PA_D, PA_CONSUMERS, PA_N>;

extern "C" int portattn_simt_prefill_sm90(const AttentionParams* p, int grid_x, int grid_y, int order, unsigned seed, char* error, int capacity) {
  const std::string text = simt::launch(grid_x, grid_y, Kernel::kThreads, Kernel::kSharedBytes + sm90::kAlignment, static_cast<simt::Order>(order), seed,
                                        [&] { Kernel(*p, sm90::shared_tiles()).run(block_x(), portattn::grid_x()); });
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}

extern "C" int portattn_simt_shared_bytes() { return Kernel::kSharedBytes; }
