// Attention of many query rows: prefill and long chunks, any layout; and the kernel that runs them beside decodes.
//
// Computes   out = softmax(score(q.k)) v for tiles of kRows packed rows (query tokens x the heads of one kv head) of one
//            sequence; a wave owns 16 kM of them and all the tile's keys, so nothing is merged.
// Layouts    as decode.h.
// Tiling     kRows = 16 kM kWaves rows, kN keys at a time, kD columns, in matrix tiles of kSide rows and columns. Tiles are
//            taken from a queue, those with most keys first; sequences of few rows (schedule.h) are left to decode.h, whose
//            parts are a second queue. Blocks of both kinds share a multiprocessor: one is bound by arithmetic, the other by
//            memory.
// Memory     shared: q of the tile, and two stages of kN keys and values (a third, widened, for 8-bit caches). The
//            finished output leaves through q's rows. Registers: kM x kD / 2 accumulators, kM x kN / 2 scores.
// Math       as decode.h; key blocks that no row of a wave sees are skipped, masks only where an edge runs.
// Numerics   float32 accumulation; probabilities rounded to q's type. Key blocks stand at multiples of kN, so a row's
//            bits do not depend on what else is in the call.
// Cost       4 x rows x keys x kD flops: bound by the matrix units from about 300 rows on.
// Vendor     mma.h tiles, 16-byte asynchronous copies, atomic counters.
// Source     FlashAttention-2's loop order; the queue is our own.
#pragma once

#include "portattn/decode.h"

namespace portattn {

// mma.h's matrix tiles as a type: prefill_staged.h takes larger ones where a device has them.
struct MatrixTiles16 {
  static constexpr int kSide = 16, kAcc = mma::kAcc, kSlots = mma::kSlots;
  using Acc = mma::Acc;
  static PA_DEVICE constexpr int slot_of(int e) { return mma::slot_of(e); }
  static PA_DEVICE int row(int slot) { return mma::row(slot); }
  static PA_DEVICE int col(int e) { return mma::col(e); }
  static PA_DEVICE void scale(Acc& c, const float (&factor)[kSlots]) {
#pragma unroll
    for (int e = 0; e < kAcc; ++e) c.x[e] *= factor[slot_of(e)];
  }
  static PA_DEVICE void row_max(float (&x)[kSlots]) { mma::row_max(x); }
  static PA_DEVICE void row_sum(float (&x)[kSlots]) { mma::row_sum(x); }
  static PA_DEVICE void store_row(const Acc& c, int slot, float* to) { mma::store_row(c, slot, to); }
  template <class T>
  static PA_DEVICE void store_row(const Acc& c, int slot, float factor, T* to) { mma::store_row<T>(c, slot, factor, to); }
};

template <class T, class C, int kD, int kWaves, int kM, int kN, class M = MatrixTiles16>
struct Prefill {
  static constexpr int kThreads = kWaves * warp::kWave;
  static constexpr int kWaveRows = 16 * kM, kRows = kWaves * kWaveRows;
  static constexpr int kPitch = kD + 8;
  static constexpr bool kWiden = sizeof(C) != sizeof(T);
  static constexpr int kCachePitch = kD + 16 / static_cast<int>(sizeof(C));
  static constexpr int kStages = 2;
  static constexpr int kStageBytes = 2 * kN * kCachePitch * static_cast<int>(sizeof(C));
  static constexpr int kWideBytes = kWiden ? 2 * kN * kPitch * static_cast<int>(sizeof(T)) : 0;
  static constexpr int kQBytes = kRows * kPitch * static_cast<int>(sizeof(T));
  using Acc = typename M::Acc;
  static constexpr int kSide = M::kSide, kRowTiles = kWaveRows / kSide, kGroups = kN / kSide, kTiles = kD / kSide;
  static_assert(kWaveRows % kSide == 0 && kN % kSide == 0 && kD % kSide == 0, "rows, keys and columns come in matrix tiles");

  struct Queue {  // outlives the tiles: where each thread's sequences begin, and what was found
    int prefix[kThreads + 1];
    int b, index, taken, sums[32];
  };
  static constexpr int kSharedBytes = kStages * kStageBytes + kWideBytes + kQBytes;

