// prefill.h's tiles for devices without asynchronous copies: keys and values pass through registers.
//
// Tiling     as prefill.h. While a block's scores are computed its values are under way, while they are added up the next keys.
// Memory     shared: one stage: kN keys as rows, and kN values turned: a row for each of kD columns, so that the matrix
//            instruction's operand is read like one of keys. q is held in registers where they last and its place is the stage's.
//            8-bit caches are widened on their way to the stage. Two barriers a block.
// Vendor     mma.h with store_turned and multiply_twice.
#pragma once

#include "portattn/prefill.h"

namespace portattn {

template <class T, class C, int kD, int kWaves, int kM, int kN>
struct StagedPrefill : Prefill<T, C, kD, kWaves, kM, kN> {
  using Base = Prefill<T, C, kD, kWaves, kM, kN>;
  using Base::kGroups;
  using Base::kPitch;
  using Base::kQBytes;
  using Base::kRows;
  using Base::kThreads;
  using Base::kTiles;
  using Base::kWaveRows;
  using Base::p;
  using typename Base::Tile;

  static constexpr bool kHoldQ = warp::kWave == 64;  // of 512 registers; devices with waves of 32 have 256
  static constexpr int kTurnedPitch = kN + mma::kTurnedPad;
  static constexpr int kStage = (kN * kPitch + kD * kTurnedPitch) * static_cast<int>(sizeof(T));
  static constexpr int kSharedBytes = kHoldQ ? max_of(kStage, kQBytes) : kStage + kQBytes;
  static constexpr int kSize = static_cast<int>(sizeof(C)), kEach = 16 / kSize, kPieces = kD / kEach;  // pieces of 16 bytes of a row of keys
  static constexpr int kKeyLoads = ceil_div(kN * kPieces, kThreads);
  static constexpr int kFours = kN / 4;                                                                // values: four keys, eight columns
  static constexpr int kValueLoads = ceil_div(kFours * (kD / 8), kThreads);

  struct Eight { u32 x[2 * kSize]; };  // columns of a value
  struct Keys { Bytes16 x[kKeyLoads]; };
  struct Values { Eight x[kValueLoads][4]; };
  struct Pages { i32 keys[kKeyLoads], values[kValueLoads][4]; };  // of any size: each row has its own
  struct State : Base::State { mma::FragA q[kHoldQ ? kM : 1][kHoldQ ? kTiles : 1]; };

  T* keys;
  T* turned;

  PA_DEVICE StagedPrefill(const AttentionParams& params, u8* memory, typename Base::Queue& queue) : Base(params, memory, queue) {
    keys = reinterpret_cast<T*>(memory);
    turned = keys + kN * kPitch;
    this->q_shared = reinterpret_cast<T*>(memory + (kHoldQ ? 0 : kStage));
  }

  // ---- where a thread's pieces are

  PA_DEVICE int key_row(int j) const { return (j * kThreads + thread_x()) / kPieces; }
  PA_DEVICE int key_column(int j) const { return (j * kThreads + thread_x()) % kPieces * kEach; }
  PA_DEVICE int value_row(int j) const { return (j * kThreads + thread_x()) % kFours * 4; }
  PA_DEVICE int value_column(int j) const { return (j * kThreads + thread_x()) / kFours * 8; }

  PA_DEVICE void look_up(const Tile& t, int block, Pages& pages) const {
    auto page = [&](int key) { return static_cast<i32>(page_of(p, t.b, min_of(key, t.s.len_k - 1))); };
#pragma unroll
    for (int j = 0; j < kKeyLoads; ++j) pages.keys[j] = page(block * kN + key_row(j));
#pragma unroll
    for (int j = 0; j < kValueLoads; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) pages.values[j][i] = page(block * kN + value_row(j) + i);
  }

  // ---- from global memory to registers: a thread without a piece reads the first bytes of the tensor

  PA_DEVICE void fetch(const Tile& t, int block, const Pages& pages, Keys& x) const {
    if (!(p.flags & kAligned)) return;
    const C* base = in_global(static_cast<const C*>(p.k));
#pragma unroll
    for (int j = 0; j < kKeyLoads; ++j) {
      const int r = key_row(j), key = block * kN + r, d = key_column(j);
      const i64 at = kv_offset(p, t.s, pages.keys[j], key, t.head_kv).k + d;
      x.x[j] = *reinterpret_cast<const Bytes16*>(base + (r < kN && key < t.s.len_k && d < p.head_dim ? at : 0));
    }
  }
  PA_DEVICE void fetch(const Tile& t, int block, const Pages& pages, Values& x) const {
    if (!(p.flags & kAligned)) return;
    const C* base = in_global(static_cast<const C*>(p.v));
#pragma unroll
    for (int j = 0; j < kValueLoads; ++j) {
      const int d = value_column(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        struct alignas(8 * kSize) Aligned { Eight x; };
        const int key = block * kN + value_row(j) + i;
        const i64 at = kv_offset(p, t.s, pages.values[j][i], key, t.head_kv).v + d;
        x.x[j][i] = reinterpret_cast<const Aligned*>(base + (key < t.s.len_k && d < p.head_dim_v ? at : 0))->x;
      }
    }
  }

