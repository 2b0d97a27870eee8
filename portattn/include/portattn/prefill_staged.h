// prefill.h's tiles for devices without asynchronous copies: keys and values pass through registers. Sequences of few rows are left to
// decode.h, in a launch of its own before this one: a kernel that has both takes twice as long to compile.
//
// Tiling     as prefill.h; matrix tiles of 32 rows with MFMA. While a block's scores are computed its values are under way, while
//            they are added up the next keys. Operands are read from shared memory a step ahead where registers allow.
// Memory     shared: one stage: kN keys as rows, and kN values turned: a row for each of kD columns, so that the matrix
//            instruction's operand is read like one of keys. q is held in registers where they last and its place is the stage's.
//            8-bit caches are widened on their way to the stage. Two barriers a block.
// Vendor     mma.h's MatrixTiles with store_turned and multiply_twice.
#pragma once

#include "portattn/prefill.h"

namespace portattn {

// Matrix tiles of 32 rows where the device has them and head sizes are made of them.
template <int kD>
using StagedTiles = MatrixTiles<kMatrixLayout == kMfma && kD % 32 == 0 ? 32 : 16>;

template <class T, class C, int kD, int kWaves, int kM, int kN>
struct StagedPrefill : Prefill<T, C, kD, kWaves, kM, kN, StagedTiles<kD>> {
  using M = StagedTiles<kD>;
  using Base = Prefill<T, C, kD, kWaves, kM, kN, M>;
  using Acc = typename M::Acc;
  using FragA = typename M::FragA;
  using FragB = typename M::FragB;
  using Base::kGroups;
  using Base::kPitch;
  using Base::kQBytes;
  using Base::kRows;
  using Base::kRowTiles;
  using Base::kSide;
  using Base::kThreads;
  using Base::kTiles;
  using Base::kWaveRows;
  using Base::p;
  using typename Base::Tile;

  static constexpr int kSteps = kD / 16, kParts = kN / 16;  // matrix operands are 16 deep: of columns for the scores, of keys for the output
  static constexpr bool kHoldQ = warp::kWave == 64;  // of 512 registers; devices with waves of 32 have 256
  static constexpr int kTurnedPitch = kN + M::kTurnedPad;
  static constexpr int kStage = (kN * kPitch + kD * kTurnedPitch) * static_cast<int>(sizeof(T));
  static constexpr int kWork = kHoldQ ? max_of(kStage, kQBytes) : kStage + kQBytes;
  static constexpr int kSharedBytes = kWork + static_cast<int>(sizeof(typename Base::Queue));
  static constexpr int kSize = static_cast<int>(sizeof(C)), kEach = 16 / kSize, kPieces = kD / kEach;  // pieces of 16 bytes of a row of keys
  static constexpr int kKeyLoads = ceil_div(kN * kPieces, kThreads);
  static constexpr int kFours = kN / 4;                                                                // values: four keys, eight columns
  static constexpr int kValueLoads = ceil_div(kFours * (kD / 8), kThreads);

  struct Eight { u32 x[2 * kSize]; };  // columns of a value
  struct Keys { Bytes16 x[kKeyLoads]; };
  struct Values { Eight x[kValueLoads][4]; };
  struct Pages {  // of any size: each row has its own
    i32 keys[kKeyLoads], values[kValueLoads][4];
    u32 inverse;
    int whole_from;  // blocks of whose keys all bytes are taken as they are: whole_count from this one on
    u32 whole_count;
  };
  struct State : Base::State { FragA q[kHoldQ ? kRowTiles : 1][kHoldQ ? kSteps : 1]; };

  T* keys;
  T* turned;

  PA_DEVICE StagedPrefill(const AttentionParams& params, u8* memory, typename Base::Queue& queue) : Base(params, memory, queue) {
    keys = reinterpret_cast<T*>(memory);
    turned = keys + kN * kPitch;
    this->q_shared = reinterpret_cast<T*>(memory + (kHoldQ ? 0 : kStage));
  }

  // ---- where a thread's pieces are

  PA_DEVICE u32 piece(int j) const { return static_cast<u32>(j * kThreads + thread_x()); }
  PA_DEVICE int key_row(int j) const { return static_cast<int>(piece(j) / kPieces); }
  PA_DEVICE int key_column(int j) const { return static_cast<int>(piece(j) % kPieces) * kEach; }
  PA_DEVICE int value_row(int j) const { return static_cast<int>(piece(j) % kFours) * 4; }
  PA_DEVICE int value_column(int j) const { return static_cast<int>(piece(j) / kFours) * 8; }

