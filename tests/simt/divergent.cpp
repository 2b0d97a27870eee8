// Not a kernel of portattn: a block whose lanes disagree on which barrier they are at. The host device must say where.
#include <warp.h>

using namespace portattn;

extern "C" int portattn_simt_divergent(const void*, int, int, int order, unsigned seed, char* error, int capacity) {
  const std::string text = simt::launch(1, 1, 64, 0, static_cast<simt::Order>(order), seed, [] {
    if (thread_x() == 5) warp::sync();
    else block_sync();
  });
  std::snprintf(error, capacity, "%s", text.c_str());
  return !text.empty();
}
