// Attention of few query rows over long keys: decode, speculative and chunked steps, any layout.
//
// Computes   out = softmax(score(q.k)) v for tiles of 16 packed rows (query tokens x the heads of one kv head). A
//            block is a worker of schedule.h; its waves take 16 keys each of every unit and run apart from each
//            other, each with its own copies in flight; at a tile's end they merge through shared memory.
// Layouts    q, out by strides; k, v dense, varlen or paged (kv_view.h), q's type or an 8-bit one.
// Tiling     unit = 16 keys x kWaves; a wave holds 16 x kD of the output, 16 x 16 scores at a time.
// Memory     shared: kWaves x kStages x 16 keys of k and v, rows padded by 16 bytes. A finished tile's output passes
//            through the wave's stage that was just consumed: 16 rows of float32 fit where 16 keys of k and v stood.
//            8-bit caches are widened through one stage a wave of q's type. With one stage, for devices without
//            asynchronous copies, keys and values wait in registers instead, and are widened on their way to the stage.
// Math       S = Q K^T and O += P V on 16x16x16 matrix tiles, scores in units of log2.
// Numerics   float32 accumulation; probabilities rounded to q's type. Splits merge in order of keys: same bits every run.
// Cost       bytes of k and v, each once (per tile): bound by memory. Flops 4 x 16 rows x kD a key.
// Vendor     mma.h tiles, 16-byte asynchronous copies, one atomic counter a shared tile.
// Source     split keys and the merge of states: FlashDecoding; even parts of one line of work: stream-K.
#pragma once

#include "mma.h"
#include "portattn/online_softmax.h"
#include "portattn/rows.h"
#include "portattn/schedule.h"

namespace portattn {

template <class T, class C, int kD, int kWaves, int kStages, class P = AttentionParams>
struct Decode {
  static_assert(kD % 16 == 0 && kD <= 256, "head sizes are padded to multiples of 16");
  static constexpr bool kStaged = kStages == 1;                 // through registers
  static constexpr int kThreads = kWaves * warp::kWave;
  static constexpr int kKeys = 16;
  static constexpr int kUnit = kKeys * kWaves;
  static constexpr int kPitch = kD + 8;                         // of T
  static constexpr bool kWiden = sizeof(C) != sizeof(T);
  // Copies of rows that are whole lines of 128 bytes land line on line: a line in memory that falls across two of shared memory is asked
  // for in pieces, half of its sectors twice. Instead of padding, a row's number turns the pieces within its lines.
  static constexpr bool kTurned = !kStaged && kD * sizeof(C) % 128 == 0;
  static constexpr int kCachePitch = kD + (kTurned ? 0 : 16 / sizeof(C));  // of C
  static constexpr int kTilePitch = kWiden ? kPitch : kCachePitch;         // of what is multiplied
  static constexpr int kStageBytes = 2 * kKeys * kCachePitch * static_cast<int>(sizeof(C));
  static constexpr int kTileBytes = 2 * kKeys * kPitch * static_cast<int>(sizeof(T));
  static constexpr int kWaveBytes = kStaged ? kTileBytes : kStages * kStageBytes + (kWiden ? kTileBytes : 0);
  static constexpr int kQBytes = kTileRows * kPitch * static_cast<int>(sizeof(T));
  static constexpr int kTiles = kD / 16;
  static constexpr bool kHoldQ = kTiles * sizeof(mma::FragA) <= 128;  // in 32 registers at most; else read again for every 16 keys

  struct Small {
    float m[kWaves][kTileRows], l[kWaves][kTileRows];
    ScheduleShared schedule;
    int arrived;
  };
  struct Ends {  // of a wave, with one stage: what only the ends of segments need
    Cursor<kUnit, P> c;  // at the segment's begin
    Deal dealt;
    int worker;
  };
  static constexpr int kEndsBytes = kStaged ? kWaves * static_cast<int>(sizeof(Ends)) : 0;
  static constexpr int kSharedBytes = kWaves * kWaveBytes + kQBytes + kEndsBytes + static_cast<int>(sizeof(Small));

  const P& p;
  u8* waves;  // of all waves
  T* q_shared;
  Small& small;
  int wave, lane;
  Deal dealt;

  PA_DEVICE Decode(const P& params, u8* memory)
      : p(params), waves(memory), q_shared(reinterpret_cast<T*>(memory + kWaves * kWaveBytes)),
        small(*reinterpret_cast<Small*>(memory + kWaves * kWaveBytes + kQBytes + kEndsBytes)), wave(warp::wave_index()), lane(warp::wave_lane()) {}

