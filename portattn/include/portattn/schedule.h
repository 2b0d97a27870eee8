// Who works on what, decided on the device from the lengths: no plan, no synchronisation with the host.
//
// Work is counted in units of kUnit keys of one tile (16 packed rows of one sequence and kv head). Units form lines:
// sequence by sequence, kv head by kv head, tile by tile, key block by key block, and every worker takes a part of its
// line of the same length, give or take one unit, whatever the lengths of the sequences. Line i of p.lines has the kv
// heads i, i + lines, …: workers side by side read the same tokens of neighbouring heads at the same time, which lie
// side by side in memory too. A tile that several
// workers share is merged by the last of them to arrive. With batch_invariant a tile is
// cut at fixed places instead (a function of its own length) and workers take whole cuts.
#pragma once

#include "portattn/kv_view.h"

namespace portattn {

// A tile's keys in units, absolute: unit u is keys [u * kUnit, (u + 1) * kUnit). At least one, so that rows that
// see nothing are written too.
struct Work {
  int first, units, tiles, cut;
};

constexpr int kTileRows = 16;
constexpr int kDecodeRows = 64;    // sequences of more packed rows are prefill.h's, where the launch has it
constexpr int kMaxCuts = 16;       // of a tile under batch_invariant
constexpr int kMaxCutTiles = 4;    // sequences of more tiles are not cut: they fill the device, and the workspace stays small
constexpr int kMinCutKeys = 256;

template <int kUnit, class P>
PA_DEVICE Work work_of(const P& p, const Sequence& s, bool tiled_elsewhere) {
  const int rows = s.len_q * p.group;
  Work w = {0, 1, ceil_div(rows, kTileRows), 1 << 30};
  if (s.len_q <= 0 || (tiled_elsewhere && rows > kDecodeRows)) {
    w.tiles = 0;
    return w;
  }
  const Span v = visible(p, s, 0, s.len_q - 1);
  w.first = quotient(v.lo, kUnit);
  w.units = max_of(1, quotient(v.hi + kUnit - 1, kUnit) - w.first);
  if ((p.flags & kInvariant) && w.tiles <= kMaxCutTiles) w.cut = max_of(kMinCutKeys / kUnit, ceil_div(w.units, kMaxCuts));
  return w;
}
template <class P>
PA_DEVICE int weight_of(const P& p, const Work& w) { return w.tiles * w.units * p.line_heads; }

// How the line is dealt out: the first `more` workers take `each` + 1 units, the others `each`. Nobody takes none.
struct Deal {
  int total, workers, each, more;
  PA_DEVICE int begin(int worker) const { return worker * each + min_of(worker, more); }
  PA_DEVICE int worker(int unit) const {
    const int split = more * (each + 1);
    return unit < split ? quotient(unit, each + 1) : more + quotient(unit - split, each);
  }
};
template <class P>
PA_DEVICE Deal deal(const P& p, int total) {
  if (total <= p.workers) return {total, total, 1, 0};
  const int each = p.workers == 1 ? total : quotient_by(total, p.workers_inverse, p.workers_shift);
  return {total, p.workers, each, total - each * p.workers};
}

// A worker's place on the line. Its part is a row of segments: pieces of one tile, up to the tile's end, the next cut
// or the end of the part. Between segments it only counts; the slow steps are at their ends.
template <int kUnit, class P = AttentionParams>
struct Cursor {
  int b, tile, unit;      // tile counts over the line's kv heads: nth head * work.tiles + row tile
  int at, end;            // places on the line: here, and the end of the part
  int left;               // units of this segment from here on; 0: the part is done
  int from;               // the segment's first unit
  int line, head_kv, first_row;
  Sequence s;
  Work work;
  bool invariant, elsewhere;

  PA_DEVICE int key() const { return (work.first + unit) * kUnit; }
  PA_DEVICE bool done() const { return left == 0; }

