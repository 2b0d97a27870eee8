// The self-test of warp.h on the host.
#include "portattn/selftest.h"

using namespace portattn;

extern "C" int portattn_simt_selftest(const SelftestParams* p, int grid_x, int grid_y, int order, unsigned seed, char* error, int capacity) {
  const std::string text = simt::launch(grid_x, grid_y, 128, 128 * sizeof(float), static_cast<simt::Order>(order), seed, [&] {
    Selftest<128> test;
    test.run(*p, reinterpret_cast<float*>(shared_memory()));
  });
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}