  // Where column d of row r lies in a stage.
  static PA_DEVICE int place(int r, int d) {
    constexpr int kEach = 16 / static_cast<int>(sizeof(C));
    return r * kCachePitch + (kTurned ? d ^ (r & 7) * kEach : d);
  }
  PA_DEVICE u8* stage(int w, int i) const { return waves + w * kWaveBytes + i * kStageBytes; }
  PA_DEVICE T* widened(int w) const { return reinterpret_cast<T*>(waves + w * kWaveBytes + (kStaged ? 0 : kStages * kStageBytes)); }
  PA_DEVICE Ends& ends() const { return reinterpret_cast<Ends*>(waves + kWaves * kWaveBytes + kQBytes)[wave]; }
  // Where a wave leaves its part of a finished tile: float32, kTileRows x kD.
  PA_DEVICE float* result(int w, int slot) const {
    return kWiden ? reinterpret_cast<float*>(widened(w)) : reinterpret_cast<float*>(stage(w, slot));
  }

  // ---- loading

  // The page of this wave's keys of a unit, looked up one unit ahead of its use.
  PA_DEVICE i64 look_up(const Cursor<kUnit, P>& c) const { return look_up(c, c.key() + wave * kKeys); }
  PA_DEVICE i64 look_up(const Cursor<kUnit, P>& c, int key) const {
    return (p.flags & kUniformPages) && key < c.s.len_k ? page_of(p, c.b, key) : 0;
  }

  // Starts the copies of this wave's keys and values of a unit.
  PA_DEVICE void load(const Cursor<kUnit, P>& c, i64 page, int slot) const {
    const int lo = p.window_left >= 0 ? visible(p, c.s, token_of(p, c.first_row), 0).lo : 0;
    load(c.s, c.b, c.head_kv, page, c.key() + wave * kKeys, slot, lo);
  }
  // Of the 16 keys from `first` on.
  PA_DEVICE void load(const Sequence& s, int b, int head, i64 page, int first, int slot, int lo) const {
    constexpr int kSize = static_cast<int>(sizeof(C)), kEach = 16 / kSize, kPieces = kD / kEach, kAll = kKeys * kPieces;
    C* k_to = reinterpret_cast<C*>(stage(wave, slot));
    C* v_to = k_to + kKeys * kCachePitch;
    const int count = first + kKeys > lo ? s.len_k - first : 0;  // a page left of all windows is not read
    const C* k_base = static_cast<const C*>(p.k);
    const C* v_base = static_cast<const C*>(p.v);
    if ((p.flags & (kUniformPages | kAligned)) == (kUniformPages | kAligned)) {
      // Keys past the length: no byte is read of them, and their addresses do not matter.
      const KvOffset base = kv_offset(p, s, page, first, head);
      if (warp::kWave % kPieces == 0) {  // a lane stays in its column: pointers move by a constant
        constexpr int kRows = max_of(1, warp::kWave / kPieces);
        const int r = lane / kPieces, d = lane % kPieces * kEach, left = count - r;
        const C* k_from = k_base + base.k + r * p.k_token + d;
        const C* v_from = v_base + base.v + r * p.v_token + d;
        const int k_bytes = min_of(16, max_of(0, p.head_dim - d) * kSize), v_bytes = min_of(16, max_of(0, p.head_dim_v - d) * kSize);
#pragma unroll
        for (int i = 0; i < kKeys / kRows; ++i) {
          copy_async16(k_to + place(r + i * kRows, d), k_from, i * kRows < left ? k_bytes : 0);
          k_from += kRows * p.k_token;
        }
#pragma unroll
        for (int i = 0; i < kKeys / kRows; ++i) {
          copy_async16(v_to + place(r + i * kRows, d), v_from, i * kRows < left ? v_bytes : 0);
          v_from += kRows * p.v_token;
        }
        return;
      }
#pragma unroll
      for (int i = 0; i < ceil_div(kAll, warp::kWave); ++i) {
        const int piece = i * warp::kWave + lane, r = piece / kPieces, d = piece % kPieces * kEach;
        if (kAll % warp::kWave != 0 && piece >= kAll) break;
        const int k_bytes = min_of(16, max_of(0, p.head_dim - d) * kSize), v_bytes = min_of(16, max_of(0, p.head_dim_v - d) * kSize);
        copy_async16(k_to + place(r, d), k_base + base.k + r * p.k_token + d, r < count ? k_bytes : 0);
        copy_async16(v_to + place(r, d), v_base + base.v + r * p.v_token + d, r < count ? v_bytes : 0);
      }
      return;
    }
    // Pages that 16 keys may straddle, and rows that are not aligned.
#pragma unroll 1
    for (int piece = lane; piece < kAll; piece += warp::kWave) {
      const int r = piece / kPieces, d = piece % kPieces * kEach;
      KvOffset at = {0, 0};
      const bool some = r < count && first + r >= lo;
      if (some) at = kv_offset(p, s, page_of(p, b, first + r), first + r, head);
#pragma unroll 1
      for (int of_v = 0; of_v < 2; ++of_v) {
        C* to = (of_v ? v_to : k_to) + place(r, d);
        const C* from = (of_v ? v_base + at.v : k_base + at.k) + d;
        const int n = some ? min_of(kEach, max_of(0, (of_v ? p.head_dim_v : p.head_dim) - d)) : 0;
        if (p.flags & kAligned) copy_async16(to, n ? from : of_v ? v_base : k_base, n * kSize);
        else copy_elements16(to, from, n);
      }
    }
  }

