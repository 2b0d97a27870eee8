// The merge kernel on the host.
#include "portattn/merge.h"

using namespace portattn;

extern "C" int portattn_simt_merge(const MergeParams* p, int grid_x, int grid_y, int order, unsigned seed, char* error, int capacity) {
  const std::string text = simt::launch(grid_x, grid_y, 128, 0, static_cast<simt::Order>(order), seed, [&] { merge<PA_T, 128>(*p, block_x()); });
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}
