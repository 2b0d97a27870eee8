// The append kernel on the host.
#include "portattn/append.h"

using namespace portattn;

extern "C" int portattn_simt_append(const AppendParams* p, int grid_x, int grid_y, int order, unsigned seed, char* error, int capacity) {
  const std::string text = simt::launch(grid_x, grid_y, 128, 0, static_cast<simt::Order>(order), seed, [&] { append<PA_T, PA_C, 128>(*p, block_x()); });
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}
