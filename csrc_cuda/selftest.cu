// Entry point of portattn/selftest.h.
#include "portattn/selftest.h"

using namespace portattn;

extern "C" __global__ void __launch_bounds__(128) portattn_selftest(const __grid_constant__ SelftestParams p) {
  __shared__ float memory[128];
  Selftest<128> test;
  test.run(p, memory);
}
