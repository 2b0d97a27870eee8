// Entry point of portattn/merge.h: PA_T is the type of the outs.
#include "portattn/merge.h"

using namespace portattn;

PA_KERNEL(128, 1) void portattn_merge(const MergeParams p) { merge<PA_T, 128>(p, block_x()); }