  // ---- where a key lies: its page, and its row there. All of it is not negative: without a sign it takes half the instructions.

  // Of a page size that is no power of two: x / size is the product's upper half, or one more.
  PA_DEVICE u32 inverse_of_page_size() const { return (p.flags & kPaged) && p.page_shift < 0 ? ~0u / static_cast<u32>(p.page_size) : 0; }
  PA_DEVICE u32 page_number(u32 key, u32 inverse) const {
    if (!inverse) return key >> p.page_shift;
    const u32 size = static_cast<u32>(p.page_size), n = static_cast<u32>(static_cast<u64>(key) * inverse >> 32);
    return key - n * size < size ? n : n + 1;
  }
  // The first key that a row of the sequence sees: pages left of it may hold anything, and are not read.
  PA_DEVICE int first_seen(const Tile& t) const { return visible(p, t.s, 0, 0).lo; }
  PA_DEVICE void look_up(const Tile& t, int block, Pages& pages) const {
    pages = {{}, {}, pages.inverse, pages.whole_from, pages.whole_count};  // no register keeps what was there before
    if (!(p.flags & kPaged)) return;
    const u32 shift = p.flags & kTable64 ? 3 : 2;  // of an i64 the lower half is read
    const u8* table = in_global(static_cast<const u8*>(p.block_table)) + (t.b * p.table_batch << shift);
    const int lo = first_seen(t);
    auto page = [&](int key) {
      const u32 at = static_cast<u32>(min_of(max_of(key, lo), t.s.len_k - 1));
      return *reinterpret_cast<const i32*>(table + (static_cast<u64>(page_number(at, pages.inverse)) << shift));
    };
#pragma unroll
    for (int j = 0; j < kKeyLoads; ++j) pages.keys[j] = page(block * kN + key_row(j));
#pragma unroll
    for (int j = 0; j < kValueLoads; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) pages.values[j][i] = page(block * kN + value_row(j) + i);
  }

  // ---- from global memory to registers. A thread without a piece, and one of a key past the end or left of the first seen one's page, reads some row
  // that is there.

  struct Rows {  // of keys, or of values
    const C* base;
    u64 batch, token;
    u32 last, mask, inverse;  // mask: of a key's number, for its row in a page
    int dim;
  };
  template <bool kOfV>
  PA_DEVICE Rows rows_of(const Tile& t, u32 inverse) const {
    const bool paged = p.flags & kPaged;
    const i64 batch = kOfV ? p.v_batch : p.k_batch, token = kOfV ? p.v_token : p.k_token;
    const C* base = in_global(static_cast<const C*>(kOfV ? p.v : p.k)) + t.head_kv * (kOfV ? p.v_head : p.k_head);
    if (!paged) base += t.b * batch + t.s.start_k * token;
    return {base, static_cast<u64>(batch), static_cast<u64>(token), static_cast<u32>(t.s.len_k - 1), paged ? (1u << (p.page_shift & 31)) - 1 : ~0u, inverse,
            kOfV ? p.head_dim_v : p.head_dim};
  }
  PA_DEVICE const C* row_at(const Rows& rows, i32 page, int key, int d) const {
    const u32 at = static_cast<u32>(key) < rows.last ? static_cast<u32>(key) : rows.last;
    const u32 row = rows.inverse ? at - page_number(at, rows.inverse) * static_cast<u32>(p.page_size) : at & rows.mask;
    return rows.base + (static_cast<u32>(page) * rows.batch + row * rows.token + static_cast<u32>(d < rows.dim ? d : 0));
  }