  // A stage of 8-bit keys and values in q's type.
  PA_DEVICE void widen(int slot) const {
    const C* from = reinterpret_cast<const C*>(stage(wave, slot));
    T* to = widened(wave);
#pragma unroll 2
    for (int i = lane; i < 2 * kKeys * (kD / 8); i += warp::kWave) {
      const int r = i / (kD / 8), d = i % (kD / 8) * 8;
      *reinterpret_cast<Bytes16*>(to + r * kPitch + d) = widen8<T, C>(*reinterpret_cast<const Bytes8*>(from + place(r, d)));
    }
  }

  // ---- loading through registers

  static constexpr int kEach = 16 / static_cast<int>(sizeof(C));                     // elements of a piece of 16 bytes
  static constexpr int kPieces = kD / kEach;                                         // of a row
  static constexpr int kLoads = ceil_div(kKeys * kPieces, warp::kWave);              // of a lane, for 16 keys or their values
  // What is fetched a unit ahead, so that output, q and pieces leave half of 256 registers or so: 2 keys and values, 1 keys (values
  // while the scores are computed), 0 neither.
  static constexpr int kOutRegisters = kTiles * mma::kAcc, kPieceRegisters = 4 * kLoads;
  static constexpr int kQRegisters = kHoldQ ? kTiles * static_cast<int>(sizeof(mma::FragA)) / 4 : 0;
  static constexpr int kAhead = kOutRegisters + kQRegisters + 2 * kPieceRegisters <= (kWiden ? 128 : 160) ? 2 : kOutRegisters + kPieceRegisters <= (kWiden ? 112 : 140) ? 1 : 0;
  static constexpr int kScoreUnroll = kStaged && kAhead == 0 ? 2 : kTiles;
  static constexpr int kParts = kAhead == 0 ? 2 : 1, kPart = ceil_div(kLoads, kParts);  // with nothing ahead, half the pieces at a time
  struct Pieces { Bytes16 x[kPart]; };

