// Every primitive of warp.h against its contract: one block per launch, each thread writes what it got, and the host
// (portattn/selftest.py) compares with the contract's shared-memory code in Python.
//
// Layout     out[row * threads + thread] as 32-bit words; the rows are listed in portattn/selftest.py, in this order.
// Vendor     all of warp.h, pack2 and the conversions of vendor.h.
#pragma once

#include "portattn/vec.h"
#include "warp.h"

namespace portattn {

struct SelftestParams {
  const u32* in;  // a word a thread
  u32* out;
};

template <int kThreads>
struct Selftest {
  u32* out;
  int row = 0;

  PA_DEVICE void put(u32 x) { out[row++ * kThreads + thread_x()] = x; }
  PA_DEVICE void put(float x) { put(float_bits(x)); }

  template <int W>
  PA_DEVICE void width(u32 x, float f) {
    put(warp::shfl_xor<W>(x, 1));
    if (W > 2) put(warp::shfl_xor<W>(x, 2 % W));
    if (W > 4) put(warp::shfl_xor<W>(x, 4 % W));
    if (W > 8) put(warp::shfl_xor<W>(x, 8 % W));
    if (W > 16) put(warp::shfl_xor<W>(x, 16 % W));
    put(warp::shfl_xor<W>(x, W - 1));
    put(warp::shfl_idx<W>(x, 0));
    put(warp::shfl_idx<W>(x, static_cast<int>(x & 63)));  // each lane another, wrapping
    put(warp::shfl_down<W>(x, 1));
    put(warp::shfl_down<W>(x, W / 2));
    put(warp::shfl_up<W>(x, 1));
    put(warp::shfl_up<W>(x, W / 2));
    put(warp::reduce_sum<W>(f));
    put(static_cast<u32>(warp::reduce_sum<W>(static_cast<int>(x & 0xffff))));
    put(warp::reduce_max<W>(f));
  }

  PA_DEVICE void run(const SelftestParams& p, float* shared) {
    out = p.out;
    const u32 x = p.in[thread_x()];
    const float f = bits_float(x);
    put(static_cast<u32>(warp::lane()));
    put(static_cast<u32>(warp::wave_lane()));
    put(static_cast<u32>(warp::wave_index()));
    width<2>(x, f);
    width<4>(x, f);
    width<8>(x, f);
    width<16>(x, f);
    width<32>(x, f);
    put(warp::ballot(x & 1));
    put(static_cast<u32>(warp::any(x & 1)));
    put(static_cast<u32>(warp::all(x & 1)));
    put(static_cast<u32>(warp::any((x & 7) == 7 && thread_x() / 32 == 1)));  // in one logical warp only
    put(static_cast<u32>(warp::wave_any((x & 7) == 7 && thread_x() / 32 == 1)));
    // One logical warp works alone: its neighbour in the same wave goes elsewhere.
    u32 alone = 0;
    if (thread_x() / 32 % 2 == 0) alone = warp::shfl_idx<32>(x, 31 - warp::lane()) + warp::ballot(x & 2) + static_cast<u32>(warp::reduce_sum<32>(static_cast<int>(x & 255)));
    put(alone);
    // sync orders shared memory: each lane reads its neighbour's word.
    shared[thread_x()] = f;
    warp::sync();
    put(shared[thread_x() ^ 1]);
    warp::wave_sync();
    shared[thread_x()] = static_cast<float>(thread_x());
    warp::wave_sync();
    put(shared[thread_x() ^ (warp::kWave - 1)]);
    put(pack2<f16>(f, -f));
    put(pack2<bf16>(f, -f));
    put(to_float(f16{static_cast<u16>(x)}));
    put(to_float(bf16{static_cast<u16>(x)}));
  }
};

}  // namespace portattn
