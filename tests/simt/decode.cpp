// The decode kernel on the host; the instance is chosen by the same macros as csrc_cuda/decode.cu.
#include "portattn/decode.h"

using namespace portattn;
using Kernel = Decode<PA_T, PA_C, PA_D, PA_WAVES, PA_STAGES>;

extern "C" int portattn_simt_decode(const AttentionParams* p, int grid_x, int grid_y, int order, unsigned seed, char* error, int capacity) {
  const std::string text = simt::launch(grid_x, grid_y, Kernel::kThreads, Kernel::kSharedBytes, static_cast<simt::Order>(order), seed,
                                        [&] { Kernel(*p, shared_memory()).run(block_x(), block_y(), p->flags & kTiled); });
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}

extern "C" int portattn_simt_shared_bytes() { return Kernel::kSharedBytes; }
extern "C" int portattn_simt_params_bytes() { return sizeof(AttentionParams); }
