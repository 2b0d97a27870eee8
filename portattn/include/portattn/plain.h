// Decode steps that ask for nothing special (params.h, PlainParams): decode.h's arithmetic, arranged for latency.
//
// Computes   as decode.h, for one query token a sequence and a paged cache.
// Schedule   schedule.h's lines, cut into even parts. A block draws a ticket and takes the part of that number, counted from
//            the line's end: whoever owns a tile's first unit has the highest ticket among those that share it, so it waits
//            only for blocks that were there before it, and merges their states into the result.
// Merging    States travel as words that announce themselves: the workspace holds kNothing between launches, no arithmetic
//            makes that pattern, and a reader takes a word when it is something else. No fence, no counter, and one round
//            trip where "last to arrive" takes three.
// Loading    One cursor a wave runs kStages - 1 units ahead of the arithmetic, across the ends of tiles; what a stage holds
//            is written beside it.
// Numerics   as decode.h: parts depend on the lengths only, states merge in order of keys.
// Vendor     as decode.h, and words of memory that other blocks of the launch can watch (post, peek).
#pragma once

#include "portattn/decode.h"

namespace portattn {

constexpr int kMaxSequences = 1024;  // of a plain call: every wave looks through all lengths

template <class T, class C, int kD, int kWaves, int kStages>
struct PlainDecode : Decode<T, C, kD, kWaves, kStages, PlainParams<kD>> {
  using P = PlainParams<kD>;
  using Base = Decode<T, C, kD, kWaves, kStages, P>;
  using State = typename Base::State;
  using Base::p;
  using Base::small;
  using Base::wave;
  using Base::lane;
  using Base::kThreads;
  using Base::kKeys;
  using Base::kPitch;
  using Base::kUnit;
  using Base::q_shared;
  static_assert(!Base::kStaged && warp::kWave == 32, "copies are asynchronous");

  // What a stage holds: a unit of a tile.
  enum : int { kBegins = 1, kEnds = 2 };
  struct alignas(16) Unit { int b, nth, len, unit, units, from, at, is; };  // from: the segment's first unit; at: place on the line
  struct Shared {
    Unit units[kWaves][kStages];
    int ticket;
  };
  static constexpr int kSharedAt = (Base::kSharedBytes + 15) / 16 * 16;
  static constexpr int kSharedBytes = kSharedAt + static_cast<int>(sizeof(Shared));

  Shared& shared;
  int line;

  PA_DEVICE PlainDecode(const P& params, u8* memory, int line_)
      : Base(params, memory), shared(*reinterpret_cast<Shared*>(memory + kSharedAt)), line(line_) {}

  // ---- where parts are

  // 128 sequences from `base` on, four a lane: their lengths, and the units before this lane's.
  struct Chunk { int len[4], mine, before, total; };
  PA_DEVICE int units_of(int len) const { return max_of(1, quotient(len + kUnit - 1, kUnit)); }
  PA_DEVICE int weight_of(int len) const { return len < 0 ? 0 : units_of(len) * p.line_heads; }
  PA_DEVICE int length(int b) const { return length_of(p, b, p.len_k); }
  PA_DEVICE Chunk look_through(int base) const {
    Chunk c;
    if (p.batch == 1) {
      c.len[0] = length(0);
      c.total = weight_of(c.len[0]);
      return c;
    }
    const int from = base + 4 * lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) c.len[i] = from + i < p.batch ? length(from + i) : -1;
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

