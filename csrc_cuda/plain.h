// Plain decode steps (params.h, PlainParams), on Hopper and newer, in clusters of blocks or in free ones.
//
// Computes   out = softmax(score(q.k)) v for one query token a sequence, up to eight query heads a kv head, a paged cache; of a window's
//            keys alone where there is one, with softcap and sinks.
// Schedule   schedule.h's lines: a line's blocks take even parts of it, whatever the lengths are, in order.
// Merging    In clusters, one a line, for few sequences: a tile's states lie in blocks of one cluster. Each row of it is merged by
//            one of them, dealt out in turn: blocks send their states of the row there, through distributed shared memory, and the
//            barrier there counts bytes. That is several times faster than any way through memory that all blocks see.
//            Free blocks, on all multiprocessors, for many sequences: states pass through the workspace, and the last of a tile's
//            blocks to arrive merges. A part whose end cuts a tile begins with that tile, whose other part its next block begins
//            with: so the states have arrived long before the blocks end.
// Loading    A wave takes 16 keys of every unit, apart from the others: its copies run kStages units ahead, over the ends of
//            tiles, and leave L2 first; the next tile's q is fetched beside them. Rows of whole 128-byte lines land line on line,
//            their pieces turned by the row's number (decode.h).
// Products   Keys are rows: S^T (16 keys x 8 heads) = K Q^T and O^T (kD x 8) += V^T P^T on m16n8k16, so that eight columns are
//            enough and nothing is computed for heads that do not exist.
//            8-bit keys and values become fp16 in the registers that multiply them: a lane reads pieces of rows as they lie. Sums over
//            columns may take these in any order, if q does too, and rows of O^T may be any columns: a lane's four bytes are four
//            columns. V's pairs of keys are made of two rows' bytes. q and probabilities are fp16 then, whatever q's type is.
// Numerics   float32 accumulation; probabilities rounded to q's type. A row's base is a maximum seen before, raised when a score
//            exceeds it by more than kSlack powers of two: probabilities may be as large as 2^kSlack, sums are exact as ever.
//            With 8-bit caches the base is kRoom powers of two below that maximum, where fp16 has its range; q of another type is
//            multiplied by a power of two that takes its row's largest element to 2^14: what is 2^-31 of that is exact yet.
// Cost       bytes of k and v, each once: bound by memory.
// Vendor     mma.sync, ldmatrix, 16-byte asynchronous copies; clusters (sm90.h).
// Source     split keys and the merge of states: FlashDecoding; even parts of one line of work: stream-K; lazy maxima:
//            FlashAttention 4's conditional rescaling.
#pragma once

#include <sm90.h>  // in angle brackets: tests/simt compiles this file with its own in front
#include <warp.h>

#include "portattn/online_softmax.h"
#include "portattn/schedule.h"
#include "widen.h"

namespace portattn {

constexpr int kMaxSequences = 1024;  // of a plain call: every wave looks through all lengths
constexpr int kMaxCluster = 16;      // blocks
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kFarStates = 8;  // in the workspace, whose loads wait together: Blackwell's code has no registers for more
#else
constexpr int kFarStates = 16;
#endif

template <class T, class C, int kD, int kWaves, int kStages, bool kRagged, bool kClusters>
struct PlainDecode {
  using P = PlainParams<kD>;
  static constexpr int kThreads = 32 * kWaves, kKeys = 16, kUnit = kKeys * kWaves, kRows = 8;
  static constexpr int kTiles = kD / 16, kColumns = ceil_div(kD, 128);
  static constexpr bool kWiden = sizeof(C) != sizeof(T);
  static constexpr bool kTurned = kWiden ? kD % 64 == 0 : kD * sizeof(C) % 128 == 0;
  static constexpr int kPitch = kD + (kTurned || kWiden ? 0 : 16 / static_cast<int>(sizeof(C)));
  static constexpr int kStageBytes = 2 * kKeys * kPitch * static_cast<int>(sizeof(C));
  static constexpr int kRowFloats = kD + 4;  // a row of a state: o, m, l, nothing
  static constexpr int kWaveBytes = kStages * kStageBytes + (kWiden ? kRows * kRowFloats * 4 : 0);
  static constexpr float kRoom = kWiden ? 7.0f : 0.0f, kSlack = 8.0f;
  static_assert(kWiden || kRows * kRowFloats * 4 <= kStageBytes, "a wave's state fits where 16 keys and values stood");

  // A tile that several blocks share, as one that merges rows of it knows it. `kind` 0 began in an earlier block, 1 begins here.
  struct alignas(16) Shared { int first, count, b, nth, start_q; };
  struct Mail {
    float rows[2][kMaxCluster][kRowFloats];  // of a kind: state by state, row by row
    sm90::Barrier full[2];
    Shared tiles[2];
  };
  static constexpr int kSharedBytes = kWaves * kWaveBytes + (kClusters ? static_cast<int>(sizeof(Mail)) : 0);

  const P& p;
  u8* waves;
  Mail& mail;
  int wave, lane, line, part;
  int copy_place, k_place, v_places[2];  // of an 8-bit cache, where this lane's first pieces are: copied, of keys, of values 2c and 2c + 1
  int lens[4], starts[4];  // of the first 128 sequences, four a lane: lengths, and where ragged q begins