  const AttentionParams& p;
  u8* stages;
  T* wide;
  T* q_shared;
  Queue& queue;
  int wave, lane;

  PA_DEVICE Prefill(const AttentionParams& params, u8* memory, Queue& q)
      : p(params), stages(memory), wide(reinterpret_cast<T*>(memory + kStages * kStageBytes)),
        q_shared(reinterpret_cast<T*>(memory + kStages * kStageBytes + kWideBytes)), queue(q), wave(warp::wave_index()), lane(warp::wave_lane()) {}

  struct Tile {
    int b, head_kv, first_row;
    Sequence s;
    int first, last;  // key blocks [first, last)
  };

  PA_DEVICE int tiles_of(const Sequence& s) const {
    const int rows = s.len_q * p.group;
    return s.len_q > 0 && rows > kDecodeRows ? ceil_div(rows, kRows) : 0;
  }

  // ---- the queue of tiles

  // Counts the tiles of all sequences; `prefix` then says where each thread's sequences begin. Returns how many.
  PA_DEVICE int count() const {
    const int each = ceil_div(p.batch, kThreads), from = min_of(p.batch, thread_x() * each), to = min_of(p.batch, from + each);
    int mine = 0;
    for (int b = from; b < to; ++b) mine += tiles_of(sequence(p, b)) * p.heads_kv;
    int sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int x = warp::shfl_idx<32>(sum, warp::lane() - d);
      if (warp::lane() >= d) sum += x;
    }
    if (warp::lane() == 31) queue.sums[thread_x() / 32] = sum;
    block_sync();
    for (int w = 0; w < thread_x() / 32; ++w) sum += queue.sums[w];
    queue.prefix[thread_x() + 1] = sum;
    if (thread_x() == 0) queue.prefix[0] = 0;
    block_sync();
    return queue.prefix[kThreads];
  }

  // The queue's tile number i. Later rows see more keys where the mask is causal: they come first.
  PA_DEVICE Tile tile(int i) const {
    if (queue.prefix[thread_x()] <= i && i < queue.prefix[thread_x() + 1]) {
      int b = thread_x() * ceil_div(p.batch, kThreads), start = queue.prefix[thread_x()];
      for (;;) {
        const int n = tiles_of(sequence(p, b)) * p.heads_kv;
        if (i < start + n) break;
        start += n;
        ++b;
      }
      queue.b = b;
      queue.index = i - start;
    }
    block_sync();
    Tile t;
    t.b = uniform(queue.b);
    t.s = sequence(p, t.b);
    t.s = {uniform(t.s.len_q), uniform(t.s.len_k), uniform(t.s.start_q), uniform(t.s.start_k)};
    const int index = uniform(queue.index), nth = quotient(index, p.heads_kv);
    t.head_kv = index - nth * p.heads_kv;
    t.first_row = (tiles_of(t.s) - 1 - nth) * kRows;
    const int first = quotient(t.first_row, p.group), last = min_of(t.s.len_q - 1, quotient(t.first_row + kRows - 1, p.group));
    const Span v = visible(p, t.s, first, last);
    t.first = quotient(v.lo, kN);
    t.last = quotient(v.hi + kN - 1, kN);
    if (v.hi == v.lo) t.last = t.first;
    return t;
  }

  // ---- loading

  struct Pages { i32 of[kGroups]; };