  struct Cursor {
    int b, nth, unit, units, len, from;  // nth: the kv head, counted on the line
    int at, left;                        // place on the line; units of the part from here on
  };
  // The beginning of a part of `size` units at place `at`. `c` is what was seen of the first 128 sequences.
  PA_DEVICE Cursor place(int at, int size, Chunk c) const {
    Cursor a;
    a.at = at;
    a.left = size;
    if (p.batch == 1) {
      a.b = 0;
      a.len = c.len[0];
      settle(a, at);
      return a;
    }
    int base = 0, seen = 0;
    while (at >= seen + c.total) {
      seen += c.total;
      base += 128;
      c = look_through(base);
    }
    const int mine = at - seen - c.before;  // from this lane's first unit
    int i = 0, len = c.len[0], offset = mine;
#pragma unroll
    for (int n = 1; n < 4; ++n) {
      const int w = weight_of(c.len[n - 1]);
      if (i != n - 1 || offset < w) continue;
      offset -= w;
      i = n;
      len = c.len[n];
    }
    const u32 owner = warp::ballot(0 <= mine && mine < c.mine);  // one bit: its number is a float's exponent
    const int lane_of = static_cast<int>(float_bits(static_cast<float>(owner)) >> 23) - 127;
    a.b = base + 4 * lane_of + warp::shfl_idx<32>(i, lane_of);
    a.len = warp::shfl_idx<32>(len, lane_of);
    settle(a, warp::shfl_idx<32>(offset, lane_of));
    return a;
  }
  PA_DEVICE void settle(Cursor& a, int offset) const {  // units from the sequence's first
    a.units = units_of(a.len);
    a.nth = offset < a.units ? 0 : quotient(offset, a.units);
    a.unit = a.from = offset - a.nth * a.units;
  }
  PA_DEVICE void advance(Cursor& a) const {
    ++a.at;
    ++a.unit;
    --a.left;
    if (a.unit < a.units || a.left == 0) return;
    a.unit = a.from = 0;
    if (++a.nth < p.line_heads) return;
    a.nth = 0;
    ++a.b;
    a.len = length(a.b);
    a.units = units_of(a.len);
  }
  PA_DEVICE int head_of(int nth) const { return nth * p.lines + line; }
  PA_DEVICE int key(int unit) const { return unit * kUnit + wave * kKeys; }

  // The pages of this wave's keys in the units from `base` on, one a lane: a look-up is a round trip, and one serves 32 units.
  struct Pages { int b, base, of; };
  PA_DEVICE bool holds(const Pages& x, const Cursor& a) const { return x.b == a.b && 0 <= a.unit - x.base && a.unit - x.base < 32; }
  PA_DEVICE Pages look_up(const Cursor& a) const {
    const int first = key(a.unit + lane);
    return {a.b, a.unit, first < a.len ? static_cast<int>(page_of(p, a.b, first)) : 0};
  }

  // ---- q

  // The first tile's q is on its way while the page of its keys is looked up.
  static constexpr int kQPieces = ceil_div(kTileRows * (kD / 8), kThreads);
  struct Query { Bytes16 x[kQPieces]; };
  PA_DEVICE Query fetch_q(int b, int head) const {
    Query q;
    const T* base = in_global(static_cast<const T*>(p.q)) + b * p.q_batch + static_cast<i64>(head * p.group) * p.q_head;
#pragma unroll
    for (int n = 0; n < kQPieces; ++n) {
      const int i = n * kThreads + thread_x(), r = i / (kD / 8), d = i % (kD / 8) * 8;
      q.x[n] = {};
      if (r < p.group) q.x[n] = *reinterpret_cast<const Bytes16*>(base + r * p.q_head + d);
    }
    return q;
  }
  PA_DEVICE void put_q(const Query& q) const {
#pragma unroll
    for (int n = 0; n < kQPieces; ++n) {
      const int i = n * kThreads + thread_x(), r = i / (kD / 8), d = i % (kD / 8) * 8;
      if (r < kTileRows) *reinterpret_cast<Bytes16*>(q_shared + r * kPitch + d) = q.x[n];
    }
  }
  PA_DEVICE void begin_tile(State& st) const {
#pragma unroll
    for (int t = 0; t < (Base::kHoldQ ? Base::kTiles : 0); ++t) mma::load_a(st.q[t], q_shared + t * 16, kPitch);
    st.scoring = {p.scale * kLog2e, 0.0f};
  }

  // ---- merging: a wave has a row, a lane four columns of each 128

  static constexpr int kColumns = ceil_div(kD, 128);
  struct Part { float o[kColumns][4], m, l; };
  PA_DEVICE bool mine(int k) const { return kD % 128 == 0 || k * 128 + lane * 4 < kD; }
  PA_DEVICE float* memory_of(int ticket) const { return this->slot_memory(ticket * p.lines + line); }

