// Entry point of portattn/selftest.h.
#include "portattn/selftest.h"

using namespace portattn;

PA_KERNEL(128, 1) void portattn_selftest(const SelftestParams p) {
  __attribute__((shared)) static float memory[128];
  Selftest<128> test;
  test.run(p, memory);
}
