// Entry point of portattn/append.h: PA_T, PA_C are the types of the new rows and of the cache.
#include "portattn/append.h"

using namespace portattn;

PA_KERNEL(128, 1) void portattn_append(const AppendParams p) { append<PA_T, PA_C, 128>(p, block_x()); }
