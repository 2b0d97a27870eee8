// The decode kernel of plain calls on the host; the instance is chosen by the same macros as csrc_cuda/plain.cu.
#include "../../csrc_cuda/plain.h"

using namespace portattn;
using Kernel = PlainDecode<PA_T, PA_C, PA_D, PA_WAVES, PA_STAGES, PA_RAGGED, PA_CLUSTERS>;

extern "C" int portattn_simt_plain(const Kernel::P* p, int grid_x, int grid_y, int order, unsigned seed, char* error, int capacity) {
  const std::string text = simt::launch(grid_x, grid_y, Kernel::kThreads, Kernel::kSharedBytes, static_cast<simt::Order>(order), seed,
                                        [&] { Kernel(*p, shared_memory(), block_x(), block_y()).run(); }, PA_CLUSTERS ? grid_y : 1);
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}

extern "C" int portattn_simt_shared_bytes() { return Kernel::kSharedBytes; }
extern "C" int portattn_simt_params_bytes() { return sizeof(Kernel::P); }