  // ---- and to shared memory

  static PA_DEVICE Bytes16 widened(const Eight& x) {
    Bytes16 y;
#pragma unroll
    for (int w = 0; w < 2 * kSize; ++w) {
      if constexpr (sizeof(C) == sizeof(T)) y.x[w] = x.x[w];
      else widen4(C{}, T{}, x.x[w], y.x[2 * w], y.x[2 * w + 1]);
    }
    return y;
  }
  static PA_DEVICE Eight masked(const Eight& x, int bytes) {
    Eight y;
#pragma unroll
    for (int i = 0; i < 2 * kSize; ++i) {
      const int n = bytes - 4 * i;
      y.x[i] = n >= 4 ? x.x[i] : n <= 0 ? 0 : x.x[i] & ((1u << (8 * n)) - 1);
    }
    return y;
  }
  // Rows that are not aligned: element by element, only now.
  template <bool kOfV>
  PA_DEVICE void land_slowly(const Tile& t, int block) const {
    const C* base = in_global(static_cast<const C*>(kOfV ? p.v : p.k));
    const int dim = kOfV ? p.head_dim_v : p.head_dim;
#pragma unroll 1
    for (int i = thread_x(); i < kN * kD; i += kThreads) {
      const int r = i / kD, d = i % kD, key = block * kN + r;
      C x = {};
      if (key < t.s.len_k && d < dim) {
        const KvOffset at = kv_offset(p, t.s, page_of(p, t.b, key), key, t.head_kv);
        x = base[(kOfV ? at.v : at.k) + d];
      }
      T* to = kOfV ? turned + d * kTurnedPitch + mma::turned_place(r) : keys + r * kPitch + place_in_row(r, d);
      if constexpr (sizeof(C) == sizeof(T)) to->bits = x.bits;
      else *to = from_float<T>(to_float(x));
    }
  }

  PA_DEVICE void land(const Tile& t, int block, const Keys& x) const {
    if (!(p.flags & kAligned)) return land_slowly<false>(t, block);
    const bool whole = (block + 1) * kN <= t.s.len_k && p.head_dim == kD;
#pragma unroll
    for (int j = 0; j < kKeyLoads; ++j) {
      const int r = key_row(j), d = key_column(j);
      if (kN * kPieces % kThreads != 0 && r >= kN) continue;
      Bytes16 y = x.x[j];
      if (!whole) y = keep_bytes(y, block * kN + r < t.s.len_k ? (p.head_dim - d) * kSize : 0);
#pragma unroll
      for (int n = 0; n < kEach; n += 8) {
        Eight part;
#pragma unroll
        for (int i = 0; i < 2 * kSize; ++i) part.x[i] = y.x[n * kSize / 4 + i];
        store_eight(keys + r * kPitch + d + n, r & 8, widened(part));
      }
    }
  }
  PA_DEVICE void land(const Tile& t, int block, const Values& x) const {
    if (!(p.flags & kAligned)) return land_slowly<true>(t, block);
    const bool whole = (block + 1) * kN <= t.s.len_k && p.head_dim_v == kD;
#pragma unroll
    for (int j = 0; j < kValueLoads; ++j) {
      const int r = value_row(j), d = value_column(j);
      if (kFours * (kD / 8) % kThreads != 0 && d >= kD) continue;
      Bytes16 rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[i] = widened(whole ? x.x[j][i] : masked(x.x[j][i], block * kN + r + i < t.s.len_k ? (p.head_dim_v - d) * kSize : 0));
      mma::store_turned<T>(turned + d * kTurnedPitch, kTurnedPitch, r, rows);
    }
  }

  // ---- one tile

  PA_DEVICE mma::FragA q_fragment(const State& st, int i, int d) const {
    if constexpr (kHoldQ) {
      return st.q[i][d];
    } else {
      mma::FragA a;
      mma::load_a(a, this->q_shared + (this->wave * kWaveRows + i * 16) * kPitch + d * 16, kPitch);
      return a;
    }
  }