  PA_DEVICE Part of_waves(int r, int slot) const {
    Part a = {};
    a.m = small.m[0][r];
#pragma unroll
    for (int w = 1; w < kWaves; ++w) a.m = max_of(a.m, small.m[w][r]);
#pragma unroll
    for (int w = 0; w < kWaves; ++w) {
      const float factor = weight(small.m[w][r], a.m);
      a.l += factor * small.l[w][r];
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        if (!mine(k)) continue;
        const Float4 x = *reinterpret_cast<const Float4*>(this->result(w, slot) + r * kD + k * 128 + lane * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) a.o[k][e] += factor * x.x[e];
      }
    }
    return a;
  }
  PA_DEVICE void send(const Part& a, float* to, int r) const {
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      if (mine(k)) post4(to + r * kD + k * 128 + lane * 4, a.o[k]);
    if (lane == 0) {
      post(to + p.partial_rows * kD + r, a.m);
      post(to + p.partial_rows * (kD + 1) + r, a.l);
    }
  }
  // Adds every kStep-th state of the `others` tickets below `ticket`, from the nth on, in order; what was read is nothing again.
  template <int kStep>
  PA_DEVICE void collect(Part& a, int ticket, int others, int nth, int r) const {
    constexpr int kBatch = 16 / kColumns;  // loads that wait together
    for (int base = nth; base < others; base += 32 * kStep) {
      const int here = min_of(32, ceil_div(others - base, kStep));
      float x[kBatch][kColumns][4];
      auto from = [&](int i) { return memory_of(ticket - 1 - base - i * kStep); };
      auto look = [&](int i) {
#pragma unroll
        for (int n = 0; n < kBatch; ++n)
#pragma unroll
          for (int k = 0; k < kColumns; ++k)
            if (i + n < here && mine(k)) peek4(from(i + n) + r * kD + k * 128 + lane * 4, x[n][k]);
      };
      auto missing = [&](int i) {
        bool some = false;
#pragma unroll
        for (int n = 0; n < kBatch; ++n)
#pragma unroll
          for (int k = 0; k < kColumns; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) some |= i + n < here && mine(k) && is_nothing(x[n][k][e]);
        return some;
      };
      look(0);
      float m = -PA_INFINITY, l = 0.0f;  // of the lane's state
      if (lane < here) {
        float* at = from(lane) + p.partial_rows * kD + r;
        do {
          m = peek(at);
          l = peek(at + p.partial_rows);
        } while (is_nothing(m) || is_nothing(l));
        at[0] = at[p.partial_rows] = bits_float(kNothing);
      }
      const float top = max_of(a.m, warp::reduce_max<32>(m)), keep = weight(a.m, top), factor = weight(m, top);
      a.m = top;
      a.l = a.l * keep + warp::reduce_sum<32>(factor * l);
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) a.o[k][e] *= keep;
      for (int i = 0; i < here; i += kBatch) {
        if (i) look(i);
        while (missing(i)) look(i);
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
          const float f = warp::shfl_idx<32>(factor, min_of(i + n, 31));
          if (i + n >= here) continue;
#pragma unroll
          for (int k = 0; k < kColumns; ++k) {
            if (!mine(k)) continue;
            const float nothing = bits_float(kNothing);
            *reinterpret_cast<Float4*>(from(i + n) + r * kD + k * 128 + lane * 4) = {{nothing, nothing, nothing, nothing}};
#pragma unroll
            for (int e = 0; e < 4; ++e) a.o[k][e] += f * x[n][k][e];
          }
        }
      }
    }
  }
  PA_DEVICE void write(const Unit& u, const Part& a, int r) const {
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      if (mine(k)) this->write_row({1, u.len, 0, 0}, u.b, head_of(u.nth), r, k * 128 + lane * 4, a.o[k], a.m, a.l);
  }

  // Where waves that collect for another leave what they have: in q's place, which nobody reads after a segment's last unit.
  static constexpr int kHandBytes = (kD + 4) * static_cast<int>(sizeof(float));
  static_assert(kWaves * kHandBytes <= 16 * (kD + 8) * static_cast<int>(sizeof(T)), "a wave leaves one row");
  PA_DEVICE float* hand(int w) const { return reinterpret_cast<float*>(q_shared) + w * (kD + 4); }
  PA_DEVICE void leave(const Part& a) const {
    float* to = hand(wave);
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      if (mine(k)) *reinterpret_cast<Float4*>(to + k * 128 + lane * 4) = {{a.o[k][0], a.o[k][1], a.o[k][2], a.o[k][3]}};
    if (lane == 0) {
      to[kD] = a.m;
      to[kD + 1] = a.l;
    }
  }
  PA_DEVICE void take(Part& a, int w) const {
    const float* from = hand(w);
    const float m = from[kD], top = max_of(a.m, m), keep = weight(a.m, top), factor = weight(m, top);
    a.m = top;
    a.l = a.l * keep + factor * from[kD + 1];
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      if (!mine(k)) continue;
      const Float4 x = *reinterpret_cast<const Float4*>(from + k * 128 + lane * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) a.o[k][e] = a.o[k][e] * keep + factor * x.x[e];
    }
  }

  // Merges `others` states into the rows of a tile that begins here: a wave a row, or two where there are enough.
  PA_DEVICE void merge(const Unit& u, int slot, int ticket, int others) const {
    constexpr int kHalf = kWaves / 2;
    if (p.group > kHalf) {
      for (int r = wave; r < p.group; r += kWaves) {
        Part a = of_waves(r, slot);
        collect<1>(a, ticket, others, 0, r);
        write(u, a, r);
      }
      return;
    }
    const bool first = wave < kHalf;
    const int r = first ? wave : wave - kHalf;
    Part a = {};
    a.m = -PA_INFINITY;
    if (r < p.group) {
      if (first) a = of_waves(r, slot);
      collect<2>(a, ticket, others, first ? 0 : 1, r);
      if (!first) leave(a);
    }
    block_sync();
    if (!first || r >= p.group) return;
    take(a, wave + kHalf);
    write(u, a, r);
  }

  // The unit is the last of a segment.
  PA_DEVICE void finish_segment(const Unit& u, State& st, int slot, int ticket, int total) const {
    this->publish(st, p.group, slot);
    const bool begins = u.from == 0;
    const int others = begins && u.unit < u.units - 1 ? ticket - deal(p, total).worker(total - u.at - u.units + u.unit) : 0;
    block_sync();
    if (others > 0) {
      merge(u, slot, ticket, others);
    } else {
      for (int r = wave; r < p.group; r += kWaves) {
        const Part a = of_waves(r, slot);
        if (begins) write(u, a, r);
        else send(a, memory_of(ticket), r);
      }
    }
    block_sync();  // before the waves fill their stages again
  }

  // ---- a block's work

  PA_DEVICE void run() {
    i32* tickets = in_global(p.counters) + kQueues + 8 * line;
    int drawn = 0;
    if (thread_x() == 0) drawn = atomic_add(tickets, 1);  // while the lengths are on their way: nothing is asked of it before
    const Chunk chunk = look_through(0);
    int total = chunk.total;
    for (int base = 128; base < p.batch; base += 128) total += look_through(base).total;
    if (thread_x() == 0) {
      shared.ticket = drawn + 1;
      if (drawn + 1 == p.workers - 1) *tickets = -1;  // all have drawn: as the next launch expects it
    }
    const Deal dealt = deal(p, total);
    block_sync();
    const int ticket = shared.ticket;
    if (ticket >= dealt.workers) return;
    const int end = dealt.begin(ticket), begin = dealt.begin(ticket + 1);  // from the line's end
    Cursor ahead = place(total - begin, begin - end, chunk);
    Pages pages = look_up(ahead);
    const Query q = fetch_q(ahead.b, head_of(ahead.nth));
    const int units = ahead.left;
    auto issue = [&](int fill) {  // the copies of one more unit, if there is one
      if (ahead.left > 0) {
        const i64 page = warp::shfl_idx<32>(pages.of, ahead.unit - pages.base);
        this->load({1, ahead.len, 0, 0}, ahead.b, head_of(ahead.nth), page, key(ahead.unit), fill);
        if (lane == 0)
          shared.units[wave][fill] = {ahead.b, ahead.nth, ahead.len, ahead.unit, ahead.units, ahead.from, ahead.at,
                                      (ahead.unit == ahead.from ? kBegins : 0) | (ahead.unit == ahead.units - 1 || ahead.left == 1 ? kEnds : 0)};
        advance(ahead);
        if (ahead.left > 0 && !holds(pages, ahead)) pages = look_up(ahead);
      }
      copy_commit();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) issue(i);
    put_q(q);
    State st;
    this->clear(st);
    for (int n = 0, fill = kStages - 1, slot = 0; n < units; ++n) {
      issue(fill);
      fill = fill + 1 == kStages ? 0 : fill + 1;
      warp::wave_sync();
      const Unit u = shared.units[wave][slot];
      if (u.is & kBegins) {
        if (n > 0) load_q<T, kD, kTileRows, kThreads>(p, {1, u.len, 0, 0}, u.b, head_of(u.nth), 0, q_shared, kPitch);
        block_sync();
        begin_tile(st);
      }
      copy_wait<kStages - 1>();
      warp::wave_sync();
      if constexpr (Base::kWiden) {
        this->widen(slot);
        warp::wave_sync();
      }
      st.clear_lo = 0;
      st.clear_hi = u.len;
      this->step({1, u.len, 0, 0}, key(u.unit), st, slot, [] {});
      warp::wave_sync();  // before this stage is filled again
      if (u.is & kEnds) {
        finish_segment(u, st, slot, ticket, total);
        this->clear(st);
      }
      slot = slot + 1 == kStages ? 0 : slot + 1;
    }
  }
};

}  // namespace portattn