  PA_DEVICE void load(const P& p) {
    s = sequence(p, b);
    s = {uniform(s.len_q), uniform(s.len_k), uniform(s.start_q), uniform(s.start_k)};
    work = work_of<kUnit>(p, s, elsewhere);
  }
  PA_DEVICE void enter_tile(const P& p) {
    const int nth = tile == 0 ? 0 : quotient(tile, work.tiles);
    head_kv = nth * p.lines + line;
    first_row = (tile - nth * work.tiles) * kTileRows;
  }
  PA_DEVICE void next_tile(const P& p) {
    unit = 0;
    if (++tile == work.tiles * p.line_heads) {
      tile = 0;
      do {
        if (++b >= p.batch) return;
        load(p);
      } while (work.tiles == 0);
    }
    enter_tile(p);
  }
  PA_DEVICE void enter_segment() {
    from = unit;
    left = at >= end ? 0 : min_of(work.units - unit, invariant ? work.cut : end - at);
  }
  // Puts the cursor `offset` units into sequence b_, whose first unit is at `start` on the line. A worker that begins
  // inside a cut leaves the rest of it to the one before.
  PA_DEVICE void place(const P& p, int line_, int b_, int start, int offset, int end_, bool elsewhere_) {
    line = line_;
    b = b_;
    elsewhere = elsewhere_;
    invariant = p.flags & kInvariant;
    end = end_;
    at = start + offset;
    load(p);
    tile = offset < work.units ? 0 : quotient(offset, work.units);
    unit = offset - tile * work.units;
    enter_tile(p);
    if (invariant) {
      const int to = min_of(work.units, ceil_div(unit, work.cut) * work.cut);
      at += to - unit;
      unit = to;
      if (unit == work.units) next_tile(p);
    }
    enter_segment();
  }
  // Over units of this segment that are not its last.
  PA_DEVICE void skip(int units) {
    at += units;
    unit += units;
    left -= units;
  }
  PA_DEVICE void next(const P& p) {
    ++at;
    ++unit;
    if (--left) return;
    if (unit == work.units) next_tile(p);
    enter_segment();
  }
};

struct ScheduleShared {
  int sums[32];
  int b, start;
};

// Deals out a line among its workers and puts the cursor at this worker's part. Every thread of the block calls it. kAlone: a batch of one
// has a way of its own.
template <int kUnit, int kThreads, bool kAlone, class P>
PA_DEVICE Deal schedule(const P& p, int line, int worker, bool elsewhere, Cursor<kUnit, P>& cursor, ScheduleShared& shared) {
  cursor.left = 0;
  if (kAlone && p.batch == 1) {  // no scan: saves two barriers where latency is all
    const Deal d = deal(p, uniform(weight_of(p, work_of<kUnit>(p, sequence(p, 0), elsewhere))));
    if (worker < d.workers) cursor.place(p, line, 0, 0, d.begin(worker), d.begin(worker + 1), elsewhere);
    return d;
  }
  const int each = ceil_div(p.batch, kThreads);
  const int from = min_of(p.batch, thread_x() * each), to = min_of(p.batch, from + each);
  int mine = 0;
  for (int b = from; b < to; ++b) mine += weight_of(p, work_of<kUnit>(p, sequence(p, b), elsewhere));
  int before = mine;  // inclusive scan over the warp, then over the warps
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int x = warp::shfl_idx<32>(before, warp::lane() - d);
    if (warp::lane() >= d) before += x;
  }
  const int w = thread_x() / 32;
  if (warp::lane() == 31) shared.sums[w] = before;
  block_sync();
  before -= mine;
  int total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < w) before += shared.sums[i];
    total += shared.sums[i];
  }
  const Deal d = deal(p, uniform(total));
  if (worker >= d.workers) return d;
  const int begin = d.begin(worker);
  if (before <= begin && begin < before + mine) {
    int b = from, start = before;
    for (;;) {
      const int units = weight_of(p, work_of<kUnit>(p, sequence(p, b), elsewhere));
      if (begin < start + units) break;
      start += units;
      ++b;
    }
    shared.b = b;
    shared.start = start;
  }
  block_sync();
  const int b = uniform(shared.b), start = uniform(shared.start);
  cursor.place(p, line, b, start, begin - start, d.begin(worker + 1), elsewhere);
  return d;
}

}  // namespace portattn