  PA_DEVICE void look_up(const Tile& t, int block, Pages& pages) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int key = block * kN + g * 16;
      pages.of[g] = (p.flags & kUniformPages) && key < t.s.len_k ? static_cast<i32>(page_of(p, t.b, key)) : 0;
    }
  }

  PA_DEVICE void load(const Tile& t, int block, const Pages& pages, int stage) const {
    constexpr int kSize = static_cast<int>(sizeof(C)), kEach = 16 / kSize, kPieces = kD / kEach;
    C* k_to = reinterpret_cast<C*>(stages + stage * kStageBytes);
    C* v_to = k_to + kN * kCachePitch;
    const C* k_base = static_cast<const C*>(p.k);
    const C* v_base = static_cast<const C*>(p.v);
    const int first = block * kN;
    const int lo = p.window_left >= 0 ? visible(p, t.s, quotient(t.first_row, p.group), 0).lo : 0;
    if ((p.flags & (kUniformPages | kAligned)) == (kUniformPages | kAligned)) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const KvOffset at = kv_offset(p, t.s, pages.of[g], first + g * 16, t.head_kv);
#pragma unroll
        for (int j = 0; j < ceil_div(16 * kPieces, kThreads); ++j) {
          const int piece = j * kThreads + thread_x(), r = piece / kPieces, d = piece % kPieces * kEach;
          if (16 * kPieces % kThreads != 0 && piece >= 16 * kPieces) break;
          const int to = (g * 16 + r) * kCachePitch + d;
          const bool some = first + g * 16 + r < t.s.len_k && first + g * 16 + r >= lo;  // of other keys no byte is read
          copy_async16(k_to + to, k_base + at.k + r * p.k_token + d, some ? min_of(16, max_of(0, p.head_dim - d) * kSize) : 0);
          copy_async16(v_to + to, v_base + at.v + r * p.v_token + d, some ? min_of(16, max_of(0, p.head_dim_v - d) * kSize) : 0);
        }
      }
      return;
    }
#pragma unroll 1
    for (int piece = thread_x(); piece < kN * kPieces; piece += kThreads) {
      const int r = piece / kPieces, d = piece % kPieces * kEach, key = first + r;
      KvOffset at = {0, 0};
      if (key < t.s.len_k && key >= lo) at = kv_offset(p, t.s, page_of(p, t.b, key), key, t.head_kv);
#pragma unroll 1
      for (int of_v = 0; of_v < 2; ++of_v) {
        C* to = (of_v ? v_to : k_to) + r * kCachePitch + d;
        const C* from = (of_v ? v_base + at.v : k_base + at.k) + d;
        const int n = key < t.s.len_k && key >= lo ? min_of(kEach, max_of(0, (of_v ? p.head_dim_v : p.head_dim) - d)) : 0;
        if (p.flags & kAligned) copy_async16(to, n ? from : of_v ? v_base : k_base, n * kSize);
        else copy_elements16(to, from, n);
      }
    }
  }

  PA_DEVICE void widen(int stage) const {
    const u8* from = stages + stage * kStageBytes;
#pragma unroll 2
    for (int i = thread_x(); i < 2 * kN * (kD / 8); i += kThreads) {
      const int r = i / (kD / 8), d = i % (kD / 8) * 8;
      *reinterpret_cast<Bytes16*>(wide + r * kPitch + d) = widen8<T, C>(*reinterpret_cast<const Bytes8*>(from + r * kCachePitch + d));
    }
  }

  // ---- one tile

  struct State {
    Acc o[kRowTiles][kTiles];
    float m[kRowTiles][M::kSlots], l[kRowTiles][M::kSlots];
    Score scoring;
    int clear_lo, clear_hi, any_lo, any_hi;  // keys that every row, and that some row of this wave sees
  };

  // The empty state of this wave's rows of a tile.
  PA_DEVICE void enter(const Tile& t, State& st) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int d = 0; d < kTiles; ++d)
#pragma unroll
        for (int e = 0; e < M::kAcc; ++e) st.o[i][d].x[e] = 0.0f;
