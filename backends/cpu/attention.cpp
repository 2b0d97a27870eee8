// Attention on CPU behind a C ABI: no torch, no Python, no OpenMP of its own. Compiled once for each instruction set (vec.h).
//
// A call is cut into tiles (some query tokens of one sequence, with all query heads of one kv head, so that K and V are
// read once for the group) and each tile into splits of its keys, where there are too few tiles for the threads. Threads
// take units from a counter; who finishes a tile's last split merges them, always in the same order.
// With few rows a tile has several kv heads: where heads lie side by side, memory is then read almost in order.

#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "append.h"
#include "kernels.h"
#include "params.h"
#include "threads.h"

namespace pa {
namespace {

constexpr int64_t kInvariantSplit = 2048;   // keys of a split with batch_invariant: whatever else runs
constexpr int64_t kLeastSplit = 512;        // fewer keys, times heads, are not worth a merge
constexpr int64_t kLeastKeys = 128;         // of a split
constexpr int64_t kPieces = 2;              // of all keys, for each thread, or up to kMostPieces: more make threads end together, fewer are merged sooner
constexpr int64_t kMostPieces = 4;
constexpr int64_t kSplitWork = 128;         // keys times heads that take as long as a split's begin and its merge
constexpr int kFewRows = kTiles ? 16 : kLanes == 16 ? 64 : 32;  // few_rows; 64 and 32 measured on a Zen 5
constexpr int64_t kFewBytes = 512 << 10;    // of K and V in their block: whole tokens in order count more than the second cache (Zen 3: 1.4 to 1.8 x 128 KB)
constexpr int64_t kAheadBytes = (kTiles ? 32 : 16) << 10;  // that are asked for before they are read there (Zen 5: 32 KB 4 % slower on one thread)
constexpr int kRowsAhead = 8;               // rows of q and out are asked for so many before: tokens lie too far apart for the processor to guess
constexpr double kThreadNs = 10e3;          // of work: less is not worth another thread

int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Tile {
  Sequence seq;
  int64_t b, head, heads;  // kv heads
  int64_t first, tokens;  // query tokens of the sequence
  int64_t seen;           // the first key that some row sees
  int64_t lo, hi;         // keys to go through: from a multiple of kKeys at or before `seen`
  int64_t step, splits;   // keys of a split
  int64_t state;          // first of its splits' states, where there are several
  int64_t unit;           // its first unit
};

struct Plan {
  const Shape& s;
  const Args& a;
  int64_t group;
  std::vector<Tile> tiles;
  int64_t units = 0, threads = 1, state_size = 0, states = 0;
};

void see(const Args& a, const Sequence& x, int64_t token, int64_t& lo, int64_t& hi) {
  const int64_t position = token + x.len_k - x.len_q;
  lo = a.left >= 0 && position > a.left ? position - a.left : 0;
  hi = a.right >= 0 && position + 1 < x.len_k - a.right ? position + a.right + 1 : x.len_k;
  if (hi < 0) hi = 0;
  if (hi > x.there) hi = x.there;
  if (hi < lo) hi = lo;
}

// kv heads of a tile of few rows: as many as leave each thread enough units.
int64_t heads_at_once(const Plan& p) {
  const Shape& s = p.s;
  if (s.k[2] >= s.k[1] || s.v[2] >= s.v[1]) return 1;  // each head's keys lie together
  int64_t pieces = 0;
  for (int64_t b = 0; b < s.batch; b++) {
    const int64_t n = sequence(s, p.a, b).there;
    pieces += s.invariant ? (n + kInvariantSplit - 1) / kInvariantSplit : p.a.splits > 0 ? p.a.splits : (n + kLeastKeys - 1) / kLeastKeys;
  }
  int64_t heads = std::clamp<int64_t>(kFewBytes / (kKeys * (s.dim + s.dim_v) * size_of(s.kv_type)), 1, s.heads_kv);
  while (heads > 1 && p.a.threads > 1 && pieces * ((s.heads_kv + heads - 1) / heads) < 3 * p.a.threads) heads = (heads + 1) / 2;
  return heads;
}

bool in_tiles(const Shape& s) { return kTiles && kernels(s.q_type, s.kv_type).pairs; }

// Rows of a tile of many rows: fewer where there would be too few tiles for the threads.
int64_t rows_at_once(const Plan& p) {
  const Shape& s = p.s;
  const int64_t row_bytes = (kernels(s.q_type, s.kv_type).pairs ? 2 : 4) * s.dim + 4 * s.dim_v;
  int64_t rows = in_tiles(s) ? kTileRows : std::clamp<int64_t>(kRowBytes / row_bytes, 96, kManyRows), all = s.batch * s.len_q;
  if (s.kind == kVarlen || s.kind == kPagedRagged) all = s.batch ? std::min(entry(p.a.cu_q, s.batch, s.cu_q_64), s.len_q) : 0;
  while (!s.invariant && p.a.threads > 1 && rows > 96 && all * p.group / rows * s.heads_kv < 4 * p.a.threads) rows /= 2;
  return rows;
}

// At most so many rows of a kv head read K and V in place. An 8-bit key becomes a pair for each bunch of rows again: its packing is worth more.
int64_t few_rows(const Shape& s) { return s.kv_type == kF8 && kernels(s.q_type, s.kv_type).pairs ? 16 : kFewRows; }

bool is_few(const Plan& p, const Sequence& x, int64_t tokens) { return tokens == x.len_q && tokens * p.group <= few_rows(p.s); }

struct Cut {
  int64_t step, splits;
};

// A tile in even splits of at most `work` keys times heads.
Cut cut(const Plan& p, const Tile& t, int64_t work) {
  const int64_t n = t.hi - t.lo;
  if (n <= 0) return {kKeys, 1};
  if (p.s.invariant) {  // splits begin at multiples of the step, wherever a window begins
    const int64_t from = t.lo / kInvariantSplit * kInvariantSplit;
    return {kInvariantSplit, (t.hi - from + kInvariantSplit - 1) / kInvariantSplit};
  }
  const int64_t most = std::max(up(work / t.heads, kKeys), kLeastKeys), splits = p.a.splits > 0 ? p.a.splits : (n + most - 1) / most;
  const int64_t step = up((n + splits - 1) / splits, kKeys);
  return {step, (n + step - 1) / step};
}

// Work of a split: where tiles are few, what makes the last thread end soonest.
int64_t work_of_splits(const Plan& p, int64_t keys) {
  if (p.threads == 1) return INT64_MAX / 2;
  auto share = [&](int64_t pieces) { return std::max(kLeastSplit, (keys + pieces * p.threads - 1) / (pieces * p.threads)); };
  if (int64_t(p.tiles.size()) >= 4 * p.threads) return share(kPieces);
  int64_t best = 0, least = INT64_MAX;
  for (int64_t pieces = kPieces; pieces <= kMostPieces; pieces++) {
    const int64_t work = share(pieces);
    int64_t units = 0, largest = 0, all = 0;
    for (const Tile& t : p.tiles) {
      const Cut c = cut(p, t, work);
      units += c.splits;
      largest = std::max(largest, c.step * t.heads + kSplitWork);
      all += (t.hi - t.lo) * t.heads + c.splits * kSplitWork;
    }
    const int64_t last = std::min((units + p.threads - 1) / p.threads * largest, all / p.threads + largest);
    if (last < least) least = last, best = work;
  }
  return best;
}

void make_plan(Plan& p) {
  const Shape& s = p.s;
  double ns = 0;
  int64_t keys = 0;
  p.tiles.clear();
  const int64_t at_once = heads_at_once(p), many = rows_at_once(p), few = few_rows(s);
  for (int64_t b = 0; b < s.batch; b++) {
    const Sequence x = sequence(s, p.a, b);
    const int64_t rows = x.len_q * p.group;
    const int64_t most = rows <= few ? x.len_q : std::max<int64_t>(many / p.group, 1);
    for (int64_t end = x.len_q; end > 0; end -= most) {  // those with most keys first
      const int64_t first = end > most ? end - most : 0;
      int64_t lo, hi, unused;
      see(p.a, x, first, lo, unused);
      see(p.a, x, end - 1, unused, hi);
      const int64_t seen = lo;
      lo = lo / kKeys * kKeys;
      if (hi <= seen) hi = lo;  // no key
      const int64_t heads = is_few(p, x, end - first) ? at_once : 1;
      for (int64_t head = 0; head < s.heads_kv; head += heads)
        p.tiles.push_back({x, b, head, std::min(heads, s.heads_kv - head), first, end - first, seen, lo, hi, up(hi - lo, kKeys), 1, 0, 0});
      const double elements = double(hi - lo) * double(s.dim + s.dim_v) * double(s.heads_kv);
      ns += 500.0 * double(s.heads_kv) + elements * (rows <= few ? size_of(s.kv_type) / 24.0 + double(rows) / 160.0 : double((end - first) * p.group) / 80.0);
      keys += (hi - lo) * s.heads_kv;
    }
  }
  p.threads = std::min<int64_t>(p.a.threads, 1 + int64_t(ns / kThreadNs));
  const int64_t work = work_of_splits(p, keys);
  for (Tile& t : p.tiles) {
    const Cut c = cut(p, t, work);
    t.step = c.step, t.splits = c.splits;
    t.unit = p.units;
    p.units += t.splits;
    if (t.splits > 1) {
      t.state = p.states;
      p.states += t.splits;
      p.state_size = std::max(p.state_size, t.heads * t.tokens * p.group * (up(s.dim_v, kPanel) + 2));
    }
  }
}

// ---------------------------------------------------------------- one unit
struct Scratch {  // of a thread; grows and stays
  std::vector<float> memory;
  std::vector<Row> rows;
  float* take(int64_t n) {
    const size_t need = size_t(n) + 16;
    if (memory.size() < need) memory.resize(need);
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((at + 63) / 64 * 64);
  }
};

struct Block {  // pointers to the rows of a block's keys and values
  const char* k[kKeys];
  const char* v[kKeys];
  int n;
};

// Keys that no row of the tile sees have weight 0, but their pages may be anyone's by now, and hold NaN: the first seen one stands for them.
void only_seen(const Tile& t, int64_t first, Block& block) {
  const int64_t unseen = t.seen - first;
  for (int64_t j = 0; j < unseen && unseen < block.n; j++) block.k[j] = block.k[unseen], block.v[j] = block.v[unseen];
}

void find_keys(const Plan& p, const Tile& t, int64_t first, int64_t end, Block& block) {
  const Shape& s = p.s;
  const Args& a = p.a;
  const int64_t size = size_of(s.kv_type);
  const char *k = static_cast<const char*>(a.k) + t.head * s.k[2] * size, *v = static_cast<const char*>(a.v) + t.head * s.v[2] * size;
  block.n = int(std::min<int64_t>(kKeys, end - first));
  if (block.n <= 0) {
    block.n = 0;
    return;
  }
  if (s.kind == kDense || s.kind == kVarlen) {
    const int64_t row = first + (s.kind == kVarlen ? t.seq.first_k : 0);
    k += ((s.kind == kDense ? t.b * s.k[0] : 0) + row * s.k[1]) * size;
    v += ((s.kind == kDense ? t.b * s.v[0] : 0) + row * s.v[1]) * size;
    for (int j = 0; j < block.n; j++) block.k[j] = k + j * s.k[1] * size, block.v[j] = v + j * s.v[1] * size;
    only_seen(t, first, block);
    return;
  }
  int64_t column = first / s.page_size, place = first % s.page_size;
  for (int j = 0; j < block.n; column++, place = 0) {
    int64_t page = entry(a.table, t.b * s.table[0] + column * s.table[1], s.table_64);
    if (page < 0 || page >= s.pages) page = 0;  // the caller's fault (PORTATTN_CHECK=1 tells): a wrong value, never a wild read
    const char *kp = k + (page * s.k[0] + place * s.k[1]) * size, *vp = v + (page * s.v[0] + place * s.v[1]) * size;
    const int64_t n = std::min<int64_t>(s.page_size - place, block.n - j);
    for (int64_t i = 0; i < n; i++, j++, kp += s.k[1] * size, vp += s.v[1] * size) block.k[j] = kp, block.v[j] = vp;
  }
  only_seen(t, first, block);
}

// Offset of row r of a kv head in q, or in out.
int64_t row_at(const int64_t stride[3], const Plan& p, const Tile& t, int64_t kv_head, int64_t r) {
  return token(stride, p.s, t.seq, t.b, t.first + r / p.group, kv_head * p.group + r % p.group);
}

// Asks for memory that is read (kWrite 0) or written (1) soon, into the first cache (kNear 3) or the second (2).
template <int kWrite, int kNear = 3>
void ask(const void* base, int64_t at, int64_t n, int64_t size) {
  for (const char *from = static_cast<const char*>(base) + at * size, *x = from; x < from + n * size; x += 64) __builtin_prefetch(x, kWrite, kNear);
}

// A row of q, turned if the call says so; `x` has room for whole vectors of pairs.
void load_query(const Plan& p, const Tile& t, int64_t head, int64_t r, float* x) {
  const Shape& s = p.s;
  const int64_t i = t.first + r / p.group, at = row_at(s.q, p, t, head, r);
  switch (s.q_type) {
    case kF32: widen<F32>(static_cast<const char*>(p.a.q) + at * 4, int(s.dim), x, nullptr); break;
    case kF16: widen<F16>(static_cast<const char*>(p.a.q) + at * 2, int(s.dim), x, nullptr); break;
    default: widen<BF16>(static_cast<const char*>(p.a.q) + at * 2, int(s.dim), x, nullptr);
  }
  const int64_t position = i + t.seq.len_k - t.seq.len_q;
  if (p.a.cos && position >= 0) turn(x, position, s, p.a);
}

Row make_row(const Plan& p, const Tile& t, int64_t kv_head, int64_t r) {
  const Shape& s = p.s;
  const int64_t i = t.first + r / p.group, head = kv_head * p.group + r % p.group;
  Row row{i + t.seq.len_k - t.seq.len_q, 0, 0, -kInf, 0, 1, 0, nullptr};
  see(p.a, t.seq, i, row.lo, row.hi);
  if (p.a.alibi) row.slope = p.a.alibi[t.b * s.alibi[0] + head * s.alibi[1]];
  if (p.a.bias)
    row.bias = static_cast<const char*>(p.a.bias) + (t.b * s.bias[0] + head * s.bias[1] + i * s.bias[2]) * size_of(s.bias_type);
  return row;
}

// out, top and sum of a row to the caller's memory: the sink joins the denominator.
void finish(const Plan& p, const Tile& t, int64_t kv_head, int64_t r, const float* out, float top, float sum) {
  const Shape& s = p.s;
  float factor = 0, lse = -kInf;
  const float sink = p.a.sinks ? p.a.sinks[kv_head * p.group + r % p.group] : -kInf;
  const bool empty = sum == 0 && top == -kInf;
  if (empty) {
    lse = s.lse_form == kFlashAttn2 && !p.a.sinks ? kInf : sink;
  } else {
    const float both = sink > top ? sink : top, mine = both == top ? 1.0f : std::exp(top - both);
    const float total = sum * mine + (sink == -kInf ? 0.0f : std::exp(sink - both));
    factor = mine / total;
    if (p.a.lse) lse = both + std::log(total);
  }
  if (p.a.lse) p.a.lse[row_at(s.lse, p, t, kv_head, r)] = lse;
  const float scale = float(scale_of(p.a.v_scales, p.a.v_scale, s.v_scale, t.b, kv_head));
  const int64_t at = row_at(s.out, p, t, kv_head, r);
  if (empty)
    for (int64_t d = 0; d < s.dim_v; d++) put(p.a.out, at + d, 0.0f, s.out_type);
  else
    put_row(p.a.out, at, out, s.dim_v, factor * scale, s.out_type);
}

// A split's state: out of its rows, then top and sum of each.
void merge(const Plan& p, const Tile& t, const float* states, Scratch& scratch) {
  const int64_t per_head = t.tokens * p.group, rows = t.heads * per_head, stride = up(p.s.dim_v, kPanel), n = t.splits;
  float *weight = scratch.take(up(n, kLanes) + stride), *out = weight + up(n, kLanes);
  std::fill(weight, out, 0.0f);
  for (int64_t r = 0; r < rows; r++) {
    auto state = [&](int64_t i) { return states + (t.state + i) * p.state_size; };
    auto last = [&](int64_t i) { return state(i) + rows * stride + 2 * r; };
    float top = -kInf, sum = 0;
    for (int64_t i = 0; i < n; i++) top = std::max(top, last(i)[0]);
    const float base = top == -kInf ? 0.0f : top;
    for (int64_t i = 0; i < n; i++) weight[i] = (last(i)[0] - base) * kLog2E;
    for (int64_t i = 0; i < n; i += kLanes) store(weight + i, exp2(load(weight + i)));
    for (int64_t i = 0; i < n; i++) sum += last(i)[1] * weight[i];
    for (int64_t d = 0; d < stride; d += kPanel) {
      vf a{}, b{};
      for (int64_t i = 0; i < n; i++) {
        const float* o = state(i) + r * stride + d;
        a += load(o) * weight[i], b += load(o + kLanes) * weight[i];
      }
      store(out + d, a), store(out + d + kLanes, b);
    }
    finish(p, t, t.head + r / per_head, r % per_head, out, top, sum);
  }
}

// Results of a unit: to the caller if it is all of its tile, else to its state.
void hand_over(const Plan& p, const Tile& t, int64_t split, const float* out, const Row* row, float* states) {
  const int64_t per_head = t.tokens * p.group, rows = t.heads * per_head, stride = up(p.s.dim_v, kPanel);
  if (t.splits == 1) {
    for (int64_t r = 0; r < rows; r++) {
      if (const int64_t n = r + kRowsAhead; n < rows)
        ask<1>(p.a.out, row_at(p.s.out, p, t, t.head + n / per_head, n % per_head), p.s.dim_v, size_of(p.s.out_type));
      finish(p, t, t.head + r / per_head, r % per_head, out + r * stride, row[r].top * row[r].unit, row[r].sum);
    }
    return;
  }
  float* state = states + (t.state + split) * p.state_size;
  std::memcpy(state, out, size_t(rows * stride) * sizeof(float));
  float* last = state + rows * stride;
  for (int64_t r = 0; r < rows; r++) last[2 * r] = row[r].top * row[r].unit, last[2 * r + 1] = row[r].sum;
}

Logit logit_of(const Plan& p, const Tile& t, int64_t head) {
  const Shape& s = p.s;
  return {float(p.a.scale * scale_of(p.a.k_scales, p.a.k_scale, s.k_scale, t.b, head)), float(p.a.softcap), s.bias_type, s.bias[3]};
}

// Keys of a block, from its first, that rows [r, r + n) see: what a row sees begins and ends no earlier than for the row before it.
struct Seen {
  int from = 0, to = 0;
  Seen() = default;
  Seen(const Row* row, int64_t n, int64_t first, int keys)
      : from(int(std::clamp<int64_t>(row[0].lo - first, 0, keys))), to(int(std::clamp<int64_t>(row[n - 1].hi - first, 0, keys))) {}
};

// What is read kAheadBytes after each row of a block: keys, then values, then the next block's keys.
struct Ahead {
  const char* k[kKeys];
  const char* v[kKeys];
  int tokens;