  PA_DEVICE bool whole(const Cursor<kUnit, P>& c, int first) const {
    constexpr i64 kFar = (1 << 30) / (kKeys * static_cast<int>(sizeof(C)));  // rows are addressed by 32 bits from the first
    return (p.flags & (kUniformPages | kAligned)) == (kUniformPages | kAligned) && c.s.len_k - first >= kKeys && p.k_token < kFar &&
           p.v_token < kFar;
  }
  PA_DEVICE int bytes_from(int d, bool of_v) const {
    return min_of(16, max_of(0, (of_v ? p.head_dim_v : p.head_dim) - d) * static_cast<int>(sizeof(C)));
  }
  // A piece's way into the wave's tile of q's type; `upper`: r is 8 or more.
  template <bool kOfV>
  PA_DEVICE void put(int r, bool upper, int d, const Bytes16& x) const {
    T* to = widened(wave) + ((kOfV ? kKeys : 0) + r) * kPitch + d;
    if constexpr (!kWiden) {
      store_eight(to, upper, x);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Bytes16 y;
#pragma unroll
        for (int w = 0; w < 2; ++w) widen4(C{}, T{}, x.x[2 * half + w], y.x[2 * w], y.x[2 * w + 1]);
        store_eight(to + 8 * half, upper, y);
      }
    }
  }
  // Starts the loads of 16 keys (or their values) of the cursor's sequence, where they are whole.
  template <bool kOfV, int kNth = 0>
  PA_DEVICE void fetch(const Cursor<kUnit, P>& c, int first, i64 page, Pieces& x) const {
    x = {};
    if (!whole(c, first)) return;
    const KvOffset at = kv_offset(p, c.s, page, first, c.head_kv);
    const C* base = in_global(static_cast<const C*>(kOfV ? p.v : p.k)) + (kOfV ? at.v : at.k);
    const u32 token = static_cast<u32>(kOfV ? p.v_token : p.k_token);
    const int dim = kOfV ? p.head_dim_v : p.head_dim;
    auto offset = [&](int piece) {  // a lane without a piece reads some address that can be read
      const int r = piece / kPieces, d = piece % kPieces * kEach;
      return (r < kKeys && d < dim ? r * token + d : 0) * static_cast<u32>(sizeof(C));
    };
    constexpr bool kColumn = warp::kWave % kPieces == 0;  // a lane stays in its column
    constexpr int kRows = max_of(1, warp::kWave / kPieces);
    const u32 mine = offset(lane);
#pragma unroll
    for (int n = 0; n < kPart; ++n) {
      const int i = kNth * kPart + n;
      const i64 from = uniform(reinterpret_cast<i64>(kColumn ? base + static_cast<i64>(i) * kRows * token : base));
      x.x[n] = *reinterpret_cast<const Bytes16*>(in_global(reinterpret_cast<const u8*>(from)) + (kColumn ? mine : offset(i * warp::kWave + lane)));
    }
  }
  // The first key that a row of the segment's sequence sees. Pages left of it may hold anything: they are not read, and come as zeros.
  PA_DEVICE int first_seen() const { return p.window_left >= 0 ? visible(p, uniform(ends().c.s), 0, 0).lo : 0; }
  // Waits for them and leaves them in the wave's tile; where they are not whole (the last keys of a sequence, pages
  // that 16 keys straddle, rows that are not aligned) they are read only now.
  template <bool kOfV, int kNth = 0>
  PA_DEVICE void land(const Cursor<kUnit, P>& c, int first, const Pieces& x) const {
    if (whole(c, first)) {
      const bool padded = (kOfV ? p.head_dim_v : p.head_dim) != kD;
      constexpr bool kTogether = (8 * kPieces) % warp::kWave == 0;  // a wave's pieces are all of rows 0 .. 7, or of 8 .. 15
#pragma unroll
      for (int n = 0; n < kPart; ++n) {
        const int begin = (kNth * kPart + n) * warp::kWave, piece = begin + lane, r = piece / kPieces, d = piece % kPieces * kEach;
        if ((kKeys * kPieces) % (kPart * warp::kWave) != 0 && r >= kKeys) continue;
        put<kOfV>(r, (kTogether ? begin / kPieces : r) & 8, d, padded ? keep_bytes(x.x[n], bytes_from(d, kOfV)) : x.x[n]);
      }
      return;
    }
    if (kNth) return;
    const int count = c.s.len_k - first, lo = first_seen() - first;
#pragma unroll 1
    for (int piece = lane; piece < kKeys * kPieces; piece += warp::kWave) {
      const int r = piece / kPieces, d = piece % kPieces * kEach, bytes = r < count && r >= lo ? bytes_from(d, kOfV) : 0;
      Bytes16 y = {};
      if (bytes > 0) {
        const KvOffset at = kv_offset(p, c.s, page_of(p, c.b, first + r), first + r, c.head_kv);
        const C* from = in_global(static_cast<const C*>(kOfV ? p.v : p.k)) + (kOfV ? at.v : at.k) + d;
        if (p.flags & kAligned) {
          y = keep_bytes(*reinterpret_cast<const Bytes16*>(from), bytes);
        } else {
          constexpr int kBits = 8 * static_cast<int>(sizeof(C));
#pragma unroll 1
          for (int e = 0; e < kEach; ++e) {  // each comes in at the upper end: small code
            const u32 next = e * static_cast<int>(sizeof(C)) < bytes ? from[e].bits : 0;
#pragma unroll
            for (int w = 0; w < 4; ++w) y.x[w] = y.x[w] >> kBits | (w < 3 ? y.x[w + 1] : next) << (32 - kBits);
          }
        }
      }
      put<kOfV>(r, r & 8, d, y);
    }
  }

  // ---- one tile's state in registers

  struct State {
    mma::Acc o[kTiles];
    float m[mma::kSlots], l[mma::kSlots];  // l: this lane's part of the sum
    mma::FragA q[kHoldQ ? kTiles : 1];
    Row row[mma::kSlots];
    Score scoring;
    int clear_lo, clear_hi;  // keys that every row sees: no mask there
  };

  // The empty state. Set when a segment is finished, not when the next begins: so the compiler knows that no register
  // of a state is in use while states are merged.
  static PA_DEVICE void clear(State& st) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < mma::kAcc; ++e) st.o[t].x[e] = 0.0f;
#pragma unroll
    for (int i = 0; i < mma::kSlots; ++i) {
      st.m[i] = -PA_INFINITY;
      st.l[i] = 0.0f;
    }
#pragma unroll
    for (int t = 0; t < (kHoldQ ? kTiles : 1); ++t) st.q[t] = {};
  }

  // Begins the cursor's tile: its q is in shared memory already.
  PA_DEVICE void begin(const Cursor<kUnit, P>& c, State& st) const {
    if (kHoldQ) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mma::load_a(st.q[t], q_shared + t * 16, kPitch);
    }
    const int head = c.head_kv;