  // Block `part_` of the cluster of line `line_`.
  PA_DEVICE PlainDecode(const P& params, u8* memory, int line_, int part_)
      : p(params), waves(kWiden ? kept_shared(memory) : memory), mail(*reinterpret_cast<Mail*>(memory + kWaves * kWaveBytes)),
        wave(warp::wave_index()), lane(warp::wave_lane()), line(line_), part(part_) {
    if (kWiden) {
      const int g = lane >> 2, c = lane & 3;
      copy_place = kColumn ? kept(place_of(lane / kPieces, lane % kPieces * kEach)) : 0;
      k_place = kept(place_of(g, c * kVector));
      v_places[0] = kept(place_of(2 * c, g * kRun));
      v_places[1] = kept(place_of(2 * c + 1, g * kRun));
    }
  }

  PA_DEVICE u8* stage(int w, int slot) const { return waves + w * kWaveBytes + slot * kStageBytes; }
  PA_DEVICE float* result(int w, int slot) const { return reinterpret_cast<float*>(stage(w, kWiden ? kStages : slot)); }

  // ---- where parts are

  // The first key that the row of a sequence sees, and the first unit, which has it.
  PA_DEVICE int first_key(int len) const { return max_of(0, len - 1 - p.window_left); }
  PA_DEVICE int first_unit(int len) const { return quotient(first_key(len), kUnit); }
  PA_DEVICE int units_of(int len) const { return max_of(1, quotient(len + kUnit - 1, kUnit) - first_unit(len)); }
  PA_DEVICE int weight_of(int len) const { return len < 0 ? 0 : units_of(len) * p.line_heads; }
  PA_DEVICE int token(int b) const { return static_cast<int>(read_index(p.cu_q, b, false)); }
  // The keys of kN sequences from b on; -1: there is none, or it is not one token's and another launch computes it.
  template <int kN>
  PA_DEVICE void lengths_from(int b, int (&len)[kN]) const {
    const int before = p.dialect() & kBefore ? 1 : 0;
    int start[kN + 1] = {};  // loads by kind, so that none waits for another
#pragma unroll
    for (int i = 0; i <= kN; ++i)
      if (kRagged && b + i <= p.batch) start[i] = token(b + i);
#pragma unroll
    for (int i = 0; i < kN; ++i) len[i] = b + i < p.batch ? static_cast<int>(read_index(p.lengths, b + i, false)) : 0;
    if (p.dialect() & kPrefixSums)
#pragma unroll
      for (int i = 0; i < kN; ++i) len[i] = b + i < p.batch ? static_cast<int>(read_index(p.lengths, b + i + 1, false)) - len[i] : 0;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      len[i] = min_of(max_of(len[i], -before), p.len_k - before) + before;
      if (b + i >= p.batch || (kRagged && start[i + 1] - start[i] != 1)) len[i] = -1;
    }
  }
  // The same of what is known already where it is; b is the same in every lane.
  PA_DEVICE int known(const int (&x)[4], int b) const {
    const int nth = b & 3;
    return warp::shfl_idx<32>(nth == 0 ? x[0] : nth == 1 ? x[1] : nth == 2 ? x[2] : x[3], b >> 2);
  }
  PA_DEVICE int length_again(int b) const {
    if (b < 128 && p.batch > 1) return known(lens, b);
    int len[1];
    lengths_from(b, len);
    return len[0];
  }
  PA_DEVICE int token_again(int b) const { return b < 128 && p.batch > 1 ? known(starts, b) : token(b); }

