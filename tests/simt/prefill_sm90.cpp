// The Hopper prefill kernel on the host.
#include "../../csrc_cuda/prefill_sm90.h"

using namespace portattn;
#ifdef PA_TOGETHER
using Kernel = PrefillSm90<PA_T, PA_C, PA_D, PA_CONSUMERS, PA_N, PA_BOXED, PA_TOGETHER>;
#else
using Kernel = PrefillSm90<PA_T, PA_C, PA_D, PA_CONSUMERS, PA_N, PA_BOXED>;
#endif

extern "C" int portattn_simt_prefill_sm90(const AttentionParams* p, const TileMaps* maps, int grid_x, int grid_y, int order, unsigned seed, char* error, int capacity) {
  const std::string text = simt::launch(grid_x, grid_y, Kernel::kThreads, Kernel::kSharedBytes + sm90::kAlignment, static_cast<simt::Order>(order), seed,
                                        [&] { Kernel(*p, *maps, sm90::shared_tiles()).run(block_x(), portattn::grid_x()); });
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}

extern "C" int portattn_simt_shared_bytes() { return Kernel::kSharedBytes; }

extern "C" int portattn_simt_encode(sm90::TensorMap* map, int type, unsigned rank, const void* base, const u64* shape, const u64* strides,
                                    const unsigned* box, const unsigned* steps, int interleave, int swizzle, int promotion, int fill) {
  return sm90::encode(map, type, rank, base, shape, strides, box, steps, interleave, swizzle, promotion, fill);
}