#pragma unroll
      for (int n = 0; n < M::kSlots; ++n) {
        st.m[i][n] = -PA_INFINITY;
        st.l[i][n] = 0.0f;
      }
    }
    st.scoring = score_of(p, p.k_scale ? in_global(p.k_scale)[t.b * p.scale_batch_k + t.head_kv * p.scale_head_k] : 1.0f);
    const int from = t.first_row + wave * kWaveRows, total = t.s.len_q * p.group, shift = t.s.len_k - t.s.len_q;
    const int first = quotient(from, p.group), last = quotient(min_of(total - 1, from + kWaveRows - 1), p.group);
    st.any_lo = st.any_hi = 0;
    if (from < total) {
      const Span v = visible(p, t.s, first, last);
      st.any_lo = v.lo;
      st.any_hi = v.hi;
    }
    st.clear_lo = p.window_left >= 0 ? last + shift - p.window_left : 0;
    st.clear_hi = p.window_right >= 0 ? min_of(t.s.len_k, first + shift + min_of(p.window_right, 1 << 30) + 1) : t.s.len_k;
  }

  // Scores of kN keys from `key` on become probabilities; the state moves to the new maximum.
  PA_DEVICE void soften(const Tile& t, State& st, int key, Acc (&s)[kRowTiles][kGroups]) const {
    const bool edge = key < st.clear_lo || key + kN > st.clear_hi;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int e = 0; e < M::kAcc; ++e) s[i][g].x[e] *= st.scoring.scale;
      if (st.scoring.cap > 0.0f) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
          for (int e = 0; e < M::kAcc; ++e) s[i][g].x[e] = st.scoring.cap * tanh_of(s[i][g].x[e]);
      }
      if (edge || p.alibi) {
        Row row[M::kSlots];
        Span seen[M::kSlots];       // by the row, counted from the lane's first key
        float distance[M::kSlots];  // of that one
#pragma unroll
        for (int n = 0; n < M::kSlots; ++n) {
          row[n] = row_of(p, t.s, t.b, t.head_kv, anew(t.first_row + wave * kWaveRows + i * kSide + M::row(n)));
          const int at = key + M::col(0);
          seen[n] = {(p.window_left >= 0 ? max_of(0, row[n].position - min_of(p.window_left, 1 << 30)) : 0) - at,
                     (p.window_right >= 0 ? min_of(t.s.len_k, row[n].position + min_of(p.window_right, 1 << 30) + 1) : t.s.len_k) - at};
          distance[n] = static_cast<float>(row[n].position - at);
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          u32 bits[M::kSlots];  // of the keys that the row sees
#pragma unroll
          for (int n = 0; n < M::kSlots; ++n) {
            const int lo = min_of(32, max_of(0, seen[n].lo - g * kSide)), hi = min_of(32, max_of(lo, seen[n].hi - g * kSide));
            bits[n] = static_cast<u32>((1ull << hi) - (1ull << lo));
          }
#pragma unroll
          for (int e = 0; e < M::kAcc; ++e) {
            const int n = M::slot_of(e), on = M::col(e) - M::col(0);  // known once unrolled
            const float x = s[i][g].x[e] - row[n].slope * __builtin_fabsf(distance[n] - static_cast<float>(g * kSide + on));
            const u32 sees = static_cast<u32>(static_cast<i32>(bits[n] << (31 - on)) >> 31);  // one bit, spread
            s[i][g].x[e] = bits_float((float_bits(x) & sees) | (float_bits(-PA_INFINITY) & ~sees));
          }
        }
      }
      float top[M::kSlots], shrink[M::kSlots];
      bool moved = false;
#pragma unroll
      for (int n = 0; n < M::kSlots; ++n) top[n] = st.m[i][n];
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int e = 0; e < M::kAcc; ++e) top[M::slot_of(e)] = max_of(top[M::slot_of(e)], s[i][g].x[e]);
      M::row_max(top);
#pragma unroll
      for (int n = 0; n < M::kSlots; ++n) {
        moved |= top[n] != st.m[i][n];
        shrink[n] = weight(st.m[i][n], top[n]);
        st.m[i][n] = top[n];
        st.l[i][n] *= shrink[n];
        if (top[n] == -PA_INFINITY) top[n] = 0.0f;
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int e = 0; e < M::kAcc; ++e) {
          s[i][g].x[e] = exp2_fast(s[i][g].x[e] - top[M::slot_of(e)]);
          st.l[i][M::slot_of(e)] += s[i][g].x[e];
        }
      if (warp::wave_any(moved)) {
#pragma unroll
        for (int d = 0; d < kTiles; ++d) M::scale(st.o[i][d], shrink);
      }
    }
  }

  PA_DEVICE void step(const Tile& t, State& st, int block, int stage) const {
    const int key = block * kN;
    if (key >= st.any_hi || key + kN <= st.any_lo) return;
    const T* k = kWiden ? wide : reinterpret_cast<const T*>(stages + stage * kStageBytes);
    const T* v = k + kN * kPitch;
    const T* q = q_shared + wave * kWaveRows * kPitch;
    mma::Acc s[kM][kGroups] = {};
#pragma unroll
    for (int d = 0; d < kTiles; ++d) {
      mma::FragA qa[kM];
#pragma unroll
      for (int i = 0; i < kM; ++i) mma::load_a(qa[i], q + i * 16 * kPitch + d * 16, kPitch);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        mma::FragB kb;
        mma::load_b_rows(kb, k + g * 16 * kPitch + d * 16, kPitch);
#pragma unroll
        for (int i = 0; i < kM; ++i) mma::multiply<T>(s[i][g], qa[i], kb);
      }
    }
    soften(t, st, key, s);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      mma::FragA pa[kM];