  static constexpr bool kTight = kD >= (warp::kWave == 64 ? 192 : 128);  // the output takes many registers: nothing is read far ahead

  PA_DEVICE void score(const State& st, mma::Acc (&s)[kM][kGroups]) const {
#pragma unroll
    for (int d = 0; d < kTiles; d += 2) {
      if (kTight) schedule_fence();
      const bool two = d + 1 < kTiles;  // known once unrolled
      mma::FragA qa[2][kM];
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        qa[0][i] = q_fragment(st, i, d);
        if (two) qa[1][i] = q_fragment(st, i, d + 1);
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        mma::FragB kb[2];
        mma::load_b_rows(kb[0], keys + g * 16 * kPitch + d * 16, kPitch);
        if (two) mma::load_b_rows(kb[1], keys + g * 16 * kPitch + d * 16 + 16, kPitch);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          if (two) mma::multiply_twice<T>(s[i][g], qa[0][i], qa[1][i], kb[0], kb[1]);
          else mma::multiply<T>(s[i][g], qa[0][i], kb[0]);
        }
      }
    }
  }

  PA_DEVICE void add_values(State& st, const mma::FragA (&pa)[kM][kGroups]) const {
    static_assert(kGroups == 1 || kGroups % 2 == 0, "groups of keys go in pairs");
#pragma unroll
    for (int d = 0; d < kTiles; ++d) {
      if (kTight) schedule_fence();
#pragma unroll
      for (int g = 0; g < kGroups; g += 2) {
        mma::FragB vb[2];
        mma::load_b_turned(vb[0], turned + d * 16 * kTurnedPitch + g * 16, kTurnedPitch);
        if (kGroups > 1) mma::load_b_turned(vb[1], turned + d * 16 * kTurnedPitch + g * 16 + 16, kTurnedPitch);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          if constexpr (kGroups > 1) mma::multiply_twice<T>(st.o[i][d], pa[i][g], pa[i][g + 1], vb[0], vb[1]);
          else mma::multiply<T>(st.o[i][d], pa[i][0], vb[0]);
        }
      }
    }
  }

  // One block of keys; what it needs of the params is read anew.
  PA_DEVICE void turn(const Tile& t, int block, State& st, Pages& pages, Keys& k) const {
    const int key = block * kN;
    const bool seen = key < st.any_hi && key + kN > st.any_lo;  // by a row of this wave
    land(t, block, k);
    Values v;
    fetch(t, block, pages, v);
    block_sync();  // the keys are here, and nobody is at the last block's values any more
    mma::FragA pa[kM][kGroups];
    if (seen) {
      mma::Acc s[kM][kGroups] = {};
      score(st, s);
      this->soften(t, st, key, s);
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) pa[i][g] = mma::to_a<T>(s[i][g]);
    }
    land(t, block, v);
    if (block + 1 < t.last) {
      look_up(t, block + 1, pages);
      fetch(t, block + 1, pages, k);
    }
    block_sync();  // the values are here, and nobody is at the keys any more
    if (seen) add_values(st, pa);
  }

  PA_DEVICE void run(int number) const {
    const Tile t = this->tile(number);
    Pages pages;
    Keys k;
    if (t.first < t.last) {
      look_up(t, t.first, pages);
      fetch(t, t.first, pages, k);
    }
    load_q<T, kD, kRows, kThreads>(p, t.s, t.b, t.head_kv, t.first_row, this->q_shared, kPitch);
    block_sync();
    State st;
    if constexpr (kHoldQ) {
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int d = 0; d < kTiles; ++d) mma::load_a(st.q[i][d], this->q_shared + (this->wave * kWaveRows + i * 16) * kPitch + d * 16, kPitch);
      block_sync();  // before the stage takes q's place
    }
    this->enter(t, st);
    auto params = params_of(p);
#pragma unroll 1
    for (int block = t.first; block < t.last; ++block) StagedPrefill(params.anew(), this->stages, this->queue).turn(t, block, st, pages, k);
    block_sync();  // the stage's place is q's again
    StagedPrefill(params.anew(), this->stages, this->queue).write(t, st);
    block_sync();  // before the next tile's q
  }
};

template <class T, class C, int kD, int kWaves, int kStages, int kM, int kN>
using StagedMixed = MixedOf<Decode<T, C, kD, kWaves, kStages>, StagedPrefill<T, C, kD, kWaves, kM, kN>>;

}  // namespace portattn