#pragma unroll
    for (int i = 0; i < mma::kSlots; ++i) st.row[i] = row_of(p, c.s, c.b, head, c.first_row + mma::row(i));
    st.scoring = score_of(p, p.k_scale ? in_global(p.k_scale)[c.b * p.scale_batch_k + head * p.scale_head_k] : 1.0f);
    const int shift = c.s.len_k - c.s.len_q;
    const int first = token_of(p, c.first_row), last = min_of(c.s.len_q - 1, token_of(p, c.first_row + kTileRows - 1));
    st.clear_lo = p.window_left >= 0 ? last + shift - p.window_left : 0;
    st.clear_hi = p.window_right >= 0 ? min_of(c.s.len_k, first + shift + min_of(p.window_right, 1 << 30) + 1) : c.s.len_k;
  }

  // One unit: this wave's 16 keys, from `key` on. `between` is called when the keys are consumed and the values are not yet.
  template <class Between>
  PA_DEVICE void step(const Sequence& seq, int key, State& st, int slot, Between between) const {
    const T* k = kWiden ? widened(wave) : reinterpret_cast<const T*>(stage(wave, slot));
    const T* v = k + kKeys * kTilePitch;
    mma::Acc s[2] = {};
#pragma unroll kScoreUnroll
    for (int t = 0; t < kTiles; ++t) {
      mma::FragB kb;
      if constexpr (kTurned && !kWiden) mma::load_b_rows(kb, k, kTilePitch, t * 16);
      else mma::load_b_rows(kb, k + t * 16, kTilePitch);
      if (kHoldQ) {
        mma::multiply<T>(s[t & 1], st.q[t], kb);
      } else {
        mma::FragA qa;
        mma::load_a(qa, q_shared + t * 16, kPitch);
        mma::multiply<T>(s[t & 1], qa, kb);
      }
    }
    float x[mma::kAcc];
#pragma unroll
    for (int e = 0; e < mma::kAcc; ++e) x[e] = (s[0].x[e] + s[1].x[e]) * st.scoring.scale;
    if (st.scoring.cap > 0.0f) {
#pragma unroll
      for (int e = 0; e < mma::kAcc; ++e) x[e] = st.scoring.cap * tanh_of(x[e]);
    }
    if (p.alibi) {
#pragma unroll
      for (int e = 0; e < mma::kAcc; ++e) {
        const int distance = st.row[mma::slot_of(e)].position - (key + mma::col(e));
        x[e] -= st.row[mma::slot_of(e)].slope * static_cast<float>(distance < 0 ? -distance : distance);
      }
    }
    if (key < st.clear_lo || key + kKeys > st.clear_hi) {
#pragma unroll
      for (int e = 0; e < mma::kAcc; ++e)
        if (!sees(p, seq, st.row[mma::slot_of(e)], key + mma::col(e))) x[e] = -PA_INFINITY;
    }

    float top[mma::kSlots], shrink[mma::kSlots];
#pragma unroll
    for (int i = 0; i < mma::kSlots; ++i) top[i] = st.m[i];
#pragma unroll
    for (int e = 0; e < mma::kAcc; ++e) top[mma::slot_of(e)] = max_of(top[mma::slot_of(e)], x[e]);
    mma::row_max(top);
    bool moved = false;
#pragma unroll
    for (int i = 0; i < mma::kSlots; ++i) {
      moved |= top[i] != st.m[i];
      shrink[i] = weight(st.m[i], top[i]);
      st.m[i] = top[i];
      if (top[i] == -PA_INFINITY) top[i] = 0.0f;
    }
    if (warp::wave_any(moved)) {
#pragma unroll
      for (int i = 0; i < mma::kSlots; ++i) st.l[i] *= shrink[i];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 0; e < mma::kAcc; ++e) st.o[t].x[e] *= shrink[mma::slot_of(e)];
    }
    mma::Acc prob;