  // 128 sequences from `base` on, four a lane: their lengths, and the units before this lane's.
  struct Chunk { int len[4], mine, before, total; };
  PA_DEVICE Chunk look_through(int base) const {
    Chunk c;
    if (p.batch == 1) {
      int len[1];
      lengths_from(0, len);
#pragma unroll
      for (int i = 0; i < 4; ++i) c.len[i] = len[0];
      c.total = weight_of(c.len[0]);
      return c;
    }
    lengths_from(base + 4 * lane, c.len);
    c.mine = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) c.mine += weight_of(c.len[i]);
    int sum = c.mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int x = warp::shfl_idx<32>(sum, lane - d);
      if (lane >= d) sum += x;
    }
    c.before = sum - c.mine;
    c.total = warp::shfl_idx<32>(sum, 31);
    return c;
  }

  // A place on the line, and how many units of the part, or of its piece, come from here on. `nth` counts the line's kv heads, `unit` those
  // that rows see.
  struct Cursor { int b, nth, unit, units, len, at, left; };
  Cursor rest;  // the part's second piece; none: left is 0
  // The beginning of a part of `size` units at place `at`. `c` is what was seen of the first 128 sequences.
  PA_DEVICE Cursor place(int at, int size, Chunk c) const {
    Cursor a = {0, 0, 0, 0, c.len[0], at, size};
    int offset = at;  // from the sequence's first unit
    if (p.batch > 1) {
      int base = 0, seen = 0;
      while (at >= seen + c.total) {
        seen += c.total;
        base += 128;
        c = look_through(base);
      }
      const int mine = at - seen - c.before;  // from this lane's first unit
      int i = 0, len = c.len[0], rest = mine;
#pragma unroll
      for (int n = 1; n < 4; ++n) {
        const int w = weight_of(c.len[n - 1]);
        if (i != n - 1 || rest < w) continue;
        rest -= w;
        i = n;
        len = c.len[n];
      }
      const u32 owner = warp::ballot(0 <= mine && mine < c.mine);  // one bit: its number is a float's exponent
      const int lane_of = static_cast<int>(float_bits(static_cast<float>(owner)) >> 23) - 127;
      a.b = base + 4 * lane_of + warp::shfl_idx<32>(i, lane_of);
      a.len = warp::shfl_idx<32>(len, lane_of);
      offset = warp::shfl_idx<32>(rest, lane_of);
    }
    a.units = units_of(a.len);
    a.nth = offset < a.units ? 0 : quotient(offset, a.units);
    a.unit = offset - a.nth * a.units;
    return a;
  }
  PA_DEVICE void skip(Cursor& a, int units) const {  // at most to the tile's end
    a.at += units;
    a.unit += units;
    a.left -= units;
    if (!kClusters && a.left == 0 && a.at - rest.at > rest.left) {  // the first piece's end, which is the part's
      a = rest;
      return;
    }
    if (a.unit < a.units || a.left == 0) return;
    a.unit = 0;
    if (++a.nth < p.line_heads) return;
    a.nth = 0;
    do a.len = length_again(++a.b);
    while (kRagged && a.len < 0);
    a.units = units_of(a.len);
  }
  PA_DEVICE int head_of(int nth) const { return nth * p.lines + line; }
  // The first of this wave's keys in the cursor's unit.
  PA_DEVICE int key(const Cursor& a) const { return (first_unit(a.len) + a.unit) * kUnit + wave * kKeys; }
  // The keys of a sequence that its row sees: so many from `lo` on, of which `whole` begin 16 that are. Kept, since the loops have no time for them.
  struct Seen { int lo, count, whole; };
  PA_DEVICE Seen seen(int len) const {
    const int lo = kept(first_key(len)), count = kept(len - lo);
    return {lo, count, kept(max_of(0, count - (kKeys - 1)))};
  }
  static PA_DEVICE bool sees_all(const Seen& s, int key) { return static_cast<u32>(key - s.lo) < static_cast<u32>(s.whole); }

  // The pages of this wave's keys in the units from the cursor's on, one a lane: a look-up is a round trip, and one serves 32 units.
  PA_DEVICE int look_up(const Cursor& a) const {
    const int first = key(a) + lane * kUnit;
    return first < a.len && first + kKeys > first_key(a.len) ? static_cast<int>(page_of(p, a.b, first)) : 0;
  }

  // ---- loading

  static constexpr int kEach = 16 / static_cast<int>(sizeof(C)), kPieces = kD / kEach;  // elements of a piece, pieces of a row
  static constexpr bool kColumn = 32 % kPieces == 0;  // a lane stays in its column of pieces
  static PA_DEVICE int place_of(int r, int d) {
    if (kWiden && kTurned) return (r * kD + d) ^ turn_of(r);
    return r * kPitch + (kTurned ? d ^ (r & 7) * kEach : d);
  }
  // Rows of an 8-bit cache, which may share a line. No bank conflicts where neighbours are read together (keys), nor where every second row is
  // (values); of heads of 96 columns, whose rows are not turned, the latter come in pairs.
  static PA_DEVICE int turn_of(int r) { return ((r & 6) ^ (kD % 128 == 0 ? (r & 1) << 2 : 0)) * 16; }
  // A place some columns on, of rows whose columns' bits are their own.
  static constexpr bool kMoves = !kTurned || (kD & (kD - 1)) == 0;
  static PA_DEVICE int moved(int place, int columns) { return kTurned ? place ^ columns : place + columns; }

  // Where copies are: units of a segment to come, their pages, the wave's next key, and this lane's first piece of row 0 of page 0.
  struct Ahead {
    Cursor at;
    Seen seen;
    int units, nth, pages, key;
    const C* k;
    const C* v;
  };
  PA_DEVICE void enter(Ahead& a) const {
    a.units = min_of(a.at.units - a.at.unit, a.at.left);
    if (a.units == 0) return;
    a.nth = 0;
    a.pages = look_up(a.at);
    a.key = key(a.at);
    a.seen = seen(a.at.len);
    const int r = kColumn ? lane / kPieces : 0, d = kColumn ? lane % kPieces * kEach : 0, head = head_of(a.at.nth);
    a.k = static_cast<const C*>(p.k) + head * p.k_head + r * p.k_token + d;
    a.v = static_cast<const C*>(p.v) + head * p.v_head + r * p.v_token + d;
  }
  // Starts the copies of the rows of 16 keys from `key` on; of those that are not seen no byte is read. Strides fit 32 bits (native.py).
  PA_DEVICE void copy_rows(C* to, const C* from, int row, const Seen& seen, int key) const {
    auto bytes = [&](int r) { return static_cast<u32>(key + r - seen.lo) < static_cast<u32>(seen.count) ? 16 : 0; };
    if constexpr (kColumn) {
      constexpr int kStep = 32 / kPieces;
      const int r = lane / kPieces, d = lane % kPieces * kEach;
      if (sees_all(seen, key)) {
#pragma unroll
        for (int i = 0; i < kKeys / kStep; ++i) copy_async16_once(to + place_of(r + i * kStep, d), from + static_cast<i64>(row) * (i * kStep));
      } else {
#pragma unroll 1
        for (int i = 0; i < kKeys / kStep; ++i)
          copy_async16_once(to + place_of(r + i * kStep, d), from + static_cast<i64>(row) * (i * kStep), bytes(r + i * kStep));
      }
    } else {
      // After kPeriod of these copies a lane is in the column of its first again, kStep rows below: one address for all of those.
      constexpr int kPeriod = min_of(kPieces / (kPieces & -kPieces), ceil_div(kKeys * kPieces, 32)), kStep = 32 * kPeriod / kPieces;
#pragma unroll
      for (int i = 0; i < kPeriod; ++i) {
        const int piece = i * 32 + lane, first = piece / kPieces, d = piece % kPieces * kEach;
        if (kKeys * kPieces % 32 != 0 && piece >= kKeys * kPieces) break;
        const C* at = from + static_cast<i64>(row) * first + d;
#pragma unroll
        for (int r = 0; r < kKeys; r += kStep)
          copy_async16_once(to + place_of(first + r, d), at + static_cast<i64>(row) * r, bytes(first + r));
      }
    }
  }
  // The same of 16 rows that exist, of an 8-bit cache: with few instructions, since half of the bytes leave time for half of them.
  PA_DEVICE void copy_whole(C* to, const C* from, int row) const {
    constexpr int kStep = 32 / kPieces;
#pragma unroll
    for (int i = 0; i < kKeys / kStep; ++i) copy_async16_once(to + (copy_place ^ turn_of(i * kStep)) + i * kStep * kD, from + product(row, i * kStep));
  }
  static PA_DEVICE u64 product(int a, int b) { return static_cast<u64>(static_cast<u32>(a)) * static_cast<u32>(b); }  // of what is not negative
  // The copies of one more unit, if there is one.
  PA_DEVICE void issue(Ahead& a, int slot) const {
    if (a.units > 0) {
      const int page = warp::shfl_idx<32>(a.pages, a.nth), in_page = a.key & ((1 << p.page_shift) - 1);
      const int k_page = static_cast<int>(p.k_batch), k_row = static_cast<int>(p.k_token), v_page = static_cast<int>(p.v_batch), v_row = static_cast<int>(p.v_token);
      C* to = reinterpret_cast<C*>(stage(wave, slot));
      if (kWiden && kColumn && sees_all(a.seen, a.key)) {
        copy_whole(to, a.k + (product(page, k_page) + product(in_page, k_row)), k_row);
        copy_whole(to + kKeys * kPitch, a.v + (product(page, v_page) + product(in_page, v_row)), v_row);
      } else {
        copy_rows(to, a.k + static_cast<i64>(page) * k_page + static_cast<i64>(in_page) * k_row, k_row, a.seen, a.key);
        copy_rows(to + kKeys * kPitch, a.v + static_cast<i64>(page) * v_page + static_cast<i64>(in_page) * v_row, v_row, a.seen, a.key);
      }
      a.key += kUnit;
      --a.units;
      if (++a.nth == 32 || a.units == 0) {  // more pages, or the next segment
        skip(a.at, a.nth);
        enter(a);
      }
    }
    copy_commit();
  }

  // ---- one tile's state in registers. Lane 4g + c has heads 2c and 2c + 1; keys, or columns, g and g + 8 of every 16.

  struct State {
    float o[kTiles][4];  // (column g, head 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1)
    float m[2], l[2];    // l: this lane's part
  };
  // Head g, columns 2c, 2c + 1 and 2c + 8, 2c + 9 of every 16; with an 8-bit cache, the columns of which step8 reads keys.
  struct Query {
    u32 x[kTiles][2];
    float k_scale, v_scale;  // of an 8-bit cache, where they are tensors
    float scale[2];          // times this, products of heads 2c and 2c + 1 are scores
  };
  PA_DEVICE void fetch(Query& q, const Cursor& a) const {
    const int g = lane >> 2, head = head_of(a.nth) * p.group + g;
    const T* row = static_cast<const T*>(p.q) + (kRagged ? token_again(a.b) * p.q_token : a.b * p.q_batch) + head * p.q_head;
    if constexpr (kWiden) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        Bytes8 x = {};
        if (g < p.group) x = *reinterpret_cast<const Bytes8*>(row + (t / kWords * 4 + (lane & 3)) * kVector + t % kWords * 4);
        q.x[t][0] = x.x[0];
        q.x[t][1] = x.x[1];
      }
      const int nth = head_of(a.nth);
      q.k_scale = p.k_scale ? p.k_scale[a.b * p.scale_batch_k + nth * p.scale_head_k] : 1.0f;
      q.v_scale = p.v_scale ? p.v_scale[a.b * p.scale_batch_v + nth * p.scale_head_v] : 1.0f;
    } else {
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) q.x[t][half] = g < p.group ? *reinterpret_cast<const u32*>(row + 2 * (lane & 3) + 16 * t + 8 * half) : 0;
    }
  }
  // What was fetched of a tile with an 8-bit cache, as its first step needs it.
  PA_DEVICE void prepare(Query& q) const {
    const float scale = p.scale * kLog2e * q.k_scale;
    q.scale[0] = q.scale[1] = scale;
    if constexpr (kIsBf16<T>) {
      int top = 0;  // bits of the row's largest element; a NaN's are larger than all
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) top = max_of(top, max_of(static_cast<int>(q.x[t][half] & 0x7fff0000u), static_cast<int>(q.x[t][half] << 17 >> 1)));
      top = max_of(top, warp::shfl_xor<32>(top, 1));
      top = max_of(top, warp::shfl_xor<32>(top, 2));
      const int up = min_of(127 + 14 + 127 - (top >> 23), 240);  // a float's exponent; 240: what it undoes is far from subnormal
      const float factor = bits_float(static_cast<u32>(up) << 23), inverse = bits_float(static_cast<u32>(254 - up) << 23);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          q.x[t][half] = pack2<f16>(bits_float(q.x[t][half] << 16) * factor, bits_float(q.x[t][half] & 0xffff0000u) * factor);
#pragma unroll
      for (int i = 0; i < 2; ++i) q.scale[i] = warp::shfl_idx<32>(inverse, 8 * (lane & 3) + 4 * i) * scale;
    }
  }
  static PA_DEVICE void clear(State& st) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) st.o[t][e] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      st.m[i] = -PA_INFINITY;
      st.l[i] = 0.0f;
    }
  }

  // This wave's 16 keys from `key` on, as far as they are seen.
  PA_DEVICE void step(State& st, const Query& q, int key, const Seen& seen, int slot) const {
    const T* k = reinterpret_cast<const T*>(stage(wave, slot));
    const T* v = k + kKeys * kPitch;
    float s[2][4] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      u32 a[4];
      load_matrices(a, k + place_of(lane & 15, 16 * t + (lane >> 4) * 8));
      multiply_16x8x16(s[t & 1], a, q.x[t][0], q.x[t][1], T{});
    }
    const float scale = p.scale * kLog2e;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = (s[0][e] + s[1][e]) * scale;
    u32 low, high;
    weigh(st, x, key, seen, low, high, T{});
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      u32 a[4];
      load_matrices_transposed(a, v + place_of((lane & 7) + (lane >> 4) * 8, 16 * t + (lane >> 3 & 1) * 8));
      multiply_16x8x16(st.o[t], a, low, high, T{});
    }
  }
  // The products of 16 keys, scaled to units of log2, to their probabilities, as products take them; st is of the base that they are relative to.
  template <class M>
  PA_DEVICE void weigh(State& st, float (&x)[4], int key, const Seen& seen, u32& low, u32& high, M) const {
    const int at = key + (lane >> 2) - seen.lo;
    float top[2];
    auto exceeds = [&] {  // masks what is not seen; whether a score exceeds a base by too much
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (static_cast<u32>(at + 8 * (e >> 1)) >= static_cast<u32>(seen.count)) x[e] = -PA_INFINITY;
#pragma unroll
      for (int i = 0; i < 2; ++i) top[i] = max_of(x[i], x[i + 2]);
      return top[0] - st.m[0] > kRoom + kSlack || top[1] - st.m[1] > kRoom + kSlack;  // sums of large scores would round to more
    };
    const bool capped = p.softcap > 0.0f;
    if (warp::wave_any(exceeds() || capped)) {  // one branch for what is rare
      bool raise = true;
      if (capped) {
        const float cap = p.softcap * kLog2e, inverse = reciprocal(cap);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = cap * tanh_of(x[e] * inverse);
        raise = warp::wave_any(exceeds());
      }
#pragma unroll
      for (int i = 0; i < 2 && raise; ++i) {
        float m = top[i];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) m = max_of(m, warp::shfl_xor<32>(m, d));
        m = max_of(m - kRoom, st.m[i]);
        const float shrink = weight(st.m[i], m);
        st.m[i] = m;
        st.l[i] *= shrink;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          st.o[t][i] *= shrink;
          st.o[t][i + 2] *= shrink;
        }
      }
    }
    const float base[2] = {st.m[0] == -PA_INFINITY ? 0.0f : st.m[0], st.m[1] == -PA_INFINITY ? 0.0f : st.m[1]};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = exp2_fast(x[e] - base[e & 1]);
      st.l[e & 1] += x[e];
    }
    low = turn_matrix(pack2<M>(x[0], x[1]));
    high = turn_matrix(pack2<M>(x[2], x[3]));
  }

  // The same of an 8-bit cache. Lane 4g + c reads kVector columns at a time of keys g and g + 8, the c-th of every four vectors, and kRun at a time
  // of values 2c, 2c + 1, 2c + 8 and 2c + 9, the g-th of every eight runs.
  static constexpr int kVector = kD % 64 == 0 ? 16 : kD % 32 == 0 ? 8 : 4, kWords = kVector / 4;
  static constexpr int kRun = kTiles == 8 ? 16 : kTiles % 4 == 0 ? 8 : kTiles % 2 == 0 ? 4 : 2, kRunTiles = kRun / 2;
  static constexpr int kChains = kTiles == 8 ? 4 : 2;  // of products that wait for each other: larger heads have no registers for more
  template <int kBytes> struct alignas(kBytes) Piece { u32 x[kBytes / 4]; };
  // The first of the two columns of O^T that lane 4g + c has of tile t.
  static PA_DEVICE int column_of(int t, int g) { return (t / kRunTiles * 8 + g) * kRun + t % kRunTiles * 2; }

  // The tiles of V^T that have run j of every lane.
  PA_DEVICE void values(u32 (&a)[kRunTiles][4], const u8* v, int j) const {
    const u8* even = v + (kMoves ? moved(v_places[0], 8 * j * kRun) : place_of(2 * (lane & 3), (8 * j + (lane >> 2)) * kRun));
    const u8* odd = v + (kMoves ? moved(v_places[1], 8 * j * kRun) : place_of(2 * (lane & 3) + 1, (8 * j + (lane >> 2)) * kRun));
    if constexpr (kRun == 2) {
      auto two = [](const u8* p) { return static_cast<u32>(*reinterpret_cast<const u16*>(p)); };
      widen4<C>(pick_bytes(two(even), two(odd), 0x5140), a[0][0], a[0][1]);
      widen4<C>(pick_bytes(two(even + 8 * kD), two(odd + 8 * kD), 0x5140), a[0][2], a[0][3]);
    } else {
      using Run = Piece<kRun>;
      const Run x[4] = {*reinterpret_cast<const Run*>(even), *reinterpret_cast<const Run*>(odd), *reinterpret_cast<const Run*>(even + 8 * kD),
                        *reinterpret_cast<const Run*>(odd + 8 * kD)};
#pragma unroll
      for (int i = 0; i < kRunTiles; ++i) {
        const u32 which = i % 2 ? 0x7362 : 0x5140;
        widen4<C>(pick_bytes(x[0].x[i / 2], x[1].x[i / 2], which), a[i][0], a[i][1]);
        widen4<C>(pick_bytes(x[2].x[i / 2], x[3].x[i / 2], which), a[i][2], a[i][3]);
      }
    }
  }

  PA_DEVICE void step8(State& st, const Query& q, int key, const Seen& seen, int slot) const {
    const u8* k = stage(wave, slot);
    const u8* v = k + kKeys * kD;
    float s[kChains][4] = {};
#pragma unroll
    for (int j = 0; j < kTiles / kWords; ++j) {
      const u8* at = k + (kMoves ? moved(k_place, 4 * j * kVector) : place_of(lane >> 2, (4 * j + (lane & 3)) * kVector));
      const auto low = *reinterpret_cast<const Piece<kVector>*>(at), high = *reinterpret_cast<const Piece<kVector>*>(at + 8 * kD);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int t = j * kWords + i;
        u32 a[4];
        widen4<C>(low.x[i], a[0], a[2]);
        widen4<C>(high.x[i], a[1], a[3]);
        multiply_16x8x16(s[t % kChains], a, q.x[t][0], q.x[t][1], f16{});
      }
    }
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = s[0][e] + s[1][e];
      if (kChains == 4) x[e] += s[2 % kChains][e] + s[3 % kChains][e];
      x[e] *= q.scale[e & 1];
    }
    u32 low, high;
    weigh(st, x, key, seen, low, high, f16{});