#pragma unroll
      for (int i = 0; i < kM; ++i) pa[i] = mma::to_a<T>(s[i][g]);
#pragma unroll
      for (int d = 0; d < kTiles; ++d) {
        mma::FragB vb;
        mma::load_b_cols(vb, v + g * 16 * kPitch + d * 16, kPitch);
#pragma unroll
        for (int i = 0; i < kM; ++i) mma::multiply<T>(st.o[i][d], pa[i], vb);
      }
    }
  }

  // Columns [from, from + count) of this wave's rows, which stand in shared memory, to out.
  template <class O>
  PA_DEVICE void copy_out(const Tile& t, const Sequence& s, const O* room, int pitch, int from, int count) const {
    struct alignas(4 * sizeof(O)) Four { O x[4]; };
    const int total = s.len_q * p.group, first = t.first_row + wave * kWaveRows;
    O* out = in_global(static_cast<O*>(p.out));
#pragma unroll 1
    for (int i = lane; i < kWaveRows * (count / 4); i += warp::kWave) {
      const int r = i / (count / 4), at = i % (count / 4) * 4, d = from + at, packed = first + r;
      if (packed >= total || d >= p.head_dim_v) continue;
      const int token = quotient(packed, p.group), head = t.head_kv * p.group + packed - token * p.group;
      O* to = out + out_offset(p, s, t.b, token, head) + d;
      const O* four = room + r * pitch + at;
      if (p.flags & kOutAligned) {
        *reinterpret_cast<Four*>(to) = *reinterpret_cast<const Four*>(four);
      } else {
        for (int e = 0; e < min_of(4, p.head_dim_v - d); ++e) to[e] = four[e];
      }
    }
  }

  // This wave's rows, finished, to out and lse. They pass through the wave's own rows of q, float32 as many columns at a time as fit.
  PA_DEVICE void write(const Tile& t, State& st) const {
    const Sequence s = sequence(p, t.b);  // again, so that nothing of it is held while the tile is computed
    const int total = s.len_q * p.group, first = t.first_row + wave * kWaveRows;
    T* room = q_shared + wave * kWaveRows * kPitch;
    float v_factor = p.v_factor, factor[kRowTiles][M::kSlots];
    if (p.v_scale) v_factor *= in_global(p.v_scale)[t.b * p.scale_batch_v + t.head_kv * p.scale_head_v];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      M::row_sum(st.l[i]);
#pragma unroll
      for (int n = 0; n < M::kSlots; ++n) {
        const int packed = first + i * kSide + M::row(n);
        const int token = quotient(packed, p.group), head = t.head_kv * p.group + packed - token * p.group;
        factor[i][n] = 0.0f;
        if (packed >= total) continue;
        const Finish f = finish<T>(p, st.m[i][n], st.l[i][n], head);
        factor[i][n] = f.factor * v_factor;
        if (p.lse && M::col(0) == 0) in_global(p.lse)[lse_offset(p, s, t.b, token, head)] = f.lse;
      }
    }
    if (p.flags & kOutFloat) {
      constexpr int kPitchFloats = kPitch * static_cast<int>(sizeof(T)) / 4, kAtOnce = kPitchFloats / kSide;  // tiles
      float* floats = reinterpret_cast<float*>(room);
#pragma unroll
      for (int from = 0; from < kTiles; from += kAtOnce) {
        warp::wave_sync();
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) {
            const int d = from + n;
            if (d >= kTiles) break;
            M::scale(st.o[i][d], factor[i]);
#pragma unroll
            for (int slot = 0; slot < M::kSlots; ++slot)
              M::store_row(st.o[i][d], slot, floats + (i * kSide + M::row(slot)) * kPitchFloats + n * kSide);
          }
        warp::wave_sync();
        copy_out(t, s, floats, kPitchFloats, from * kSide, min_of(kAtOnce, kTiles - from) * kSide);
      }
      return;
    }
    warp::wave_sync();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int n = 0; n < M::kSlots; ++n)