  PA_DEVICE void fetch(const Tile& t, int block, const Pages& pages, Keys& x) const {
    if (!(p.flags & kAligned)) return;
    const Rows rows = rows_of<false>(t, pages.inverse);
#pragma unroll
    for (int j = 0; j < kKeyLoads; ++j)
      x.x[j] = *reinterpret_cast<const Bytes16*>(row_at(rows, pages.keys[j], block * kN + key_row(j), key_column(j)));
  }
  PA_DEVICE void fetch(const Tile& t, int block, const Pages& pages, Values& x) const {
    if (!(p.flags & kAligned)) return;
    const Rows rows = rows_of<true>(t, pages.inverse);
    struct alignas(8 * kSize) Aligned { Eight x; };
#pragma unroll
    for (int j = 0; j < kValueLoads; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x.x[j][i] = reinterpret_cast<const Aligned*>(row_at(rows, pages.values[j][i], block * kN + value_row(j) + i, value_column(j)))->x;
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
    const int dim = kOfV ? p.head_dim_v : p.head_dim, lo = first_seen(t);
#pragma unroll 1
    for (int i = thread_x(); i < kN * kD; i += kThreads) {
      const int r = i / kD, d = i % kD, key = block * kN + r;
      C x = {};
      if (key < t.s.len_k && key >= lo && d < dim) {
        const KvOffset at = kv_offset(p, t.s, page_of(p, t.b, key), key, t.head_kv);
        x = base[(kOfV ? at.v : at.k) + d];
      }
      T* to = kOfV ? turned + d * kTurnedPitch + M::turned_place(r) : keys + r * kPitch + place_in_row(r, d);
      if constexpr (sizeof(C) == sizeof(T)) to->bits = x.bits;
      else *to = from_float<T>(to_float(x));
    }
  }

  static PA_DEVICE bool whole_block(const Pages& pages, int block) { return static_cast<u32>(block - pages.whole_from) < pages.whole_count; }
  // Of a row that has `left` elements from a piece's first on: what is not there becomes zeros.
  PA_DEVICE int bytes_of(const Tile& t, int key, int left) const { return key < t.s.len_k && key >= first_seen(t) ? left * kSize : 0; }
  PA_DEVICE void land(const Tile& t, int block, const Pages& pages, const Keys& x) const {
    if (!(p.flags & kAligned)) return land_slowly<false>(t, block);
    const bool whole = whole_block(pages, block);
#pragma unroll
    for (int j = 0; j < kKeyLoads; ++j) {
      const int r = key_row(j), d = key_column(j);
      if (kN * kPieces % kThreads != 0 && r >= kN) continue;
      Bytes16 y = x.x[j];
      if (!whole) y = keep_bytes(y, bytes_of(t, block * kN + r, p.head_dim - d));
#pragma unroll
      for (int n = 0; n < kEach; n += 8) {
        Eight part;
#pragma unroll
        for (int i = 0; i < 2 * kSize; ++i) part.x[i] = y.x[n * kSize / 4 + i];
        store_eight(keys + r * kPitch + d + n, r & 8, widened(part));
      }
    }
  }
  PA_DEVICE void land(const Tile& t, int block, const Pages& pages, const Values& x) const {
    if (!(p.flags & kAligned)) return land_slowly<true>(t, block);
    const bool whole = whole_block(pages, block);
#pragma unroll
    for (int j = 0; j < kValueLoads; ++j) {
      const int r = value_row(j), d = value_column(j);
      if (kFours * (kD / 8) % kThreads != 0 && d >= kD) continue;
      Bytes16 rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[i] = widened(whole ? x.x[j][i] : masked(x.x[j][i], bytes_of(t, block * kN + r + i, p.head_dim_v - d)));
      M::template store_turned<T>(turned + d * kTurnedPitch, kTurnedPitch, r, rows);
    }
  }

  // ---- one tile

  PA_DEVICE FragA q_fragment(const State& st, int i, int d) const {
    if constexpr (kHoldQ) {
      return st.q[i][d];
    } else {
      FragA a;
      M::load_a(a, this->q_shared + (this->wave * kWaveRows + i * kSide) * kPitch + d * 16, kPitch);
      return a;
    }
  }

  // Products in steps of two operands from shared memory. With registers to spare, a step's are read while the step before is
  // multiplied; where the output takes most of them, nothing else is read far ahead.
  static constexpr bool kReadAhead = kHoldQ, kTight = !kHoldQ && kD >= 128;
  template <int kCount, class Read, class Multiply>
  static PA_DEVICE void in_steps(Read read, Multiply multiply) {
    FragB b[2][2];
    if (kReadAhead) read(0, b[0]);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (kReadAhead && n + 1 < kCount) read(n + 1, b[(n + 1) % 2]);
      if (kReadAhead || kTight) schedule_fence();
      if (!kReadAhead) read(n, b[n % 2]);
      multiply(n, b[n % 2]);
    }
  }