#pragma unroll
    for (int j = 0; j < kTiles / kRunTiles; ++j) {
      u32 a[kRunTiles][4];
      values(a, v, j);
#pragma unroll
      for (int i = 0; i < kRunTiles; ++i) multiply_16x8x16(st.o[j * kRunTiles + i], a[i], low, high, f16{});
    }
  }

  // ---- finishing: a wave has a row, a lane four columns of each 128

  struct Part { float o[kColumns][4], m, l; };
  PA_DEVICE bool mine(int k) const { return kD % 128 == 0 || k * 128 + lane * 4 < kD; }

  // Leaves this wave's state where the block can merge it.
  PA_DEVICE void publish(State& st, float v_scale, int slot) const {
    float* to = result(wave, slot);
    const int g = lane >> 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 2 * (lane & 3) + i;
#pragma unroll
      for (int d = 4; d < 32; d *= 2) st.l[i] += warp::shfl_xor<32>(st.l[i], d);
      if (r >= p.group) continue;
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if constexpr (kWiden) to[r * kRowFloats + column_of(t, g) + half] = st.o[t][i + 2 * half] * v_scale;
          else to[r * kRowFloats + 16 * t + 8 * half + g] = st.o[t][i + 2 * half];
      if (g == 0) {
        to[r * kRowFloats + kD] = st.m[i];
        to[r * kRowFloats + kD + 1] = st.l[i];
      }
    }
  }
  // Adds up to 32 states of a row in order; `at(i)` is where the i-th lies, kFar: in the workspace, where as many loads as can wait together.
  template <bool kFar = false, class At>
  PA_DEVICE Part sum(int count, At at) const {
    constexpr int kBatch = kColumns > 1 ? 2 : kFar ? kFarStates : 4;
    float x[kBatch][kColumns][4];
    auto fetch = [&](int from) {
#pragma unroll
      for (int n = 0; n < kBatch; ++n)
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          if (from + n >= count || !mine(k)) continue;
          const float* o = at(from + n) + k * 128 + lane * 4;
          if (kFar) load4_shared_by_blocks(o, x[n][k]);
          else *reinterpret_cast<Float4*>(x[n][k]) = *reinterpret_cast<const Float4*>(o);
        }
    };
    float m = -PA_INFINITY, l = 0.0f;  // of the lane's state
    if (lane < count) {
      m = kFar ? load_shared_by_blocks(at(lane) + kD) : at(lane)[kD];
      l = kFar ? load_shared_by_blocks(at(lane) + kD + 1) : at(lane)[kD + 1];
    }
    fetch(0);
    Part a = {};
    a.m = warp::reduce_max<32>(m);
    const float factor = weight(m, a.m);
    a.l = warp::reduce_sum<32>(factor * l);
    for (int from = 0; from < count; from += kBatch) {
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        if (from + n >= count) break;
        const float f = warp::shfl_idx<32>(factor, from + n);
#pragma unroll
        for (int k = 0; k < kColumns; ++k)
          if (mine(k))
#pragma unroll
            for (int e = 0; e < 4; ++e) a.o[k][e] += f * x[n][k][e];
      }
      fetch(from + kBatch);
    }
    return a;
  }
  PA_DEVICE void write(const Part& a, int b, int nth, int start_q, int r) const {
    const int head = head_of(nth) * p.group + r;
    const Finish f = finish<T>(p, a.m, a.l, head);
    const Sequence s = {1, 0, kRagged ? start_q : 0, 0};
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      if (!mine(k)) continue;
      float y[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = a.o[k][e] * (f.factor * p.v_factor);
      write_out<T>(p, out_offset(p, s, b, 0, head), k * 128 + lane * 4, y);
    }
    if (p.lse && lane == 0) p.lse[lse_offset(p, s, b, 0, head)] = f.lse;
  }

  // The rows of a tile that `count` blocks share are merged by them in turn: row r by the r % count-th.
  static PA_DEVICE int rows_each(int count) { return quotient(kRows + count - 1, count); }
  PA_DEVICE void send(const Part& a, int r, int first, int count) const {
    const int turn = quotient(r, count), to = r - turn * count, kind = to == 0 ? 1 : 0;
    const sm90::Peer barrier = sm90::peer(&mail.full[kind], first + to);
    const sm90::Peer row = sm90::peer(mail.rows[kind][(part - first) * rows_each(count) + turn], first + to);
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      if (mine(k)) sm90::send4(row + (k * 128 + lane * 4) * 4, a.o[k], barrier);
    const float rest[4] = {a.m, a.l, 0.0f, 0.0f};
    if (lane == 0) sm90::send4(row + kD * 4, rest, barrier);
  }

  // Without a cluster: leaves this block's state of a row in the workspace; the last of the tile's blocks merges them all.
  PA_DEVICE void post(const Part& a, const Cursor& c, int start_q, int r, int first, int count) const {
    auto memory = [&](int from) {  // a part has two slots: of the tile that its begin cuts, and of the one that its end cuts
      const int slot = 2 * (from * p.lines + line) + (from == first ? 1 : 0);
      return in_global(p.partial) + (static_cast<i64>(slot) * kRows + r) * kRowFloats;
    };
    float* to = memory(part);
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      if (mine(k)) *reinterpret_cast<Float4*>(to + k * 128 + lane * 4) = {{a.o[k][0], a.o[k][1], a.o[k][2], a.o[k][3]}};
    if (lane == 0) *reinterpret_cast<Float4*>(to + kD) = {{a.m, a.l, 0.0f, 0.0f}};
    publish_to_blocks();
    warp::wave_sync();
    int before = 0;
    if (lane == 0) {
      i32* arrivals = in_global(p.counters) + kQueues + (first * p.lines + line) * kRows + r;
      before = atomic_add_ordered(arrivals, 1);
      if (before == count - 1) *arrivals = 0;  // as the next launch expects it
    }
    if (warp::shfl_idx<32>(before, 0) != count - 1) return;
    warp::wave_sync();  // what lane 0 has seen, all lanes see
    Part all = sum<true>(min_of(count, 32), [&](int i) { return memory(first + i); });
    for (int base = 32; base < count; base += 32) {
      const Part more = sum<true>(min_of(count - base, 32), [&](int i) { return memory(first + base + i); });
      const float m = max_of(all.m, more.m), keep = weight(all.m, m), factor = weight(more.m, m);
      all.l = keep * all.l + factor * more.l;
      all.m = m;
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) all.o[k][e] = keep * all.o[k][e] + factor * more.o[k][e];
    }
    write(all, c.b, c.nth, start_q, r);
  }

  // The cursor stands at the begin of a segment of `units`, whose last keys and values were in `slot`.
  PA_DEVICE void finish_segment(const Cursor& a, int units, State& st, float v_scale, int slot, const Deal& dealt) const {
    publish(st, v_scale, slot);
    block_sync();
    const bool begins = a.unit == 0, ends = a.unit + units == a.units;
    const int start = a.at - a.unit, start_q = kRagged ? token_again(a.b) : 0;
    const int first = begins ? part : dealt.worker(start), count = (ends ? part : dealt.worker(start + a.units - 1)) - first + 1;
    for (int r = wave; r < p.group; r += kWaves) {
      const Part sums = sum(kWaves, [&](int w) { return result(w, slot) + r * kRowFloats; });
      if (count == 1) write(sums, a.b, a.nth, start_q, r);
      else if constexpr (kClusters) send(sums, r, first, count);
      else post(sums, a, start_q, r, first, count);
    }
    if (kClusters && count > 1 && thread_x() == 0) mail.tiles[begins ? 1 : 0] = {first, count, a.b, a.nth, start_q};
  }
  // This block's rows of the tiles that it shares.
  PA_DEVICE void merge() const {
#pragma unroll 1
    for (int kind = 0; kind < 2; ++kind) {
      const Shared t = mail.tiles[kind];
      const int turn = part - t.first;
      const int rows = t.count > 0 && turn < p.group ? quotient(p.group - turn + t.count - 1, t.count) : 0;
      if (rows == 0) continue;
      if (thread_x() == 0) sm90::expect(mail.full[kind], rows * t.count * kRowFloats * 4);
      sm90::wait_for_peers(mail.full[kind], 0);
      for (int i = wave; i < rows; i += kWaves) {
        const int each = rows_each(t.count);
        write(sum(t.count, [&](int n) { return mail.rows[kind][n * each + i]; }), t.b, t.nth, t.start_q, turn + i * t.count);
      }
    }
  }

  // ---- a block's work

  // The part's begin. If its end cuts a tile that begins in it, that tile comes first, and the rest after it.
  PA_DEVICE Cursor begin(const Deal& dealt, const Chunk& chunk) {
    const int start = dealt.begin(part), end = dealt.begin(part + 1);
    Cursor a = place(start, end - start, chunk);
    if (kClusters) return a;
    rest = {0, 0, 0, 0, 0, end, 0};
    if (end == dealt.total) return a;
    Cursor last = place(end, 0, chunk);
    if (last.unit == 0 || end - last.unit <= start) return a;
    last.at = end - last.unit;
    last.left = last.unit;
    last.unit = 0;
    rest = a;
    rest.left = last.at - start;
    return last;
  }

  PA_DEVICE void run() {
    if (kClusters) {
      if (thread_x() == 0) {
        for (int kind = 0; kind < 2; ++kind) {
          sm90::init(mail.full[kind], 1);
          mail.tiles[kind].count = 0;
        }
        sm90::init_done();
      }
      sm90::cluster_arrive();
    }
    const Chunk chunk = look_through(0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      lens[i] = chunk.len[i];
      if (kRagged) starts[i] = 4 * lane + i < p.batch ? token(4 * lane + i) : 0;
    }
    int total = chunk.total;
    for (int base = 128; base < p.batch; base += 128) total += look_through(base).total;
    const Deal dealt = deal(p, total);
    if (part >= dealt.workers) {
      if (kClusters) sm90::cluster_wait();
      return;
    }
    Cursor a = begin(dealt, chunk);
    Ahead ahead = {a};
    enter(ahead);
    Query q;
    fetch(q, a);
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) issue(ahead, slot);
    if (kClusters) sm90::cluster_wait();  // peers are there to be sent to
    // owed: a slot that holds a finished tile's state yet, to be filled as soon as that is merged; of 8-bit caches, whose states have a place
    // of their own, whether one is there
    int slot = 0, owed = -1;
    while (a.left > 0) {
      State st;
      clear(st);
      const int units = min_of(a.units - a.unit, a.left), first = key(a);
      const Seen its = seen(a.len);
      Cursor next = a;
      skip(next, units);
      Query next_q;
      if constexpr (kWiden) {
        prepare(q);
      } else {
        next_q = q;
        if (next.left > 0) fetch(next_q, next);  // long before it is needed
      }
#pragma unroll 1
      for (int n = 0; n < units; ++n) {
        copy_wait<kStages - 1>();
        warp::wave_sync();
        if constexpr (kWiden) step8(st, q, first + n * kUnit, its, slot);
        else step(st, q, first + n * kUnit, its, slot);
        warp::wave_sync();  // before this stage is filled again
        if (owed >= 0) {
          block_sync();
          if (!kWiden) issue(ahead, owed);
          owed = -1;
        }
        if (n + 1 == units) break;
        issue(ahead, slot);
        slot = slot + 1 == kStages ? 0 : slot + 1;
      }
      const float v_scale = q.v_scale;
      if constexpr (kWiden) {
        issue(ahead, slot);
        if (next.left > 0) fetch(q, next);  // while this one is merged: there are no registers for two
      }
      finish_segment(a, units, st, v_scale, slot, dealt);
      owed = slot;
      if (!kWiden) copy_commit();  // in the place of the copies to come
      slot = slot + 1 == kStages ? 0 : slot + 1;
      a = next;
      if constexpr (!kWiden) q = next_q;
    }
    if constexpr (kClusters) {
      if (owed >= 0) block_sync();  // what thread 0 noted is seen
      merge();
    }
  }
};

}  // namespace portattn