#pragma unroll
    for (int e = 0; e < mma::kAcc; ++e) {
      prob.x[e] = exp2_fast(x[e] - top[mma::slot_of(e)]);
      st.l[mma::slot_of(e)] += prob.x[e];
    }
    const mma::FragA pa = mma::to_a<T>(prob);
    between();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      mma::FragB vb;
      if constexpr (kTurned && !kWiden) mma::load_b_cols(vb, v, kTilePitch, t * 16);
      else mma::load_b_cols(vb, v + t * 16, kTilePitch);
      mma::multiply<T>(st.o[t], pa, vb);
    }
  }

  // ---- finishing

  // Leaves this wave's state where the block can merge it.
  PA_DEVICE void publish(State& st, int rows, int slot) const {
    mma::row_sum(st.l);
    float* to = result(wave, slot);
#pragma unroll
    for (int i = 0; i < mma::kSlots; ++i) {
      if (mma::row(i) >= rows) continue;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mma::store_row(st.o[t], i, to + mma::row(i) * kD + t * 16);
      small.m[wave][mma::row(i)] = st.m[i];
      small.l[wave][mma::row(i)] = st.l[i];
    }
  }

  // A state in the workspace: partial_rows x kD of o (unnormalised, relative to m), then m, then l.
  PA_DEVICE float* slot_memory(int slot) const { return in_global(p.partial) + static_cast<i64>(slot) * p.partial_rows * (kD + 2); }

  PA_DEVICE void write_row(const Cursor<kUnit, P>& c, int r, int d, const float (&o)[4], float m, float l) const {
    write_row(c.s, c.b, c.head_kv, c.first_row + r, d, o, m, l);
  }
  PA_DEVICE void write_row(const Sequence& s, int b, int head_kv, int packed, int d, const float (&o)[4], float m, float l) const {
    const int token = token_of(p, packed), head = head_kv * p.group + packed - token * p.group;
    const Finish f = finish<T>(p, m, l, head);
    float factor = f.factor * p.v_factor;
    if (p.v_scale) factor *= in_global(p.v_scale)[b * p.scale_batch_v + head_kv * p.scale_head_v];
    const float y[4] = {o[0] * factor, o[1] * factor, o[2] * factor, o[3] * factor};
    write_out<T>(p, out_offset(p, s, b, token, head), d, y);
    if (p.lse && d == 0) in_global(p.lse)[lse_offset(p, s, b, token, head)] = f.lse;
  }

  // Merges the waves' states; `slot` is where in the workspace they go, negative if the tile is complete.
  PA_DEVICE void merge_waves(const Cursor<kUnit, P>& c, int rows, int stage_slot, int slot) const {
    for (int i = thread_x(); i < rows * (kD / 4); i += kThreads) {
      const int r = i / (kD / 4), d = i % (kD / 4) * 4;
      float m = small.m[0][r];
#pragma unroll
      for (int w = 1; w < kWaves; ++w) m = max_of(m, small.m[w][r]);
      float l = 0.0f, o[4] = {};
#pragma unroll
      for (int w = 0; w < kWaves; ++w) {
        const float factor = weight(small.m[w][r], m);
        l += factor * small.l[w][r];
        const Float4 x = *reinterpret_cast<const Float4*>(result(w, stage_slot) + r * kD + d);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] += factor * x.x[e];
      }
      if (slot < 0) {
        write_row(c, r, d, o, m, l);
        continue;
      }
      float* to = slot_memory(slot);
      *reinterpret_cast<Float4*>(to + r * kD + d) = {{o[0], o[1], o[2], o[3]}};
      if (d == 0) {
        to[p.partial_rows * kD + r] = m;
        to[p.partial_rows * (kD + 1) + r] = l;
      }
    }
  }

  // Merges `count` states of the workspace, in order, into the result. State 0 is in slot first, state i in
  // next + (i - 1) * stride. A thread has four columns of a row; weights are found by a warp a row, a lane a state.
  PA_DEVICE void merge_slots(const Cursor<kUnit, P>& c, int rows, int count, int first, int next, int stride, int stage_slot) const {
    constexpr int kCols = kD / 4, kRowsAtOnce = max_of(1, kThreads / kCols), kBatch = kStaged ? 4 : 8;  // kBatch loads wait together
    struct Weights { float of[kRowsAtOnce][32], keep[kRowsAtOnce], m[kRowsAtOnce], l[kRowsAtOnce]; };
    static_assert(sizeof(Weights) <= (kStaged || kWiden ? kTileBytes : kStageBytes), "the weights pass through a stage that is not in use");
    Weights& weights = *reinterpret_cast<Weights*>(result(0, stage_slot));
    const float* begin = slot_memory(first);
    const float* others = slot_memory(next);
    const i64 pitch = static_cast<i64>(stride) * p.partial_rows * (kD + 2);
    auto memory = [&](int state) { return state == 0 ? begin : others + (state - 1) * pitch; };
    for (int i = thread_x(); i < ceil_div(rows, kRowsAtOnce) * max_of(kThreads, kCols); i += kThreads) {
      constexpr int kPasses = ceil_div(kCols, kThreads);  // 1 unless a row is longer than the block
      const int pass = i / kThreads, row0 = pass / kPasses * kRowsAtOnce;
      const int column = kPasses > 1 ? pass % kPasses * kThreads + thread_x() : thread_x() % kCols;
      const int nth = kPasses > 1 ? 0 : thread_x() / kCols, r = row0 + nth, d = column * 4;
      const bool mine = nth < kRowsAtOnce && r < rows && column < kCols;
      float o[4] = {};
      for (int base = 0; base < count; base += 32) {
        float x[kBatch][4];
        auto fetch = [&](int from) {
#pragma unroll
          for (int n = 0; n < kBatch; ++n)
            if (mine && from + n < min_of(count, base + 32)) load4_shared_by_blocks(memory(from + n) + r * kD + d, x[n]);
        };
        auto add = [&](int from) {
#pragma unroll
          for (int n = 0; n < kBatch; ++n)
            if (mine && from + n < min_of(count, base + 32))
#pragma unroll
              for (int e = 0; e < 4; ++e) o[e] += weights.of[nth][from + n - base] * x[n][e];
        };
        fetch(base);
        for (int w = thread_x() / 32; w < kRowsAtOnce && row0 + w < rows; w += kThreads / 32) {
          const int state = base + warp::lane();
          float m = -PA_INFINITY, l = 0.0f;
          if (state < count) {
            m = load_shared_by_blocks(memory(state) + p.partial_rows * kD + row0 + w);
            l = load_shared_by_blocks(memory(state) + p.partial_rows * (kD + 1) + row0 + w);
          }
          const float before = base ? weights.m[w] : -PA_INFINITY, sum = base ? weights.l[w] : 0.0f;
          const float top = max_of(warp::reduce_max<32>(m), before);
          const float factor = weight(m, top), keep = weight(before, top);
          const float total = sum * keep + warp::reduce_sum<32>(factor * l);
          weights.of[w][warp::lane()] = factor;
          if (warp::lane() == 0) {
            weights.keep[w] = keep;
            weights.m[w] = top;
            weights.l[w] = total;
          }
        }
        block_sync();
        if (mine) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[e] *= weights.keep[nth];
        }
        const int end = min_of(count, base + 32);
        for (int from = base;;) {
          add(from);
          from += kBatch;
          if (from >= end) break;
          fetch(from);
        }
        if (mine && base + 32 >= count) write_row(c, r, d, o, weights.m[nth], weights.l[nth]);
        block_sync();  // before the weights change
      }
    }
  }

  // The cursor stands on the last unit of a segment.
  PA_DEVICE void finish_segment(const Cursor<kUnit, P>& c, State& st, int stage_slot, int worker) const {
    const int rows = min_of(kTileRows, c.s.len_q * p.group - c.first_row);
    publish(st, rows, stage_slot);
    block_sync();
    int counter = 0, count = 1, first = 0, next = 0, stride = 1, slot = -1;
    if (c.from == 0 && c.unit == c.work.units - 1) {
      // the whole tile is here
    } else if (p.flags & kInvariant) {
      counter = (c.b * p.heads_kv + c.head_kv) * p.cut_tiles + c.first_row / kTileRows;
      count = quotient(c.work.units + c.work.cut - 1, c.work.cut);
      first = counter * kMaxCuts;
      next = first + 1;
      slot = first + quotient(c.from, c.work.cut);
    } else {
      const int start = c.at - c.unit;  // the tile's first unit on the line
      const int owner = dealt.worker(start), last = dealt.worker(start + c.work.units - 1);
      counter = owner * p.lines + c.line;
      count = last - owner + 1;
      first = 2 * counter + 1;
      stride = 2 * p.lines;
      next = first - 1 + stride;
      slot = worker == owner ? first : 2 * (worker * p.lines + c.line);
    }
    merge_waves(c, rows, stage_slot, slot);
    if (slot < 0) {
      block_sync();  // before the waves fill their stages again
      return;
    }
    publish_to_blocks();
    block_sync();
    if (thread_x() == 0) {
      i32* arrivals = in_global(p.counters) + kQueues + counter;
      const int before = atomic_add_ordered(arrivals, 1);
      small.arrived = before;
      if (before == count - 1) *arrivals = 0;  // as the next launch expects it
    }
    block_sync();
    if (small.arrived == count - 1) merge_slots(c, rows, count, first, next, stride, stage_slot);
  }

  // ---- the whole of a worker's part

  // With one stage: it holds a unit's keys, then its values too; the next unit's wait in registers meanwhile. Nothing
  // is fetched across the end of a segment: the place of the next one would need as many registers again. What only the
  // ends of segments need waits in shared memory: scalar registers are few.
  struct Fetched {
    i64 page;
    Pieces keys, values;
  };
  // Of the cursor, `c` has what every unit needs; the rest of it is not read.
  PA_DEVICE void turn(Cursor<kUnit, P>& c, bool& begins, State& st, Fetched& f) {
    int first = c.key() + wave * kKeys;
    const int then = first + kUnit;
    const bool more = c.left > 1;
    if (begins && first + kKeys <= first_seen()) first = c.s.len_k;  // only a tile's first unit has such keys: as if past the end
    if (begins) f.page = uniform(look_up(c, first));
    if (begins || kAhead == 0) fetch<false>(c, first, f.page, f.keys);
    if (begins && kAhead == 2) fetch<true>(c, first, f.page, f.values);
    if (begins) {
      const Cursor<kUnit, P> segment = uniform(ends().c);
      load_q<T, kD, kTileRows, kThreads>(p, segment.s, segment.b, segment.head_kv, segment.first_row, q_shared, kPitch);
      block_sync();
      begin(segment, st);
    }
    land<false>(c, first, f.keys);
    if constexpr (kParts == 2) {
      fetch<false, 1>(c, first, f.page, f.keys);
      land<false, 1>(c, first, f.keys);
    }
    const i64 next = more ? look_up(c, then) : 0;
    if (kAhead == 1) fetch<true>(c, first, f.page, f.values);
    warp::wave_sync();
    step(c.s, first, st, 0, [&] {
      if (kAhead == 0) fetch<true>(c, first, f.page, f.values);
      land<true>(c, first, f.values);
      if constexpr (kParts == 2) {
        fetch<true, 1>(c, first, f.page, f.values);
        land<true, 1>(c, first, f.values);
      }
      f.page = uniform(next);
      f.keys = {};  // no register keeps what was there before
      if (more && kAhead >= 1) fetch<false>(c, then, f.page, f.keys);
      if (more && kAhead == 2) fetch<true>(c, then, f.page, f.values);
      warp::wave_sync();
    });
    warp::wave_sync();  // before the stage is filled again
    ++c.unit;
    --c.left;
    begins = !more;
  }
  // After a segment's last unit.
  PA_DEVICE void end_segment(State& st) {
    const Ends known = uniform(ends());
    Cursor<kUnit, P> c = known.c;
    dealt = known.dealt;
    c.skip(c.left - 1);
    finish_segment(c, st, 0, known.worker);
    clear(st);
  }
  // The cursor at the next one.
  PA_DEVICE Cursor<kUnit, P> next_segment() const {
    Cursor<kUnit, P> c = uniform(ends().c);
    warp::wave_sync();  // before it is overwritten
    c.skip(c.left - 1);
    c.next(p);
    ends().c = c;
    warp::wave_sync();
    return c;
  }
  PA_DEVICE void run_staged(Cursor<kUnit, P> c, int worker) const {
    State st;
    clear(st);
    Fetched f;
    ends() = {c, dealt, worker};
    warp::wave_sync();
    auto params = params_of(p);
    bool begins = true;
    while (!c.done()) {
      at(params.anew()).turn(c, begins, st, f);
      if (!begins) continue;
      at(params.anew()).end_segment(st);
      c = at(params.anew()).next_segment();
    }
  }
  // The same place with params that were read anew.
  PA_DEVICE Decode at(const P& params) const {
    Decode now(params, waves);
    now.lane = anew(lane);
    return now;
  }

  PA_DEVICE void run(int line, int worker, bool tiled_elsewhere) {
    Cursor<kUnit, P> c;
    dealt = schedule<kUnit, kThreads, !kStaged>(p, line, worker, tiled_elsewhere, c, small.schedule);
    if (c.done()) return;
    if constexpr (kStaged) return run_staged(c, worker);
    Cursor<kUnit, P> ahead = c;
    i64 page = look_up(ahead);
    State st;
    clear(st);
    // Each turn starts one unit's copies and, once kStages - 1 are under way, consumes the oldest.
    for (int turn = 0, fill = 0, slot = 0; !c.done(); ++turn) {
      if (!ahead.done()) {
        load(ahead, page, fill);
        ahead.next(p);
        if (!ahead.done()) page = look_up(ahead);
      }
      copy_commit();
      fill = fill + 1 == kStages ? 0 : fill + 1;
      if (turn < kStages - 1) continue;

      if (c.unit == c.from) {
        load_q<T, kD, kTileRows, kThreads>(p, c.s, c.b, c.head_kv, c.first_row, q_shared, kPitch);
        block_sync();
        begin(c, st);
      }
      copy_wait<kStages - 1>();
      warp::wave_sync();
      if constexpr (kWiden) {
        widen(slot);
        warp::wave_sync();
      }
      step(c.s, c.key() + wave * kKeys, st, slot, [] {});
      warp::wave_sync();  // before this stage is filled again
      if (c.left == 1) {
        finish_segment(c, st, slot, worker);
        clear(st);
      }
      c.next(p);
      slot = slot + 1 == kStages ? 0 : slot + 1;
    }
    copy_wait<0>();
  }
};

}  // namespace portattn