  explicit Ahead(int64_t token_bytes) : tokens(int(std::clamp<int64_t>(kAheadBytes / token_bytes, 1, kKeys))) {}

  void look(const Block& now, const Block& next) {
    for (int j = 0; j < now.n; j++) {
      const int at = j + tokens, over = at - now.n;
      k[j] = over < 0 ? now.k[at] : now.v[std::min(over, now.n - 1)];
      v[j] = over < 0 ? now.v[at] : next.n ? next.k[std::min(over, next.n - 1)] : now.v[j];
    }
  }
};

void run_few(const Plan& p, const Tile& t, int64_t begin, int64_t end, int64_t split, float* states, Scratch& scratch) {
  const Shape& s = p.s;
  const Kernels& kernel = kernels(s.q_type, s.kv_type);
  const int dim = int(s.dim), dim_v = int(s.dim_v), per_head = int(t.tokens * p.group), rows = int(t.heads) * per_head;
  const int64_t size = size_of(s.kv_type), k_step = s.k[2] * size, v_step = s.v[2] * size;  // bytes from head to head
  const int64_t q_places = up(dim, kWide) / (kernel.pairs ? 2 : 1), o_stride = up(dim_v, kPanel);
  const int64_t q_size = up(rows * q_places, 16), o_size = up(rows * o_stride, 16), s_size = rows * kKeys, p_size = kernel.pairs ? s_size / 2 : 0;
  float* q = scratch.take(q_size + o_size + s_size + p_size + up(dim, kWide) + rows);
  float *out = q + q_size, *score = out + o_size, *pairs = score + s_size, *wide = pairs + p_size, *old = wide + up(dim, kWide);
  std::memset(q, 0, size_t(q_size + o_size) * sizeof(float));
  scratch.rows.resize(size_t(rows));
  Row* row = scratch.rows.data();
  for (int r = 0; r < rows; r++) {
    load_query(p, t, t.head + r / per_head, r % per_head, wide);
    kernel.query(wide, dim, q + r * q_places);
    row[r] = make_row(p, t, t.head + r / per_head, r % per_head);
  }

  Block blocks[2];
  Ahead ahead(t.heads * std::max(dim, dim_v) * size);
  find_keys(p, t, begin, end, blocks[0]);
  for (int64_t first = begin, turn = 0; first < end; first += kKeys, turn ^= 1) {
    const Block& now = blocks[turn];
    find_keys(p, t, first + kKeys, end, blocks[turn ^ 1]);
    ahead.look(now, blocks[turn ^ 1]);
    const Seen seen(row, per_head, first, now.n);  // the same for all heads
    if (seen.to <= seen.from) continue;
    kernel.scores({now.k, ahead.k}, {seen.from / kKeysAtOnce * kKeysAtOnce, seen.to, int(t.heads), per_head, k_step}, q,
                  int(kernel.pairs ? 2 * q_places : q_places), dim, score, p.a.values);
    for (int h = 0, r = 0; h < t.heads; h++, r += per_head)
      softmax(score + r * kKeys, kKeys, 0, kKeys, first, row + r, per_head, logit_of(p, t, t.head + h),
              kernel.pairs ? reinterpret_cast<uint16_t*>(pairs) + r * kKeys : nullptr, old + r);
    kernel.values({now.v, ahead.v}, {seen.from / 2 * 2, seen.to, int(t.heads), per_head, v_step}, kernel.pairs ? pairs : score, old, out, int(o_stride),
                  dim_v, p.a.values);
  }
  kernel.restore(out, rows * o_stride);
  hand_over(p, t, split, out, row, states);
}

// Queries of a tile as the products take them, and what their rows see.
Row* load_rows(const Plan& p, const Tile& t, bool pairs, float* q, int64_t q_places, float* wide, Scratch& scratch) {
  const int rows = int(t.tokens * p.group);
  scratch.rows.resize(size_t(rows));
  for (int r = 0; r < rows; r++) {
    float* to = q + r * q_places;
    if (r + kRowsAhead < rows) ask<0>(p.a.q, row_at(p.s.q, p, t, t.head, r + kRowsAhead), p.s.dim, size_of(p.s.q_type));
    if (pairs && p.s.q_type == kBF16 && !p.a.cos) {
      std::memcpy(to, static_cast<const uint16_t*>(p.a.q) + row_at(p.s.q, p, t, t.head, r), size_t(p.s.dim) * 2);
    } else {
      load_query(p, t, t.head, r, pairs ? wide : to);
      if (pairs) to_bf16_row(wide, int(p.s.dim), reinterpret_cast<uint16_t*>(to));
    }
    scratch.rows[size_t(r)] = make_row(p, t, t.head, r);
  }
  return scratch.rows.data();
}

void run_many(const Plan& p, const Tile& t, int64_t begin, int64_t end, int64_t split, float* states, Scratch& scratch) {
  const Shape& s = p.s;
  const Kernels& kernel = kernels(s.q_type, s.kv_type);
  const int dim = int(s.dim), dim_v = int(s.dim_v), rows = int(t.tokens * p.group), padded = int(up(rows, kRows));
  const int depth = kernel.pairs ? 2 : 1, places = kernel.places(dim);
  const int block_keys = int(std::clamp<int64_t>(kBlockBytes / (4 / depth * (dim + dim_v)) / kKeys * kKeys, kKeys, kManyKeys));
  const int few = int(std::max<int64_t>(kScoreBytes / (4 * block_keys) / kRows * kRows, kRows));  // rows whose scores are computed at once
  const int64_t q_places = up(dim, kWide) / depth + kLanes, o_stride = up(dim_v, kPanel);  // kLanes more: rows not a power of two apart
  const int64_t q_size = up(padded * q_places, 16), o_size = up(padded * o_stride, 16), s_size = few * block_keys, p_size = kernel.pairs ? s_size / 2 : 0;
  const int64_t k_size = int64_t(block_keys) * places, v_size = block_keys / depth * o_stride;
  float* q = scratch.take(q_size + o_size + s_size + p_size + k_size + v_size + kTurn * up(dim, 16));
  float *out = q + q_size, *score = out + o_size, *pairs = score + s_size, *keys = pairs + p_size, *values = keys + k_size, *wide = values + v_size;
  float* weights = kernel.pairs ? pairs : score;
  const int64_t w_stride = block_keys / depth;
  std::memset(q, 0, size_t(q_size + o_size) * sizeof(float));
  std::memset(weights, 0, size_t(few * w_stride) * sizeof(float));
  Row* row = load_rows(p, t, kernel.pairs, q, q_places, wide, scratch);
  const Logit logit = logit_of(p, t, t.head);

  const int64_t size = size_of(s.kv_type);
  Block blocks[2][kManyKeys / kKeys];
  auto find = [&](int64_t from, Block* to) {
    for (int j = 0; j < block_keys; j += kKeys) find_keys(p, t, from + j, end, to[j / kKeys]);
  };
  find(begin, blocks[0]);
  for (int64_t first = begin, turn = 0; first < end; first += block_keys, turn ^= 1) {
    const int n = int(std::min<int64_t>(block_keys, end - first));
    find(first + block_keys, blocks[turn ^ 1]);
    for (int j = 0; j < n; j += kKeys) {
      const Block &block = blocks[turn][j / kKeys], &next = blocks[turn ^ 1][j / kKeys];
      kernel.keys_to_panels({block.k, block.n}, dim, keys + int64_t(j) * places, wide, p.a.values);
      kernel.values_to_panels({block.v, block.n}, dim_v, values + j / depth * kPanel, block_keys / depth, p.a.values);
      for (int i = 0; i < next.n; i++) ask<0, 2>(next.k[i], 0, dim, size), ask<0, 2>(next.v[i], 0, dim_v, size);  // packing waits for memory otherwise
    }
    for (int r = 0; r < rows; r += few) {
      const int count = std::min(few, rows - r);
      const Seen seen(row + r, count, first, n);
      if (seen.to <= seen.from) continue;
      const int from = seen.from / kPanel * kPanel, to = int(up(seen.to, kPanel));
      Seen some[kMostAtOnce / kRows];  // of each kRows rows
      for (int i = 0; i < count; i += kRows) some[i / kRows] = Seen(row + r + i, std::min(kRows, count - i), first, n);
      for (int c = from; c < to; c += kPanel)
        for (int i = 0; i < count; i += kRows)
          if (c < some[i / kRows].to && c + kPanel > some[i / kRows].from)
            kernel.product(q + (r + i) * q_places, q_places, keys + int64_t(c) * places, places, score + i * block_keys + c, block_keys, nullptr);
      float old[kMostAtOnce]{};
      softmax(score, block_keys, from, to, first, row + r, count, logit, kernel.pairs ? reinterpret_cast<uint16_t*>(pairs) : nullptr, old);
      for (int c = 0; c < dim_v; c += kPanel)
        for (int i = 0; i < count; i += kRows) {
          const int a = some[i / kRows].from / depth, b = (some[i / kRows].to + depth - 1) / depth;
          if (b > a)
            kernel.product(weights + i * w_stride + a, w_stride, values + c * w_stride + a * kPanel, b - a, out + (r + i) * o_stride + c, o_stride, old + i);
        }
    }
  }
  if (kernel.pairs) restore(out, padded * o_stride);
  hand_over(p, t, split, out, row, states);
}

// As run_many, in AMX's tiles: a longer block of keys, gone through by 32 rows, whose scores then stay in the first cache.
void run_tiles(const Plan& p, const Tile& t, int64_t begin, int64_t end, int64_t split, float* states, Scratch& scratch) {
  const Shape& s = p.s;
  const Kernels& kernel = kernels(s.q_type, s.kv_type);
  const int dim = int(s.dim), dim_v = int(s.dim_v), rows = int(t.tokens * p.group), padded = int(up(rows, 16)), places = kernel.places(dim);
  const int64_t q_places = up(dim, kWide) / 2 + kLanes, o_stride = up(dim_v, kPanel);
  const int64_t q_size = padded * q_places, o_size = padded * o_stride, s_size = kTileRowsAtOnce * kTileKeys, p_size = s_size / 2;
  const int64_t k_size = int64_t(kTileKeys) * places, v_size = kTileKeys / 2 * o_stride;
  float* q = scratch.take(q_size + o_size + s_size + p_size + k_size + v_size + kTurn * up(dim, kWide));
  float *out = q + q_size, *score = out + o_size, *pairs = score + s_size, *keys = pairs + p_size, *values = keys + k_size, *wide = values + v_size;
  std::memset(q, 0, size_t(q_size + o_size) * sizeof(float));
  std::memset(pairs, 0, size_t(p_size) * sizeof(float));
  Row* row = load_rows(p, t, true, q, q_places, wide, scratch);
  const Logit logit = logit_of(p, t, t.head);
  [[maybe_unused]] const TileUnit unit;

  Block block;
  for (int64_t first = begin; first < end; first += kTileKeys) {
    const int n = int(std::min<int64_t>(kTileKeys, end - first));
    for (int j = 0; j < n; j += kKeys) {
      find_keys(p, t, first + j, end, block);
      kernel.keys_to_panels({block.k, block.n}, dim, keys + int64_t(j) * places, wide, p.a.values);
      kernel.values_to_panels({block.v, block.n}, dim_v, values + j / 2 * kPanel, kTileKeys / 2, p.a.values);
    }
    for (int r = 0; r < padded; r += kTileRowsAtOnce) {
      const int count = std::min(kTileRowsAtOnce, rows - r), high = std::min(kTileRowsAtOnce, padded - r);
      const Seen seen(row + r, count, first, n);
      if (seen.to <= seen.from) continue;
      const int from = seen.from / kPanel * kPanel, to = int(up(seen.to, kPanel));
      for (int c = from; c < to; c += kPanel)
        tile_product(high, q + r * q_places, q_places * 4, keys + int64_t(c) * places, places / 16, score + c, kTileKeys * 4, false);
      float old[kTileRowsAtOnce];
      softmax(score, kTileKeys, from, to, first, row + r, count, logit, reinterpret_cast<uint16_t*>(pairs), old);
      for (int i = 0; i < count; i++)
        if (old[i] != 1.0f)
          for (float *x = out + (r + i) * o_stride, *stop = x + o_stride; x < stop; x += kLanes) store(x, load(x) * old[i]);
      for (int c = 0; c < dim_v; c += kPanel)
        tile_product(high, pairs + from / 2, kTileKeys * 2, values + c * (kTileKeys / 2) + from / 2 * kPanel, (to - from) / 32, out + r * o_stride + c,
                     o_stride * 4, true);
    }
  }
  restore(out, padded * o_stride);
  hand_over(p, t, split, out, row, states);
}

void run_unit(const Plan& p, const Tile& t, int64_t split, float* states, Scratch& scratch) {
  const int64_t begin = (p.s.invariant ? t.lo / t.step * t.step : t.lo) + split * t.step;
  const auto run = is_few(p, t.seq, t.tokens) ? run_few : in_tiles(p.s) ? run_tiles : run_many;
  run(p, t, std::max(begin, t.lo), std::min(begin + t.step, t.hi), split, states, scratch);
}

Scratch& scratch() {
  static thread_local Scratch mine;
  return mine;
}

void append(const Shape& s, const Args& a) {
  std::atomic<int64_t> head{0};
  std::unique_ptr<Codes> codes(s.kv_type == kF8 ? new Codes(a.values) : nullptr);
  auto work = [&] {  // a head is one thread's: of two tokens for one slot one value stays, whole
    std::vector<float> x(size_t(std::max(s.dim, s.dim_v)));
    for (int64_t h; (h = head.fetch_add(1)) < s.heads_kv;)
      for (int64_t b = 0; b < s.batch; b++) {
        const Sequence seq = sequence(s, a, b);
        for (int64_t i = 0; i < seq.len_q; i++) {
          const int64_t position = i + seq.len_k - seq.len_q;
          if (position < 0 || position >= seq.there) continue;
          const int64_t page = entry(a.table, b * s.table[0] + position / s.page_size * s.table[1], s.table_64);
          if (page < 0 || page >= s.pages) continue;
          write_token(s, a, token(s.k_new, s, seq, b, i, h), token(s.v_new, s, seq, b, i, h), position, page, position % s.page_size, b, h,
                      x.data(), codes.get());
        }
      }
  };
  int64_t tokens = s.batch * s.len_q;
  if (s.kind == kPagedRagged) tokens = s.batch ? std::min(entry(a.cu_q, s.batch, s.cu_q_64), s.len_q) : 0;
  const bool many = tokens * s.heads_kv * (s.dim + s.dim_v) > 100000;
  Pool::instance().run(many ? std::min(a.threads, s.heads_kv) : 1, a.threads, work);
}

void attend(const Shape& s, const Args& a) {
  if (a.k_new) append(s, a);
  static thread_local std::vector<Tile> kept;
  Plan p{s, a, s.heads_kv ? s.heads_q / s.heads_kv : 1, std::move(kept)};
  make_plan(p);
  std::unique_ptr<float[]> states(p.states ? new float[size_t(p.states * p.state_size)] : nullptr);
  std::unique_ptr<std::atomic<int64_t>[]> left(p.states ? new std::atomic<int64_t>[p.tiles.size()] : nullptr);
  if (left)
    for (size_t i = 0; i < p.tiles.size(); i++) left[i] = p.tiles[i].splits;
  std::atomic<int64_t> next{0};
  auto work = [&] {
    Scratch& mine = scratch();
    size_t at = 0;  // units come in rising order
    for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < p.units;) {
      while (at + 1 < p.tiles.size() && p.tiles[at + 1].unit <= unit) at++;
      const Tile& t = p.tiles[at];
      run_unit(p, t, unit - t.unit, states.get(), mine);
      if (t.splits > 1 && left[at].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(p, t, states.get(), mine);
    }
  };
  Pool::instance().run(std::min(p.threads, p.units), a.threads, work);
  kept = std::move(p.tiles);
}

void append_slots(const Shape& s, const Args& a) {
  std::vector<float> x(size_t(std::max(s.dim, s.dim_v)));
  std::unique_ptr<Codes> codes(s.kv_type == kF8 ? new Codes(a.values) : nullptr);
  for (int64_t i = 0; i < s.len_q; i++) {
    const int64_t slot = entry(a.table, i * s.table[1], s.table_64);
    if (slot < 0 || slot >= s.pages * s.page_size) continue;
    for (int64_t h = 0; h < s.heads_kv; h++)
      write_token(s, a, i * s.k_new[1] + h * s.k_new[2], i * s.v_new[1] + h * s.v_new[2], 0, slot / s.page_size, slot % s.page_size, 0, h, x.data(),
                  codes.get());
  }
}

// `count` partial results of disjoint keys: outs (count, rows, dim) and lses (count, rows), both without gaps; sinks by row % heads.
void merge_parts(int64_t count, int64_t rows, int64_t heads, int64_t dim, int64_t type, const void* outs, const float* lses, const float* sinks,
                 void* out, float* lse, int64_t threads) {
  constexpr int64_t kPiece = 16;  // rows that a thread takes at once
  std::atomic<int64_t> next{0};
  auto work = [&] {
    std::vector<float> sum(static_cast<size_t>(dim));
    for (int64_t piece; (piece = next.fetch_add(kPiece)) < rows;)
      for (int64_t r = piece; r < std::min(piece + kPiece, rows); r++) {
        const float sink = sinks ? sinks[r % heads] : -kInf;
        float top = sink;
        for (int64_t i = 0; i < count; i++) top = lses[i * rows + r] > top ? lses[i * rows + r] : top;
        const float base = top == -kInf ? 0.0f : top;
        float total = std::exp(sink - base);
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t i = 0; i < count; i++) {
          const float part = lses[i * rows + r];
          if (part == -kInf) continue;  // the empty state's out may hold anything
          const float weight = std::exp(part - base);
          total += weight;
          for (int64_t d = 0; d < dim; d++) sum[size_t(d)] += weight * number(outs, (i * rows + r) * dim + d, type);
        }
        for (int64_t d = 0; d < dim; d++) put(out, r * dim + d, total == 0 ? 0.0f : sum[size_t(d)] / total, type);
        lse[r] = base + std::log(total);
      }
  };
  const bool many = count * rows * dim > 40000;
  Pool::instance().run(many ? std::min(threads, rows / kPiece) : 1, threads, work);
}

template <class Run>
int guarded(Run run) {
  try {
    run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace
}  // namespace pa

#define PA_EXPORT extern "C" __attribute__((visibility("default")))

// 0; 1 if there is no memory for the call's own work space; 2, and nothing done, if a tensor may have no memory, or new tokens that of a cache.
PA_EXPORT int pa_attention(const pa::Shape* shape, const pa::Args* args) {
  if (pa::may_be_freed(*shape, *args) || pa::may_overlap(*shape, *args)) return 2;
  return pa::guarded([&] { pa::attend(*shape, *args); });
}

// Tokens [0, len_q) of k_new and v_new to the slots in `table`.
PA_EXPORT int pa_cache_append(const pa::Shape* shape, const pa::Args* args) {
  if (pa::may_be_freed(*shape, *args) || pa::may_overlap(*shape, *args)) return 2;
  return pa::guarded([&] { pa::append_slots(*shape, *args); });
}

// Merges partial results; outs, out float32, float16 or bfloat16.
PA_EXPORT int pa_merge(int64_t count, int64_t rows, int64_t heads, int64_t dim, int64_t type, const void* outs, const float* lses,
                       const float* sinks, void* out, float* lse, int64_t threads) {
  return pa::guarded([&] { pa::merge_parts(count, rows, heads, dim, type, outs, lses, sinks, out, lse, threads); });
}