#pragma unroll
        for (int d = 0; d < kTiles; ++d) M::template store_row<T>(st.o[i][d], n, factor[i][n], room + (i * kSide + M::row(n)) * kPitch + d * kSide);
    warp::wave_sync();
    copy_out(t, s, room, kPitch, 0, kD);
  }

  PA_DEVICE void run(int number) const {
    const Tile t = tile(number);
    Pages pages;
    if (t.first < t.last) {
      look_up(t, t.first, pages);
      load(t, t.first, pages, 0);
      if (t.first + 1 < t.last) look_up(t, t.first + 1, pages);
    }
    copy_commit();
    load_q<T, kD, kRows, kThreads>(p, t.s, t.b, t.head_kv, t.first_row, q_shared, kPitch);

    State st;
    enter(t, st);
    for (int block = t.first, stage = 0; block < t.last; ++block, stage ^= 1) {
      copy_wait<0>();
      block_sync();  // this block is here, and everybody is done with the one before
      if constexpr (kWiden) {
        widen(stage);
        block_sync();
      }
      if (block + 1 < t.last) {
        load(t, block + 1, pages, stage ^ 1);
      }
      copy_commit();
      step(t, st, block, stage);
      if (block + 2 < t.last) look_up(t, block + 2, pages);  // after the step: no register is held for it there
    }
    copy_wait<0>();
    block_sync();  // q is there even where there are no keys, and nobody reads it any more
    write(t, st);
    block_sync();  // before the next tile's q
  }
};

// Tiles and decode parts in one launch. counters[0] and [1] are the queues, [2] counts blocks that are through.
template <class Few, class Many>
struct MixedOf {
  static constexpr int kThreads = Few::kThreads;
  static constexpr int kWork = max_of(Few::kSharedBytes, Many::kSharedBytes);
  static constexpr int kSharedBytes = kWork + static_cast<int>(sizeof(typename Many::Queue));

  // A block does one thing: a tile, or a part of the decode work. Blocks of the first kind take from the tiles' queue
  // while it lasts, blocks of the second from the parts'; `mixed_stride` blocks in a row are of one kind, so that both
  // kinds meet on a multiprocessor. Blocks that find nothing end.
  static PA_DEVICE void run(const AttentionParams& p, u8* memory, int block, int blocks) {
    typename Many::Queue& queue = *reinterpret_cast<typename Many::Queue*>(memory + kWork);
    const Many many(p, memory, queue);
    const int tiles = many.count(), parts = p.lines * p.workers;
    if (thread_x() == 0) {
      bool tile = quotient(block, p.mixed_stride) % 2 == 0;
      int i = -1;
      for (int tries = 0; tries < 2 && i < 0; ++tries, tile = !tile) {
        const int most = tile ? tiles : parts;
        if (most > 0) i = atomic_add_ordered(in_global(p.counters) + (tile ? 0 : 1), 1);
        if (i >= most) i = -1;
        if (i >= 0) queue.taken = tile ? i : -1 - i;
      }
      if (i < 0) queue.taken = tiles;
      i32* counters = in_global(p.counters);
      if (atomic_add_ordered(counters + 2, 1) == blocks - 1) counters[0] = counters[1] = counters[2] = 0;
    }
    block_sync();
    const int taken = uniform(queue.taken);
    if (taken >= tiles) return;
    if (taken >= 0) {
      Many(anew(p), memory, queue).run(taken);
    } else {
      const int i = -1 - taken, nth = quotient(i, p.lines);
      Few(anew(p), memory).run(i - nth * p.lines, nth, true);
    }
  }
};

template <class T, class C, int kD, int kWaves, int kStages, int kM, int kN>
using Mixed = MixedOf<Decode<T, C, kD, kWaves, kStages>, Prefill<T, C, kD, kWaves, kM, kN>>;

}  // namespace portattn