  PA_DEVICE void score(const State& st, Acc (&s)[kRowTiles][kGroups]) const {
    in_steps<kSteps / 2 * kGroups>(
        [&](int n, FragB (&kb)[2]) {
          const T* at = keys + n % kGroups * kSide * kPitch + n / kGroups * 32;
          M::load_b_rows(kb[0], at, kPitch);
          M::load_b_rows(kb[1], at + 16, kPitch);
        },
        [&](int n, const FragB (&kb)[2]) {
          const int g = n % kGroups, d = n / kGroups * 2;
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) M::template multiply_twice<T>(s[i][g], q_fragment(st, i, d), q_fragment(st, i, d + 1), kb[0], kb[1]);
        });
    if constexpr (kSteps % 2 != 0)
      in_steps<kGroups>([&](int g, FragB (&kb)[2]) { M::load_b_rows(kb[0], keys + g * kSide * kPitch + (kSteps - 1) * 16, kPitch); },
                        [&](int g, const FragB (&kb)[2]) {
#pragma unroll
                          for (int i = 0; i < kRowTiles; ++i) M::template multiply<T>(s[i][g], q_fragment(st, i, kSteps - 1), kb[0]);
                        });
  }

  PA_DEVICE void add_values(State& st, const FragA (&pa)[kRowTiles][kParts]) const {
    static_assert(kParts == 1 || kParts % 2 == 0, "parts of keys go in pairs");
    constexpr int kPairs = ceil_div(kParts, 2);
    in_steps<kTiles * kPairs>(
        [&](int n, FragB (&vb)[2]) {
          const T* from = turned + n / kPairs * kSide * kTurnedPitch + n % kPairs * 32;
          M::load_b_turned(vb[0], from, kTurnedPitch);
          if (kParts > 1) M::load_b_turned(vb[1], from + 16, kTurnedPitch);
        },
        [&](int n, const FragB (&vb)[2]) {
          const int d = n / kPairs, g = n % kPairs * 2;
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            if constexpr (kParts > 1) M::template multiply_twice<T>(st.o[i][d], pa[i][g], pa[i][g + 1], vb[0], vb[1]);
            else M::template multiply<T>(st.o[i][d], pa[i][0], vb[0]);
          }
        });
  }

  // One block of keys; what it needs of the params is read anew.
  PA_DEVICE void turn(const Tile& t, int block, State& st, Pages& pages, Keys& k) const {
    const int key = block * kN;
    const bool seen = key < st.any_hi && key + kN > st.any_lo;  // by a row of this wave
    land(t, block, pages, k);
    Values v;
    fetch(t, block, pages, v);
    block_sync();  // the keys are here, and nobody is at the last block's values any more
    FragA pa[kRowTiles][kParts];
    if (seen) {
      Acc s[kRowTiles][kGroups] = {};
      score(st, s);
      this->soften(t, st, key, s);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int g = 0; g < kParts; ++g) pa[i][g] = M::template to_a<T>(s[i][g * 16 / kSide], g % (kSide / 16));
    }
    land(t, block, pages, v);
    if (block + 1 < t.last) {
      look_up(t, block + 1, pages);
      fetch(t, block + 1, pages, k);
    }
    block_sync();  // the values are here, and nobody is at the keys any more
    if (seen) add_values(st, pa);
  }

  PA_DEVICE void run(int number) const {
    Tile t = this->tile(number);
    // Else gfx90a has a scalar register too few for it.
    if constexpr (kHoldQ && (kD == 64 || kD == 96) && kSize == 1) t.first_row = uniform(anew(t.first_row));
    Pages pages = {};
    pages.inverse = static_cast<u32>(uniform(static_cast<int>(inverse_of_page_size())));
    pages.whole_from = ceil_div(first_seen(t), kN);
    pages.whole_count = p.head_dim == kD && p.head_dim_v == kD ? static_cast<u32>(max_of(0, t.s.len_k / kN - pages.whole_from)) : 0;
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
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int d = 0; d < kSteps; ++d) M::load_a(st.q[i][d], this->q_shared + (this->wave * kWaveRows + i * kSide) * kPitch + d * 16, kPitch);
      block_sync();  // before the stage takes q's place
    }
    this->enter(t, st);
    auto params = params_of(p);
#pragma unroll 1
    for (int block = t.first; block < t.last; ++block) StagedPrefill(params.anew(), this->stages, this->queue).turn(t, block, st, pages, k);
    block_sync();  // the stage's place is q's again
    StagedPrefill(params.anew(), this->stages, this->queue).write(t, st);
  }

  // A block's whole work: its tile, if there are so many.
  static PA_DEVICE void run(const AttentionParams& p, u8* memory, int block) {
    typename Base::Queue& queue = *reinterpret_cast<typename Base::Queue*>(memory + kWork);
    if (block < StagedPrefill(p, memory, queue).count()) StagedPrefill(anew(p), memory, queue).run(block);
  }
};

}  // namespace portattn
