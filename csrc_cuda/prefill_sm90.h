// Attention of many query rows on Hopper: what portattn/prefill.h computes, on wgmma.
//
// Computes   out = softmax(score(q.k)) v for tiles of kRows packed rows (rows.h) of one sequence and kv head.
// Layouts    as portattn/decode.h.
// Tiling     A block stays on its multiprocessor and takes tiles from a queue, of a sequence those with most keys first.
//            Warpgroup 0 copies: q, then key blocks of kN keys and their values, last block first, each into the next of
//            some stages. The others compute 64 rows each, but for blocks after all keys that their rows see.
// Overlap    A computing warpgroup starts q.k of the next block and p.v of this one together and does the softmax of the
//            next while p.v still runs; warpgroups take turns at starting, so that one's softmax runs beside the others'
//            products. Beside a tile's last p.v, and while its rows are written, runs q.k of the next tile's first block,
//            where there is room for q of two. The copying warpgroup runs ahead, over the end of a tile too.
// Memory     q, of two tiles if there is room, out, two or three stages of k, two of v, swizzled for wgmma (sm90.h); two blocks of 8 bits.
//            kRows x kD / 128 accumulators a thread.
// Math       as portattn/prefill.h; masks only in blocks where an edge runs through a warp's rows.
// Numerics   float32 accumulation; probabilities rounded to what is multiplied, q's type. Of bf16 q and 8-bit keys in boxes, products are of f16, which holds 8 bits
//            exactly and to which half the instructions widen: rows of q are divided by powers of two (q_units). Key blocks stand at multiples
//            of kN, so a row's bits do not depend on what else is in the call.
// Cost       4 x rows x keys x kD flops.
// Vendor     sm_90a.
// Copies     Blocks whose keys are all the sequence's come in boxes by the copy engine (TMA), as many rows at a time as lie in
//            one page. A sequence's last block, of which no byte past the length may count, the block at the left edge of a
//            tile's windows, before which pages may hold anything, and keys that no tensor map describes come in
//            asynchronous copies of 16 bytes, or elements. q comes in one box a panel where a map describes it, and rows go to out in
//            boxes of 16, if all of them are the sequence's. 8-bit keys and values come in pieces, which each thread widens itself.
//            Where maps describe all of q, keys and values (kBoxed), everything comes in boxes: a warp then overwrites values that are
//            not the tile's keys' with zeros. Each copying warp has a part of its own, and few registers. Blocks of 8 bits come in boxes as
//            they are; a warpgroup of its own makes stages of them, with zeros for what is not the tile's keys.
// Source     FlashAttention-3's overlap; the queue is prefill.h's.
#pragma once

#include <sm90.h>  // in angle brackets: tests/simt compiles this file with its own in front
#include <warp.h>

#include "portattn/rows.h"
#include "portattn/schedule.h"
#include "widen.h"

namespace portattn {

// The kernel's second argument, for the copy engine: k and v by (column, head, row, page or batch), in boxes of a panel's columns
// and as many rows of a block of keys as lie in one page; q likewise, in boxes of a tile's whole tokens, and out in boxes of 16 packed rows.
struct TileMaps {
  sm90::TensorMap k, v, q, out;
  i32 rows, boxes;  // of a box of keys; of a block
  i32 tile_rows;    // of kRows: where boxes bring q, those of whole tokens
  u32 group_inverse;  // 2^32 over the group, rounded up; nothing for a group of one
};

template <bool kFirst, class A, class B> struct Choose { using Type = A; };
template <class A, class B> struct Choose<false, A, B> { using Type = B; };

// kTogether: keys, of several heads, whose k and v are two thirds of the second cache. Tiles that run at the same time read these.
template <class T, class C, int kD, int kConsumers, int kN, bool kBoxed = false, int kTogether = (32 << 20) / (4 * kD)>
struct PrefillSm90 {
  // Keys and values of 8 bits lie as they came until the threads that copied them, or others, make stages of them, two blocks in turn.
  static constexpr bool kWiden = sizeof(C) == 1;
  // Threads that widen what came in boxes: a warpgroup, or two warps of the copying one where products want more registers than 512 threads leave.
  static constexpr int kWideners = !kWiden || !kBoxed ? 0 : kD > 192 ? 64 : sm90::kGroup;
  static constexpr bool kOwnWideners = kWideners == sm90::kGroup;
  static constexpr int kWarpgroups = kConsumers + (kOwnWideners ? 2 : 1);
  static constexpr int kThreads = sm90::kGroup * kWarpgroups;
  // What is multiplied: T, or f16 where q is bf16 and keys are 8 bits. Two copying warps make it of q, which are those that widen if there are no others.
  static constexpr bool kConvert = kIsBf16<T> && kWideners > 0;
  static constexpr int kConverters = 64;
  using Factor = typename Choose<kConvert, f16, T>::Type;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kGroups = kN / 16;        // of keys: a group lies in one page where pages are uniform
  static constexpr int kPieces = kD / 8;         // 16-byte chunks of a row of q
  static constexpr int kPanels = ceil_div(kD, sm90::kPanel);
  static constexpr int kPanelBytes = kN * 128, kStageBytes = kPanels * kPanelBytes;
  static constexpr int kBoxRows = 16;  // of out
  static_assert(kGroups * kPanels <= 64, "two warps share the boxes of a block");
  static constexpr int kRowPanelBytes = kRows * 128;  // of q and out
  static constexpr int kRawBytes = kWiden ? kN * kD : 0, kRawStages = 2;  // of a block
  static constexpr int kQBytes = kPanels * kRowPanelBytes, kRoom = (226 << 10) - kRawStages * kRawBytes;
  // q of the next tile is copied early where there is room for it. Rows go to out through a place of their own, all panels or one half after
  // the other, where there is room for that, else through that of their q. Keys, which are wanted before values, are copied a block earlier.
  static constexpr int kQStages = 2 * kQBytes + 4 * kStageBytes <= kRoom ? 2 : 1;
  static constexpr int kOutPanels = 3 * kQBytes + 4 * kStageBytes <= kRoom ? kPanels
      : kQStages == 1 && kPanels % 2 == 0 && 3 * kQBytes / 2 + 4 * kStageBytes <= kRoom ? kPanels / 2 : 0;
  static constexpr bool kOwnOut = kOutPanels > 0;
  static constexpr int kRowBytes = kQStages * kQBytes + kQBytes / kPanels * kOutPanels;  // of q and out
  static constexpr int kKStages = kRowBytes + 5 * kStageBytes <= kRoom ? 3 : 2, kVStages = 2;
  // Of 168 or 128 registers a thread the computing ones take what accumulators, scores and weights need, the copying ones have the rest.
  static constexpr int kTakeRegisters = kConsumers == 3 ? 160 : kBoxed ? (kD > 192 ? 224 : 216) : kD > 192 ? 216 : kD > 64 ? 208 : 200;
  static constexpr int kWidenRegisters = kOwnWideners ? 48 : 0;
  static constexpr int kGiveRegisters = (kWarpgroups == 4 ? 128 : 168) * kWarpgroups - kTakeRegisters * kConsumers - kWidenRegisters;
  static_assert(kConsumers == 2 || (kConsumers == 3 && kBoxed && !kWiden && kD <= 128), "registers are dealt out for these");
  static_assert(kN % 16 == 0 && kN <= 256 && kD % 16 == 0, "whole instructions");

  struct Tile {
    int b, head_kv, first_row;
    int first_token, rest;  // first_row is head `rest` of its token
    int rows;               // of the tile that are the sequence's
    int first, last;  // key blocks [first, last)
    int boxed_first, boxed;  // key blocks [boxed_first, boxed) come in boxes
    int lo;                  // no row sees a key before this one: pages there may hold anything
    int lo_at, hi_at;        // a token sees keys from token + lo_at on, up to token + hi_at or the length
    Score scoring;
    float factor;            // of products, where scores are they times a positive factor; else 0
    Sequence s;
  };
  enum {
    kFullQ, kEmptyQ = kFullQ + 2, kFullK = kEmptyQ + 2, kEmptyK = kFullK + kKStages, kFullV = kEmptyK + kKStages, kEmptyV = kFullV + kVStages,
    kLanded = kEmptyV + kVStages, kFound = kLanded + kVStages, kPassed = kFound + 4,  // from here on, for boxes alone
    kFullRaw = kPassed + 4, kEmptyRaw = kFullRaw + (kWideners ? kRawStages : 0), kLandedQ = kEmptyRaw + (kWideners ? kRawStages : 0),
    kBarriers = kLandedQ + (kWideners ? 2 : 0)
  };
  // At a barrier, for a phase to be over.
  static PA_DEVICE int arrivals(int barrier) {
    const bool of_keys = barrier >= kFullK && barrier < kEmptyK, of_values = barrier >= kFullV && barrier < kEmptyV;
    if (barrier >= kLandedQ) return 32;
    if (barrier >= kEmptyRaw) return kWideners;
    if (barrier >= kFullRaw) return 1;
    if (barrier >= kPassed) return kOwnWideners ? 5 + (kConvert ? kConverters / 32 : 0) : 3;  // warps
    if (barrier >= kFound) return 32;
    if (barrier >= kLanded) return 1;
    if (of_keys) return kWideners ? kWideners : kBoxed ? 1 : sm90::kGroup;
    if (of_values) return kWideners ? kWideners : kBoxed ? 32 : sm90::kGroup;
    return barrier < kEmptyQ ? (kConvert ? kConverters : kBoxed ? 32 : sm90::kGroup) : 4 * kConsumers;
  }
  enum { kCopiers = 1, kTurns, kWriters = kTurns + kConsumers };  // named barriers

  struct Control {
    sm90::Barrier barriers[kBarriers];
    Tile tiles[4];  // b < 0: no more. Four: a tile is found while the one before is copied and the two before that are written
    int taken;
    int sums[4];
    int prefix[sm90::kGroup + 1];
    float q_units[kConvert ? kQStages * kRows : 1];  // what a row of q has been divided by
  };
  static constexpr int kWork = kRowBytes + (kKStages + kVStages) * kStageBytes + kRawStages * kRawBytes;
  static constexpr int kSharedBytes = kWork + static_cast<int>(sizeof(Control));
  static_assert(kSharedBytes <= 227 << 10, "a block's shared memory");

  const AttentionParams& p;
  const TileMaps& maps;
  u8* q_tile;
  u8* k_tile;
  u8* v_tile;
  u8* raw_tile;
  Control& control;

  PA_DEVICE PrefillSm90(const AttentionParams& params, const TileMaps& tile_maps, u8* memory)
      : p(params), maps(tile_maps), q_tile(memory), k_tile(memory + kRowBytes), v_tile(memory + kRowBytes + kKStages * kStageBytes),
        raw_tile(memory + kRowBytes + (kKStages + kVStages) * kStageBytes),
        control(*reinterpret_cast<Control*>(memory + kWork)) {}

  // The token of a tile's row. Exact for rows plus groups up to 2^16.
  PA_DEVICE int token_of(const Tile& t, int row) const {
    const u32 n = row + t.rest;
    return t.first_token + static_cast<int>(p.group > 1 ? static_cast<u32>((static_cast<u64>(n) * maps.group_inverse) >> 32) : n);
  }
  PA_DEVICE sm90::Barrier& barrier(int i) const { return control.barriers[i]; }

  // ---- the queue of tiles, by the copying warpgroup

  PA_DEVICE int tiles_of(const Sequence& s) const {
    const int rows = s.len_q * p.group;
    return s.len_q > 0 && rows > (p.flags & kAllTiles ? 0 : p.flags & kTiled ? p.group : kDecodeRows) ? ceil_div(rows, maps.tile_rows) : 0;
  }

  PA_DEVICE int count() const {
    const int each = ceil_div(p.batch, sm90::kGroup), from = min_of(p.batch, thread_x() * each), to = min_of(p.batch, from + each);
    int sum = 0;
    for (int b = from; b < to; ++b) sum += tiles_of(sequence(p, b)) * p.heads_kv;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int x = warp::shfl_idx<32>(sum, warp::lane() - d);
      if (warp::lane() >= d) sum += x;
    }
    if (warp::lane() == 31) control.sums[thread_x() / 32] = sum;
    sm90::meet<sm90::kGroup>(kCopiers);
    for (int w = 0; w < thread_x() / 32; ++w) sum += control.sums[w];
    control.prefix[thread_x() + 1] = sum;
    if (thread_x() == 0) control.prefix[0] = 0;
    sm90::meet<sm90::kGroup>(kCopiers);
    return control.prefix[sm90::kGroup];
  }

  // Puts the queue's tile number i into `to`: by the thread to whose sequences it belongs, of all that copy or of one warp.
  PA_DEVICE void find(int i, Tile& to) const {
    constexpr int kParts = kBoxed ? 4 : 1;  // of the sequences that a thread counted
    const int each = ceil_div(p.batch, sm90::kGroup), first = (kBoxed ? warp::lane() : thread_x()) * kParts;
    int part = -1;
#pragma unroll 1
    for (int j = first; j < first + kParts; ++j)
      if (control.prefix[j] <= i && i < control.prefix[j + 1]) part = j;
    if (part >= 0) {
      int b = part * each, start = control.prefix[part];
      while (each > 1) {
        const int n = tiles_of(sequence(p, b)) * p.heads_kv;
        if (i < start + n) break;
        start += n;
        ++b;
      }
      describe(b, i - start, to);
    }
    if constexpr (kBoxed) warp::wave_sync();
    else sm90::meet<sm90::kGroup>(kCopiers);
  }

  // Tile number i of a sequence. Later rows see more keys where the mask is causal: they come first.
  PA_DEVICE void describe(int b, int i, Tile& t) const {
    t.b = b;
    t.s = sequence(p, b);
    const int rows = tiles_of(t.s), each = min_of(p.heads_kv, max_of(1, quotient(kTogether, max_of(1, t.s.len_k))));
    const int section = quotient(i, each * rows), nth_in_section = i - section * each * rows;
    const int heads = min_of(each, p.heads_kv - section * each), nth = quotient(nth_in_section, heads);
    t.head_kv = section * each + nth_in_section - nth * heads;
    t.first_row = (rows - 1 - nth) * maps.tile_rows;
    t.first_token = quotient(t.first_row, p.group);
    t.rest = t.first_row - t.first_token * p.group;
    t.rows = min_of(maps.tile_rows, t.s.len_q * p.group - t.first_row);
    const int first = t.first_token, last = min_of(t.s.len_q - 1, quotient(t.first_row + maps.tile_rows - 1, p.group));
    const Span v = visible(p, t.s, first, last);
    t.first = quotient(v.lo, kN);
    t.last = v.hi == v.lo ? t.first : quotient(v.hi + kN - 1, kN);
    // No key of a boxed block lies past the length, or nothing but the tensor's end does; none in a page left of all windows.
    const bool whole = !p.cu_k && !(p.flags & kPaged) && t.s.len_k == p.len_k;
    t.boxed = !(p.flags & kMapped) ? 0 : whole ? t.last : quotient(t.s.len_k, kN);
    t.boxed_first = p.flags & kPaged ? quotient(v.lo / 16 * 16 + kN - 1, kN) : t.first;
    t.lo = v.lo;
    const int shift = t.s.len_k - t.s.len_q, unseen = -0x7fffffff;
    t.lo_at = p.window_left >= 0 && shift > unseen + p.window_left ? shift - p.window_left : unseen;
    t.hi_at = p.window_right >= 0 && p.window_right < t.s.len_q ? shift + p.window_right + 1 : t.s.len_k;
    t.scoring = score_of(p, p.k_scale ? p.k_scale[t.b * p.scale_batch_k + t.head_kv * p.scale_head_k] : 1.0f);
    t.factor = t.scoring.cap == 0.0f && t.scoring.scale > 0.0f && !p.alibi ? t.scoring.scale : 0.0f;
  }

  // Stages that are used in turn, by the parity of their barriers' phases.
  template <int kStages>
  struct Ring {
    int stage = 0;
    u32 parity = 0;
    PA_DEVICE void next() {
      if (++stage < kStages) return;
      stage = 0;
      parity ^= 1;
    }
  };

  // ---- copying

  // Stages, tiles so far, and the barrier that is yet to be told of copies on their way, or -1; where those are to be widened to, if they are, and
  // the barrier that says when there is room.
  struct Copier {
    Ring<kQStages> q;
    Ring<kKStages> k;
    Ring<kVStages> v;
    int tiles = 0, untold = -1;
    u8* wide = nullptr;
    int empty = 0, raw = 0;
    u32 parity = 0;
  };

  // Waits until a stage is free; at its first turn it is.
  PA_DEVICE void acquire(int empty, u32 parity) const { sm90::wait(barrier(empty), parity ^ 1); }
  // Tells of this thread's copies, but for those of the last `kBut` groups that it began: the products see what was there before the barrier.
  template <int kBut>
  PA_DEVICE void tell(Copier& c) const {
    if (c.untold < 0) return;
    copy_wait<kBut>();
    if constexpr (kWiden) {
      if (c.wide) {
        acquire(c.empty, c.parity);
        widen_pieces(raw_tile + (c.raw ^ 1) * kRawBytes, c.wide);
        c.wide = nullptr;
      }
    }
    sm90::engines_see_writes();
    sm90::arrive(barrier(c.untold));
    c.untold = -1;
  }
  // After copies by threads: tells of those before, and of these later.
  PA_DEVICE void begun(Copier& c, int full) const {
    copy_commit();
    tell<1>(c);
    c.untold = full;
  }

  // Where the keys of a box begin.
  struct Where { int page, row; };
  // Box lane() of a block; of one that is not the tile's, or does not come in boxes, nothing is looked at.
  PA_DEVICE Where look_up(const Tile& t, int block) const {
    const int key = block * kN + warp::lane() * maps.rows;
    if (!(p.flags & kPaged)) return {p.cu_k ? 0 : t.b, static_cast<int>(t.s.start_k) + key};
    if (warp::lane() >= maps.boxes || block < t.boxed_first || block >= t.boxed) return {0, 0};
    return {static_cast<int>(page_of(p, t.b, key)), static_cast<int>(row_of_key(p, t.s, key))};
  }

  // One block of keys or values to the next stage; zeros past the length, before what rows see and past head_dim. Bit i of `mine`: this lane starts the box that
  // panel i of its keys is; no bit in any lane: the warp does not even wait, for a phase that may be over.
  template <bool kOfV>
  PA_DEVICE void copy_block(Copier& c, const Tile& t, int block, const Where& where, u32 mine, bool any) const {
    const int stage = kOfV ? c.v.stage : c.k.stage, full = (kOfV ? kFullV : kFullK) + stage, empty = (kOfV ? kEmptyV : kEmptyK) + stage;
    const u32 parity = kOfV ? c.v.parity : c.k.parity;
    if (kOfV) c.v.next();
    else c.k.next();
    u8* to = (kOfV ? v_tile : k_tile) + stage * kStageBytes;
    if (kWiden) {
      copy_pieces(t, block, kOfV, raw_tile + c.raw * kRawBytes);
      begun(c, full);
      c.wide = to;
      c.empty = empty;
      c.parity = parity;
      c.raw ^= 1;
      return;
    }
    if (block < t.boxed_first || block >= t.boxed) {
      acquire(empty, parity);
      copy_pieces(t, block, kOfV, to);
      return begun(c, full);
    }
    if (any) {
      acquire(empty, parity);
      if (thread_x() == 0) {
        sm90::expect(barrier(full), kStageBytes);
        sm90::arrive(barrier(full), sm90::kGroup - 1);
      }
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        if (mine >> panel & 1)
          sm90::copy_box(to + panel * kPanelBytes + warp::lane() * maps.rows * 128, kOfV ? maps.v : maps.k, panel * sm90::kPanel, t.head_kv,
                         where.row, where.page, barrier(full));
    }
    tell<0>(c);
  }

  // A block by the threads, each its pieces of 16 bytes: to a stage, or as they are, one behind the other.
  static constexpr int kElements = 16 / static_cast<int>(sizeof(C)), kRowPieces = kD / kElements;  // of a piece; of a row
  static constexpr int kPiecesEach = ceil_div(16 * kRowPieces, sm90::kGroup);                   // of sixteen rows, for a thread
  // A thread's i-th piece of a block, among those of its sixteen rows; whether there is one.
  static PA_DEVICE int piece_of(int i) { return i % kPiecesEach * sm90::kGroup + thread_x(); }
  static PA_DEVICE bool has(int i) {
    return i < kGroups * kPiecesEach && (16 * kRowPieces % sm90::kGroup == 0 || piece_of(i) < 16 * kRowPieces);
  }
  static PA_DEVICE u8* place_of(u8* to, int row, int piece) {
    return to + (kWiden ? (row * kRowPieces + piece) * 16 : piece / 8 * kPanelBytes + sm90::place(row, piece & 7));
  }
  PA_DEVICE void copy_pieces(const Tile& t, int block, bool of_v, u8* to) const {
    const int dim = of_v ? p.head_dim_v : p.head_dim;
    const C* from = static_cast<const C*>(of_v ? p.v : p.k);
    const int left = t.s.len_k - block * kN, skip = t.lo - block * kN;  // of keys past the length, and of those before `lo`, no byte is read
    const i64 token_stride = of_v ? p.v_token : p.k_token;
    const bool together = (p.flags & (kUniformPages | kAligned)) == (kUniformPages | kAligned);
    if (together) {
      // Lane g finds where the sixteen keys of group g begin.
      const int key = block * kN + warp::lane() * 16;
      i64 lane_offset = 0;
      if (warp::lane() < kGroups && key < t.s.len_k) {
        const KvOffset o = kv_offset(p, t.s, page_of(p, t.b, key), key, t.head_kv);
        lane_offset = of_v ? o.v : o.k;
      }
#pragma unroll (kWiden ? 4 : 1)
      for (int g = 0; g < kGroups; ++g) {
        const C* begin = from + warp::shfl_idx<32>(lane_offset, g);
#pragma unroll 1
        for (int j = 0; j < kPiecesEach; ++j) {
          const int piece = j * sm90::kGroup + thread_x(), r = piece / kRowPieces, c = piece % kRowPieces, row = g * 16 + r;
          if (16 * kRowPieces % sm90::kGroup != 0 && piece >= 16 * kRowPieces) break;
          copy_async16(place_of(to, row, c), begin + r * token_stride + c * kElements,
                       row < left && row >= skip ? min_of(kElements, max_of(0, dim - c * kElements)) * static_cast<int>(sizeof(C)) : 0);
        }
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kGroups * kPiecesEach; ++i) {
        const int g = i / kPiecesEach, piece = piece_of(i), r = g * 16 + piece / kRowPieces, c = piece % kRowPieces;
        if (!has(i)) continue;
        const int n = r < left && r >= skip ? min_of(kElements, max_of(0, dim - c * kElements)) : 0, key = block * kN + r;
        i64 at = 0;
        if (n) {
          const KvOffset o = kv_offset(p, t.s, page_of(p, t.b, key), key, t.head_kv);
          at = (of_v ? o.v : o.k) + c * kElements;
        }
        if (p.flags & kAligned) copy_async16(place_of(to, r, c), from + at, n * static_cast<int>(sizeof(C)));
        else copy_elements16(place_of(to, r, c), from + at, n);
      }
    }
  }

  // This thread's pieces of a block of 8 bits, copied by now, to a stage: some at once, so that one waits beside the others.
  PA_DEVICE void widen_pieces(const u8* raw, u8* to) const {
    constexpr int kAll = kGroups * kPiecesEach, kAtOnce = kD > 192 ? 2 : 4;
#pragma unroll 1
    for (int first = 0; first < kAll; first += kAtOnce) {
      Bytes16 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (has(first + i)) x[i] = *reinterpret_cast<const Bytes16*>(raw + ((first + i) / kPiecesEach * 16 * kRowPieces + piece_of(first + i)) * 16);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!has(first + i)) continue;
        const int row = (first + i) / kPiecesEach * 16 + piece_of(first + i) / kRowPieces, c = piece_of(first + i) % kRowPieces * 2;
        u32 y[8];
#pragma unroll
        for (int j = 0; j < 4; ++j) to_factors(x[i].x[j], y[2 * j], y[2 * j + 1]);
        u8* panel = to + c / 8 * kPanelBytes;
        *reinterpret_cast<Bytes16*>(panel + sm90::place(row, c & 7)) = {{y[0], y[1], y[2], y[3]}};
        *reinterpret_cast<Bytes16*>(panel + sm90::place(row, (c & 7) + 1)) = {{y[4], y[5], y[6], y[7]}};
      }
    }
  }
  // Four values to two pairs of what is multiplied, exactly.
  static PA_DEVICE void to_factors(u32 four, u32& low, u32& high) {
    widen4<C>(four, low, high);
    if (!kIsBf16<Factor>) return;
    low = both_of(low);
    high = both_of(high);
  }
  static PA_DEVICE u32 both_of(u32 halves) {
    return pack2<Factor>(to_float(f16{static_cast<u16>(halves)}), to_float(f16{static_cast<u16>(halves >> 16)}));
  }

  // A tile before may be waited for, whose q, or whose next tile's, is yet to be told of.
  PA_DEVICE void acquire_q(Copier& c) const {
    tell<0>(c);
    acquire(kEmptyQ + c.q.stage, c.q.parity);
  }

  // Begins the boxes of a tile's q, one a panel, by a warp; `full` is told.
  PA_DEVICE void box_q(const Tile& t, int stage, int full) const {
    if (warp::lane() == 0) sm90::expect(barrier(full), maps.tile_rows * kPanels * 128);
    else sm90::arrive(barrier(full));
    warp::wave_sync();
    if (warp::lane() < kPanels)
      sm90::copy_box(q_tile + stage * kQBytes + warp::lane() * kRowPanelBytes, maps.q, warp::lane() * sm90::kPanel, t.head_kv * p.group,
                     static_cast<int>(t.s.start_q) + t.first_token, p.cu_q ? 0 : t.b, barrier(full));
  }

  PA_DEVICE void copy_q(Copier& c, const Tile& t) const {
    if (p.flags & kMappedQ) {  // by the last warp, which has the fewest boxes of keys; every thread arrives: one of them wrote down the tile
      acquire_q(c);
      if (thread_x() >= sm90::kGroup - 32) box_q(t, c.q.stage, kFullQ + c.q.stage);
      else sm90::arrive(barrier(kFullQ + c.q.stage));
      return c.q.next();
    }
    constexpr int kEach = kRows / 4;  // rows of a warp; a lane knows where one begins
    const int stage = c.q.stage, group = p.group, total = t.s.len_q * group, from = thread_x() / 32 * kEach;
    acquire_q(c);
    const void* nowhere = reinterpret_cast<const void*>(reinterpret_cast<u64>(p.q) & ~15ull);  // an aligned address, of which nothing is read
#pragma unroll 1
    for (int some = 0; some < kEach; some += 32) {
      const int mine = t.first_row + from + some + warp::lane(), its_token = quotient(mine, group);
      const i64 offset = some + warp::lane() < kEach && mine < total
          ? q_offset(p, t.s, t.b, its_token, t.head_kv * group + mine - its_token * group) : -1;
#pragma unroll 1
      for (int i = warp::lane(); i < min_of(32, kEach - some) * kPieces; i += 32) {
        const int nth = i / kPieces, r = from + some + nth, piece = i % kPieces, d = piece * 8;
        const i64 at = warp::shfl_idx<32>(offset, nth);
        u8* to = q_tile + stage * kQBytes + piece / 8 * kRowPanelBytes + sm90::place(r, piece & 7);
        const T* row = static_cast<const T*>(p.q) + at;
        const int n = at >= 0 ? min_of(8, max_of(0, p.head_dim - d)) : 0;
        if (n == 0 || (!p.rotary_cos && (reinterpret_cast<u64>(row + d) & 15) == 0)) {
          copy_async16(to, n ? row + d : nowhere, n * 2);
          continue;
        }
#pragma unroll 1
        for (int e = 0; e < 8; ++e) {
          float y = 0.0f;
          if (e < n)
            y = p.rotary_cos ? turned(row, d + e, p.rotary_dim, quotient(t.first_row + r, group) + t.s.len_k - t.s.len_q, p.rotary_cos,
                                      p.rotary_sin, p.flags & kInterleaved, p.flags & kRotaryFloat)
                             : to_float(row[d + e]);
          reinterpret_cast<T*>(to)[e] = from_float<T>(y);
        }
      }
    }
    c.q.next();
    begun(c, kFullQ + stage);
  }

  // Tile `nth` of this block is the queue's tile `taken`, or, past the last, none.
  PA_DEVICE void find_tile(int nth, int taken, int tiles) const {
    Tile& t = control.tiles[nth & 3];
    if (taken < tiles) return find(taken, t);
    if (kBoxed ? warp::lane() == 0 : thread_x() == 0) {
      t = {};
      t.b = -1;
    }
  }
  // Begins q of the tile that was found, or says that there are no more.
  PA_DEVICE void begin_tile(Copier& c, bool more) const {
    if (more) return copy_q(c, control.tiles[c.tiles & 3]);
    acquire_q(c);
    begun(c, kFullQ + c.q.stage);
  }

  PA_DEVICE void copying(int block, int blocks) const {
    Copier c;
    u32 mine = 0;
    if (warp::lane() < maps.boxes) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) mine |= ((warp::lane() * kPanels + panel) % 4 == thread_x() / 32) << panel;
    }
    const bool any = warp::any(mine != 0);
    const int tiles = count();
    int taken = block;
    find_tile(0, taken, tiles);
    begin_tile(c, taken < tiles);
    while (taken < tiles) {
      sm90::meet<sm90::kGroup>(kCopiers);  // for warps without boxes: the first block may be theirs too
      const Tile& t = control.tiles[c.tiles & 3];  // read where needed: registers are few
      const int n = t.last - t.first, last = t.last - 1;
      int upcoming = 0;
      if (thread_x() == 0) upcoming = atomic_add(p.counters, 1);
      // The next tile is found after the second block of this one, and begins then where there is room for its q, else after the last.
      const int found_at = min_of(2, n), begun_at = kQStages == 2 ? found_at : n;
      // Keys run one block ahead of values: k0 k1 v0 k2 v1 ... v(n - 1), counted from the last block.
      Where now = {0, 0}, next = look_up(t, last);
#pragma unroll 1
      for (int i = -1;; ++i) {
        if (i == found_at) {
          if (thread_x() == 0) control.taken = blocks + upcoming;
          sm90::meet<sm90::kGroup>(kCopiers);
          taken = control.taken;
          find_tile(c.tiles + 1, taken, tiles);
        }
        if (i == begun_at) {
          ++c.tiles;
          begin_tile(c, taken < tiles);
        }
        if (i == n) break;
        if (i + 2 == n && n > 1 && t.first < t.boxed_first) sm90::meet<sm90::kGroup>(kCopiers);  // as above, for the last block
        if (i + 1 < n) copy_block<false>(c, t, last - i - 1, next, mine, any);
        if (i >= 0) copy_block<true>(c, t, last - i, now, mine, any);
        now = next;
        next = look_up(t, max_of(t.first, last - i - 2));
      }
    }
    tell<0>(c);
    if (thread_x() == 0 && atomic_add_ordered(p.counters + 2, 1) == blocks - 1) p.counters[0] = p.counters[2] = 0;
  }

  // ---- copying in boxes alone: warps 0 and 1 copy keys, 2 and 3 values, each every other box; 3 finds tiles and copies q. Of 8 bits, warp 0 copies
  // keys and values.

  // This lane's box of a block, if there is one: of so many keys, one a panel; of 8 bits, with all columns.
  static constexpr int kBoxPanels = kWiden ? 1 : kPanels, kBoxRowBytes = kWiden ? kD : 128;
  static PA_DEVICE int box() { return kWiden ? warp::lane() : 2 * warp::lane() + thread_x() / 32 % 2; }
  // Where it is. Of no key of the tile there may be no page: such a box lies outside of the cache, and is zeros.
  PA_DEVICE Where find_box(const Tile& t, int block) const {
    const int key = block * kN + box() / kBoxPanels * maps.rows;
    if (!(p.flags & kPaged)) return {p.cu_k ? 0 : t.b, static_cast<int>(t.s.start_k) + key};
    if (box() >= maps.boxes * kBoxPanels || key + maps.rows <= t.lo || key >= t.s.len_k) return {-1, 0};
    return {static_cast<int>(page_of(p, t.b, key)), static_cast<int>(row_of_key(p, t.s, key))};
  }
  // Waits until a stage is free and begins this warp's boxes of a block; `full`: of the barrier that is told.
  PA_DEVICE void copy_boxes(u8* stage, int empty, u32 parity, int full, int arrivals, const sm90::TensorMap& map, const Tile& t, const Where& where) const {
    acquire(empty, parity);
    warp::wave_sync();  // no lane waits for a phase that is over when another's copies have been used
    if (thread_x() % 64 == 0) {
      sm90::expect(barrier(full), kWiden ? kRawBytes : kStageBytes);
      if (arrivals > 1) sm90::arrive(barrier(full), arrivals - 1);
    }
    const int panel = box() % kBoxPanels;
    if (box() < maps.boxes * kBoxPanels)
      sm90::copy_box(stage + panel * kPanelBytes + box() / kBoxPanels * maps.rows * kBoxRowBytes, map, panel * sm90::kPanel, t.head_kv, where.row, where.page,
                     barrier(full));
  }
  // Tile number `nth` of this block, when it has been found; and that this warp is through with it.
  PA_DEVICE const Tile& found(int nth) const {
    sm90::wait(barrier(kFound + (nth & 3)), nth >> 2 & 1);
    return control.tiles[nth & 3];
  }
  PA_DEVICE void passed(int nth) const {
    warp::wave_sync();
    if (warp::lane() == 0) sm90::arrive(barrier(kPassed + (nth & 3)));
  }

  PA_DEVICE void copying_keys() const {
    const bool any = thread_x() / 32 < maps.boxes * kPanels;
    Ring<kKStages> ring;
    for (int nth = 0;; ++nth) {
      const Tile& t = found(nth);
      if (t.b < 0) return;
      Where next = find_box(t, t.last - 1);
#pragma unroll 1
      for (int block = t.last - 1; any && block >= t.first; --block) {
        const Where now = next;
        next = find_box(t, max_of(t.first, block - 1));
        copy_boxes(k_tile + ring.stage * kStageBytes, kEmptyK + ring.stage, ring.parity, kFullK + ring.stage, 1, maps.k, t, now);
        ring.next();
      }
      passed(nth);
    }
  }

  // A stage of values that has rows that are to be zeros when its boxes have come, all but [begin, end); -1: none.
  struct Edges {
    int stage = -1, begin = 0, end = 0;
    u32 parities = 0;  // of the stages' barriers
  };
  // Has rows that are not the tile's keys be zeros, whatever their boxes had there: no weight of theirs counts, but zero times NaN would.
  PA_DEVICE void clear(Edges& e) const {
    if (e.stage < 0) return;
    sm90::wait(barrier(kLanded + e.stage), e.parities >> e.stage & 1);
    e.parities ^= 1u << e.stage;
    u8* to = v_tile + e.stage * kStageBytes;
    for (int row = warp::lane() / 8; row < kN; row += 4) {
      if (row >= e.begin && row < e.end) continue;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        *reinterpret_cast<Bytes16*>(to + panel * kPanelBytes + row * 128 + warp::lane() % 8 * 16) = {{0, 0, 0, 0}};
    }
    sm90::engines_see_writes();
    sm90::arrive(barrier(kFullV + e.stage));
    e.stage = -1;
  }
  // This warp's boxes of a block of values.
  PA_DEVICE void copy_values(Ring<kVStages>& ring, Edges& e, const Tile& t, int block, const Where& where) const {
    if (thread_x() / 32 == 2) clear(e);
    const bool cleared = block < t.boxed_first || block >= t.boxed;
    copy_boxes(v_tile + ring.stage * kStageBytes, kEmptyV + ring.stage, ring.parity, (cleared ? kLanded : kFullV) + ring.stage, cleared ? 1 : 32, maps.v, t, where);
    if (cleared) {
      e.stage = ring.stage;
      e.begin = t.lo - block * kN;
      e.end = t.s.len_k - block * kN;
    }
    ring.next();
  }

  PA_DEVICE void copying_values() const {
    Ring<kVStages> ring;
    Edges e;
    for (int nth = 0;; ++nth) {
      const Tile& t = found(nth);
      if (t.b < 0) return;
      Where next = find_box(t, t.last - 1);
#pragma unroll 1
      for (int block = t.last - 1; block >= t.first; --block) {
        const Where now = next;
        next = find_box(t, max_of(t.first, block - 1));
        copy_values(ring, e, t, block, now);
      }
      clear(e);
      passed(nth);
    }
  }

  // Keys and values of 8 bits as they are, in the order in which they are wanted: keys run one block ahead.
  PA_DEVICE void copying_raw() const {
    Ring<kRawStages> ring;
    for (int nth = 0;; ++nth) {
      const Tile& t = found(nth);
      if (t.b < 0) return;
      const auto copy = [&](const sm90::TensorMap& map, const Where& where) {
        copy_boxes(raw_tile + ring.stage * kRawBytes, kEmptyRaw + ring.stage, ring.parity, kFullRaw + ring.stage, 1, map, t, where);
        ring.next();
      };
      Where now = {0, 0}, next = find_box(t, t.last - 1);
#pragma unroll 1
      for (int block = t.last - 1; block >= t.first - 1; --block) {
        if (block >= t.first) copy(maps.k, next);
        if (block + 1 < t.last) copy(maps.v, now);
        now = next;
        next = find_box(t, max_of(t.first, block - 1));
      }
      passed(nth);
    }
  }

  // What copying_raw brought, to stages, in the same order.
  PA_DEVICE void widening() const {
    Ring<kQStages> qs;
    Ring<kRawStages> raw;
    Ring<kKStages> ks;
    Ring<kVStages> vs;
    for (int nth = 0;; ++nth) {
      const Tile& t = found(nth);
      constexpr bool kConvertToo = kConvert && !kOwnWideners;
      if (t.b < 0) {
        if (kConvertToo) convert(qs, false);
        return;
      }
#pragma unroll 1
      for (int block = t.last - 1; block >= t.first - 1; --block) {
        if (block >= t.first) {
          widen_block(raw, t, block, k_tile + ks.stage * kStageBytes, kEmptyK + ks.stage, ks.parity, kFullK + ks.stage);
          ks.next();
        }
        if (kConvertToo && block == t.last - 1) convert(qs, true);
        if (block + 1 < t.last) {
          widen_block(raw, t, block + 1, v_tile + vs.stage * kStageBytes, kEmptyV + vs.stage, vs.parity, kFullV + vs.stage);
          vs.next();
        }
      }
      passed(nth);
    }
  }
  // A block, eight elements at a time, to the stage at `to`: lanes beside each other read and write without conflicts.
  PA_DEVICE void widen_block(Ring<kRawStages>& raw, const Tile& t, int block, u8* to, int empty, u32 parity, int full) const {
    constexpr int kRowChunks = kD / 8, kAtOnce = kRowChunks % 5 == 0 ? 5 : kRowChunks % 3 == 0 ? 3 : 4, kRowsAtOnce = kAtOnce * kWideners / kRowChunks;
    static_assert(kAtOnce * kWideners % kRowChunks == 0 && kRowsAtOnce % 8 == 0 && kN % kRowsAtOnce == 0, "a thread's places repeat");
    const int thread = kOwnWideners ? thread_x() % sm90::kGroup : thread_x() - 32;
    const auto row_of = [&](int i) { return (i * kWideners + thread) / kRowChunks; };
    int places[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int c = (i * kWideners + thread) % kRowChunks;
      places[i] = c / 8 * kPanelBytes + sm90::place(row_of(i), c & 7);
    }
    sm90::wait(barrier(kFullRaw + raw.stage), raw.parity);
    acquire(empty, parity);
    const u8* from = raw_tile + raw.stage * kRawBytes + thread * 8;
#pragma unroll 2
    for (int first = 0; first < kN; first += kRowsAtOnce) {
      Bytes8 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[i] = *reinterpret_cast<const Bytes8*>(from + first * kD + i * kWideners * 8);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        Bytes16 y;
        to_factors(x[i].x[0], y.x[0], y.x[1]);
        to_factors(x[i].x[1], y.x[2], y.x[3]);
        *reinterpret_cast<Bytes16*>(to + first * 128 + places[i]) = y;
      }
    }
    sm90::arrive(barrier(kEmptyRaw + raw.stage));
    raw.next();
    if (block < t.boxed_first || block >= t.boxed) {
      const int begin = t.lo - block * kN, end = t.s.len_k - block * kN;
#pragma unroll 1
      for (int first = 0; first < kN; first += kRowsAtOnce) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int row = first + row_of(i);
          if (row < begin || row >= end) *reinterpret_cast<Bytes16*>(to + first * 128 + places[i]) = {{0, 0, 0, 0}};
        }
      }
    }
    sm90::engines_see_writes();
    sm90::arrive(barrier(full));
  }

  // Finds the queue's tile `taken`, as this block's `nth`, and says so; every lane, one of which wrote it down.
  PA_DEVICE void find_next(int nth, int taken, int tiles) const {
    sm90::wait(barrier(kPassed + (nth & 3)), (nth >> 2 & 1) ^ 1);  // the tile before in its place is nobody's any more
    find_tile(nth, taken, tiles);
    warp::wave_sync();
    sm90::arrive(barrier(kFound + (nth & 3)));
  }
  // Begins q of tile number `nth`, or says that there are no more.
  PA_DEVICE void begin_q(Ring<kQStages>& ring, int nth) const {
    const Tile& t = control.tiles[nth & 3];
    const int full = (kConvert ? kLandedQ : kFullQ) + ring.stage;
    acquire(kEmptyQ + ring.stage, ring.parity);
    if (t.b < 0) sm90::arrive(barrier(full));
    else box_q(t, ring.stage, full);
    ring.next();
  }

  // Makes f16 of tiles' q, a row a lane: eight lanes beside each other touch all banks.
  PA_DEVICE void converting() const {
    Ring<kQStages> ring;
    for (int nth = 0;; ++nth) {
      const bool more = found(nth).b >= 0;
      convert(ring, more);
      if (!more) return;
      passed(nth);
    }
  }
  // q of the next tile, if there is one, by kConverters threads from the second warp on.
  PA_DEVICE void convert(Ring<kQStages>& ring, bool more) const {
    sm90::wait(barrier(kLandedQ + ring.stage), ring.parity);
    if (more) {
#pragma unroll 1
      for (int row = thread_x() - 32; row < kRows; row += kConverters)
        control.q_units[ring.stage * kRows + row] = convert_row(q_tile + ring.stage * kQBytes, row);
      sm90::engines_see_writes();
    }
    sm90::arrive(barrier(kFullQ + ring.stage));
    ring.next();
  }
  // A row of bf16 to f16, divided by the power of two that is returned: its largest element is then next to f16's largest, and elements down to
  // 2^-32 of it are exact.
  PA_DEVICE float convert_row(u8* tile, int row) const {
    const auto piece = [&](int i) { return reinterpret_cast<Bytes16*>(tile + i / 8 * kRowPanelBytes + sm90::place(row, i & 7)); };
    u32 highest = 0;  // of even and of odd elements
#pragma unroll 4
    for (int i = 0; i < kPieces; ++i) {
      const Bytes16 x = *piece(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) highest = sm90::larger_halves(highest, x.x[j] & 0x7fff7fff);
    }
    // 2^(15 - its exponent); of infinities and NaN, as of the largest finite number, and so that no scale makes the unit of a row of zeros zero.
    const int exponent = min_of(254, max_of(64, max_of(static_cast<int>(highest >> 23), static_cast<int>(highest >> 7 & 0xff))));
    const float factor = bits_float(static_cast<u32>(127 + 15 + 127 - exponent) << 23);
#pragma unroll 2
    for (int i = 0; i < kPieces; ++i) {
      Bytes16 x = *piece(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) x.x[j] = pack2<f16>(bits_float(x.x[j] << 16) * factor, bits_float(x.x[j] & 0xffff0000u) * factor);
      *piece(i) = x;
    }
    return bits_float(static_cast<u32>(exponent - 15) << 23);
  }

  PA_DEVICE void finding(int block, int blocks, int tiles) const {
    Ring<kQStages> qs;
    Ring<kVStages> ring;
    Edges unused;
    const bool any = 1 < maps.boxes * kPanels;
    int taken = block;
    find_next(0, taken, tiles);
    begin_q(qs, 0);
    for (int nth = 0; taken < tiles; ++nth) {
      const Tile& t = control.tiles[nth & 3];
      int upcoming = 0;
      if (warp::lane() == 0) upcoming = atomic_add(p.counters, 1);
      if (kWiden) {
        taken = blocks + warp::shfl_idx<32>(upcoming, 0);
        find_next(nth + 1, taken, tiles);
        begin_q(qs, nth + 1);
        continue;
      }
      const int n = t.last - t.first;
      // The next tile is found after the first block of values, and its q begins after the second, if there is room for it, else after the last.
      const int found_at = min_of(1, n), begun_at = kQStages == 2 ? min_of(2, n) : n;
      Where next = find_box(t, t.last - 1);
#pragma unroll 1
      for (int i = 0;; ++i) {
        if (i == found_at) {
          taken = blocks + warp::shfl_idx<32>(upcoming, 0);
          find_next(nth + 1, taken, tiles);
        }
        if (i == begun_at) begin_q(qs, nth + 1);
        if (i == n) break;
        const Where now = next;
        next = find_box(t, max_of(t.first, t.last - 2 - i));
        if (any) copy_values(ring, unused, t, t.last - 1 - i, now);
      }
    }
    if (warp::lane() == 0 && atomic_add_ordered(p.counters + 2, 1) == blocks - 1) p.counters[0] = p.counters[2] = 0;
  }

  PA_DEVICE void copying_boxes(int block, int blocks) const {
    const int w = warp::shfl_idx<32>(thread_x() / 32, 0), tiles = count();
    if (w == 3) return finding(block, blocks, tiles);
    if constexpr (!kWiden) {
      if (w < 2) copying_keys();
      else copying_values();
    } else if (w == 0) {
      copying_raw();
    } else if constexpr (!kOwnWideners) {
      widening();
    } else if constexpr (kConvert) {
      converting();
    }
  }

  // ---- computing

  struct State {
    float o[kD / 2], m[2], l[2];
    u32 weights[kN / 4];
  };

  // What masks and scores of this thread's rows need to know.
  struct Rows {
    int lo[2], hi[2];  // keys [lo, hi) are seen
    int clear_first, clear_last;  // blocks whose keys every row of this warp sees; none if scores are not plain
    float factor[kConvert ? 2 : 1];  // of products, where they are, else 1; by row, where q's are not all of one unit
    float unit[kConvert ? 2 : 1];    // of q, by row
    int last;                     // block past all that this warpgroup's rows see
  };
  PA_DEVICE Rows look_at(const Tile& t, int row_of_warp, int q_stage) const {
    Rows x;
    const int first_row = row_of_warp / 64 * 64, end = token_of(t, first_row + 63) + t.hi_at;
    x.last = first_row >= t.rows ? 0 : quotient(max_of(0, min_of(end, t.s.len_k)) + kN - 1, kN);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = token_of(t, row_of_warp + warp::lane() / 4 + 8 * r);
      x.lo[r] = max_of(0, token + t.lo_at);
      x.hi[r] = max_of(0, min_of(token + t.hi_at, t.s.len_k));
    }
    const bool plain = t.factor > 0.0f;
#pragma unroll
    for (int r = 0; r < (kConvert ? 2 : 1); ++r) {
      x.unit[r] = kConvert ? control.q_units[q_stage * kRows + row_of_warp + warp::lane() / 4 + 8 * r] : 1.0f;
      x.factor[r] = plain ? t.factor * x.unit[r] : 1.0f;
    }
    x.clear_first = quotient(max_of(0, token_of(t, row_of_warp + kBoxRows - 1) + t.lo_at) + kN - 1, kN);
    x.clear_last = plain ? quotient(max_of(0, min_of(token_of(t, row_of_warp) + t.hi_at, t.s.len_k)), kN) : 0;
    return x;
  }

  // How far, in units of log2, `m` is set below a row's maximum, and may lag behind it: accumulators seldom need to shrink, and weights of f16, up to
  // 2^15, are not lost down to 2^-31 of the largest.
  static constexpr float kLead = kIsBf16<Factor> ? 0.0f : 7.0f, kLag = kLead + 8.0f;

  // Products of a block to scores that have a bias or a cap.
  PA_DEVICE void adjust(const Tile& t, const Rows& rows, int key, int row, float (&s)[kN / 2]) const {
    const Score scoring = t.scoring;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) s[i] *= kConvert ? scoring.scale * rows.unit[i / 2 % 2] : scoring.scale;
    if (scoring.cap > 0.0f) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) s[i] = scoring.cap * tanh_of(s[i]);
    }
    if (!p.alibi) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row of = row_of(p, t.s, t.b, t.head_kv, t.first_row + row + 8 * r);
      const int at = of.position - key - 2 * (warp::lane() & 3);
#pragma unroll
      for (int j = 0; j < kN / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int distance = at - 8 * j - e;
          s[4 * j + 2 * r + e] -= of.slope * static_cast<float>(distance < 0 ? -distance : distance);
        }
    }
  }

  // What blocks that are not clear ask for besides: scores that are not plain, masks.
  PA_DEVICE void edges(const Tile& t, const Rows& rows, int key, int row, float (&s)[kN / 2]) const {
    if (t.factor == 0.0f) adjust(t, rows, key, row, s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int begin = before(rows.lo[r] - key), end = before(rows.hi[r] - key);
#pragma unroll
      for (int from = 0; from < kN / 4; from += 32) {
        const u32 seen = low_bits(end - from) & ~low_bits(begin - from);
#pragma unroll
        for (int i = 0; i < min_of(32, kN / 4 - from); ++i)
          if (!(seen >> i & 1)) s[4 * ((from + i) / 2) + 2 * r + i % 2] = -PA_INFINITY;
      }
    }
  }
  // How many of this lane's elements of a row stand before a column: it has two of every eight.
  static PA_DEVICE int before(int column) {
    const int x = column - 2 * (warp::lane() & 3);
    return x <= 0 ? 0 : 2 * (x / 8) + min_of(2, x % 8);
  }
  static PA_DEVICE u32 low_bits(int n) { return n >= 32 ? ~0u : (1u << max_of(0, n)) - 1; }

  // Masks a block's scores and finds the maxima, `top`, of what this lane has of its rows. Whether m is to follow, in any row of this warp.
  PA_DEVICE bool maxima(const Tile& t, const Rows& rows, const State& st, int block, int row, float (&s)[kN / 2], float (&top)[2]) const {
    if (block < rows.clear_first || block >= rows.clear_last) edges(t, rows, block * kN, row, s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tops[4];  // four chains: one would wait for itself
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        const float x = s[4 * (i / 2) + 2 * r + i % 2];
        tops[i % 4] = i < 4 ? x : max_of(tops[i % 4], x);
      }
      top[r] = max_of(max_of(tops[0], tops[1]), max_of(tops[2], tops[3])) * rows.factor[kConvert ? r : 0];
    }
    return warp::any(top[0] - st.m[0] > kLag || top[1] - st.m[1] > kLag);  // sums of large scores would round to more
  }
  // Has m follow where a row, of which four lanes have a part, is higher; what was before is to be multiplied by `shrink`.
  PA_DEVICE void follow(State& st, const float (&top)[2], float (&shrink)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = st.m[r], highest = warp::reduce_max<4>(top[r]);
      if (highest - before > kLag) st.m[r] = highest - kLead;
      shrink[r] = weight(before, st.m[r]);
      st.l[r] *= shrink[r];
    }
  }

  // Scores to weights relative to 2^m.
  PA_DEVICE void weigh(State& st, const Rows& rows, float (&s)[kN / 2]) const {
    const float base[2] = {st.m[0] == -PA_INFINITY ? 0.0f : st.m[0], st.m[1] == -PA_INFINITY ? 0.0f : st.m[1]};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const int r = i / 2 % 2;
      s[i] = exp2_fast(s[i] * rows.factor[kConvert ? r : 0] - base[r]);
      st.l[r] += s[i];
    }
  }

  PA_DEVICE void pack(State& st, const float (&s)[kN / 2]) const {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) st.weights[i] = pack2<Factor>(s[2 * i], s[2 * i + 1]);
  }

  // The descriptor of what lies so many bytes behind; its upper half stays a constant.
  static PA_DEVICE u64 ahead(u64 tile, int bytes) { return (tile & ~0xffffffffull) | static_cast<u32>(static_cast<u32>(tile) + (bytes >> 4)); }

  PA_DEVICE void scores(u64 q, u64 k, float (&s)[kN / 2]) const {
#pragma unroll
    for (int d = 0; d < kD / 16; ++d)
      sm90::multiply_rows<kN, Factor>(s, ahead(q, d / 4 * kRowPanelBytes + d % 4 * 32), ahead(k, d / 4 * kPanelBytes + d % 4 * 32), d > 0);
    sm90::products_commit();
  }
  PA_DEVICE void values(State& st, u64 v) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const u32 a[4] = {st.weights[4 * g], st.weights[4 * g + 1], st.weights[4 * g + 2], st.weights[4 * g + 3]};
      sm90::multiply_columns<kD, Factor>(st.o, a, ahead(v, g * 16 * 128));
    }
    sm90::products_commit();
  }

  PA_DEVICE void await(int full, u32 parity) const { sm90::wait(barrier(full), parity); }
  PA_DEVICE void release(int empty) const {
    if (warp::lane() == 0) sm90::arrive(barrier(empty));
  }

  // What to multiply this thread's rows of o by; their lse is written.
  PA_DEVICE void finish_rows(const Tile& t, const State& st, int row, float (&factor)[2]) const {
    float v_factor = p.v_factor;
    if (p.v_scale) v_factor *= p.v_scale[t.b * p.scale_batch_v + t.head_kv * p.scale_head_v];
    const float l[2] = {warp::reduce_sum<4>(st.l[0]), warp::reduce_sum<4>(st.l[1])};
    if (!p.lse && !p.sinks) {  // what is left of `finish`
#pragma unroll
      for (int r = 0; r < 2; ++r) factor[r] = l[r] == 0.0f ? 0.0f : 1.0f / l[r] * v_factor;
      return;
    }
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const int packed = t.first_row + row + 8 * r, token = token_of(t, row + 8 * r), head = t.head_kv * p.group + packed - token * p.group;
      Finish f = {0.0f, 0.0f};
      if (row + 8 * r < t.rows) {
        f = finish<T>(p, r ? st.m[1] : st.m[0], r ? l[1] : l[0], head);
        if (p.lse && (warp::lane() & 3) == 0) p.lse[lse_offset(p, t.s, t.b, token, head)] = f.lse;
      }
      (r ? factor[1] : factor[0]) = f.factor * v_factor;
    }
  }

  // This warp's 16 rows to out, in boxes, through `room`; stores_read is to come before that is written again.
  PA_DEVICE void write_boxes(const Tile& t, const State& st, int row_of_warp, const float (&factor)[2], u8* room) const {
    constexpr int kEach = kOwnOut ? kOutPanels : kPanels;
    const int lane = warp::lane(), row = lane & 15;
    // What one lane says is in uniform registers, where stores take it from.
    const int head = warp::shfl_idx<32>(t.head_kv * p.group, 0), b = warp::shfl_idx<32>(p.cu_q ? 0 : t.b, 0);
    const int token = warp::shfl_idx<32>(static_cast<int>(t.s.start_q) + token_of(t, row_of_warp), 0);
#pragma unroll
    for (int from = 0; from < kPanels; from += kEach) {
      const int end = min_of(kD / 8, 8 * (from + kEach));
      if (from) stores_read();
#pragma unroll
      for (int j = 8 * from; j < end; j += 2) {
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (j + i / 2) + 2 * (i % 2);
          w[i] = pack2<T>(st.o[at] * factor[i % 2], st.o[at + 1] * factor[i % 2]);
        }
        sm90::store_matrices(room + (j / 8 - from) * kRowPanelBytes + sm90::place(row, (j & 7) + lane / 16), w);
      }
      sm90::engines_see_writes();
      warp::wave_sync();
      if (lane == 0) {
#pragma unroll
        for (int panel = from; panel < from + kEach; ++panel)
          sm90::store_box(maps.out, panel * sm90::kPanel, head, token, b, room + (panel - from) * kRowPanelBytes);
        sm90::stores_commit();
      }
    }
  }

  // This thread's rows to out. Four lanes hold a row, two elements of every eight; they trade so that each holds eight of every 32.
  PA_DEVICE void write_rows(const Tile& t, const State& st, int row, const float (&factors)[2]) const {
    const int column = warp::lane() & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int packed = t.first_row + row + 8 * r, token = token_of(t, row + 8 * r), head = t.head_kv * p.group + packed - token * p.group;
      const bool there = row + 8 * r < t.rows;
      const i64 offset = there ? out_offset(p, t.s, t.b, token, head) : 0;
      const float factor = factors[r];
      if (p.flags & kOutFloat || !(p.flags & kOutAligned)) {
        if (!there) continue;
#pragma unroll
        for (int j = 0; j < kD / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int d = 8 * j + 2 * column + e;
            const float x = st.o[4 * j + 2 * r + e] * factor;
            if (d >= p.head_dim_v) continue;
            if (p.flags & kOutFloat) static_cast<float*>(p.out)[offset + d] = x;
            else static_cast<T*>(p.out)[offset + d] = from_float<T>(x);
          }
        continue;
      }
      T* out = static_cast<T*>(p.out) + offset;
      const bool whole = (reinterpret_cast<u64>(out) & 15) == 0;
#pragma unroll
      for (int j = 0; j < kD / 8; j += 4) {
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (j + i) % (kD / 2) + 2 * r;
          w[i] = j + i < kD / 8 ? pack2<T>(st.o[at] * factor, st.o[at + 1] * factor) : 0;
        }
        trade<1>(w[0], w[1], column & 1);
        trade<1>(w[2], w[3], column & 1);
        trade<2>(w[0], w[2], column & 2);
        trade<2>(w[1], w[3], column & 2);
        const int d = 8 * (j + column);
        if (!there || d >= p.head_dim_v) continue;
        if (whole && d + 8 <= p.head_dim_v) {
          *reinterpret_cast<Bytes16*>(out + d) = {{w[0], w[1], w[2], w[3]}};
        } else {
          *reinterpret_cast<Bytes8*>(out + d) = {{w[0], w[1]}};
          if (d + 4 < p.head_dim_v) *reinterpret_cast<Bytes8*>(out + d + 4) = {{w[2], w[3]}};
        }
      }
    }
  }
  // The lane that is kMask away gets b of a lane whose bit is not set, and gives its a for it.
  template <int kMask>
  static PA_DEVICE void trade(u32& a, u32& b, bool set) {
    const u32 other = warp::shfl_xor<4>(set ? a : b, kMask);
    if (set) a = other;
    else b = other;
  }

  // Begins q.k of a tile's last block, whose q is there. Of a tile without keys, or of none, it is products of what is there, for nothing: a
  // branch would have the compiler run all products one by one.
  PA_DEVICE void begin_scores(const Tile& t, u64 q, u64 k, const Ring<kKStages>& ks, float (&s)[kN / 2]) const {
    if (t.b >= 0 && t.first < t.last) await(kFullK + ks.stage, ks.parity);
    sm90::pin(s);
    sm90::products_begin();
    scores(kD > 128 ? sm90::anew(q) : q, ahead(kD > 128 ? sm90::anew(k) : k, ks.stage * kStageBytes), s);
  }

  PA_DEVICE void computing() const {
    using sm90::kGroup;
    constexpr bool kAhead = kQStages == 2;  // q of the next tile is there, or on its way, before this one's has been used
    const int group = warp::shfl_idx<32>(thread_x() / kGroup, 0) - 1, turn = kTurns + group, next_turn = kTurns + (group + 1) % kConsumers;
    const u64 q = sm90::tile_at(q_tile + group * 64 * 128), k = sm90::tile_at(k_tile), v = sm90::tile_at(v_tile, kPanelBytes);
    const int row_of_warp = group * 64 + warp::shfl_idx<32>(thread_x() % kGroup / 32, 0) * kBoxRows, row = row_of_warp + warp::lane() / 4;
    if (kConsumers > 1 && group == kConsumers - 1) sm90::pass<2 * kGroup>(kTurns);  // the first group begins
    Ring<kQStages> qs;
    Ring<kKStages> ks;
    Ring<kVStages> vs;
    float s[kN / 2];
    await(kFullQ, 0);
    if (control.tiles[0].b < 0) return;
    begin_scores(control.tiles[0], q, k, ks, s);
    Rows rows = look_at(control.tiles[0], row_of_warp, 0);
#pragma unroll 1
    for (int tiles = 0;; ++tiles) {
      const Tile& t = control.tiles[tiles & 3];
      const Tile& next = control.tiles[(tiles + 1) & 3];  // whose q has come when it is read
      const int stage = qs.stage, first = t.first, last = t.last;
      qs.next();
      State st;
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) st.o[i] = 0.0f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        st.m[r] = -PA_INFINITY;
        st.l[r] = 0.0f;
      }
      float finished[2];
      sm90::products_wait<0>();
      sm90::pin(s);
      if (first < last) {
        float top[2], shrink[2];
        int n = last - 1;
        release(kEmptyK + ks.stage);
        ks.next();
        // Blocks that no row of this warpgroup sees: their scores, of the first alone, are for nothing. Turns are kept. Values, which are waited for here,
        // may come after the next tile's q, whose room has to be given back before.
        const bool blind = n > first && n >= rows.last;
        if (blind && kAhead && !kOwnOut && tiles > 0) give_q(1 - stage);
#pragma unroll 1
        for (; n > first && n >= rows.last; --n) {
          await(kFullK + ks.stage, ks.parity);
          if (kConsumers > 1) sm90::meet<2 * kGroup>(turn);
          if (n - 1 == first || n - 1 < rows.last) {
            sm90::pin(s);
            sm90::products_begin();
            scores(ahead(kD > 192 ? sm90::anew(q) : q, stage * kQBytes), ahead(k, ks.stage * kStageBytes), s);
            if (kConsumers > 1) sm90::pass<2 * kGroup>(next_turn);
            sm90::products_wait<0>();
            sm90::pin(s);
          } else if (kConsumers > 1) {
            sm90::pass<2 * kGroup>(next_turn);
          }
          release(kEmptyK + ks.stage);
          ks.next();
          await(kFullV + vs.stage, vs.parity);
          warp::wave_sync();  // no lane waits for a phase that is over when another has given the stage back
          release(kEmptyV + vs.stage);
          vs.next();
        }
        if (maxima(t, rows, st, n, row, s, top)) follow(st, top, shrink);  // nothing was before
        weigh(st, rows, s);
        pack(st, s);
        if (!blind && kAhead && !kOwnOut && tiles > 0) give_q(1 - stage);
        bool ready = sm90::reached(barrier(kFullK + ks.stage), ks.parity);
#pragma unroll 1
        for (; n > first; --n) {
          if (!ready) await(kFullK + ks.stage, ks.parity);
          if (kConsumers > 1) sm90::meet<2 * kGroup>(turn);
          sm90::pin(s);
          sm90::pin(st.o);
          sm90::products_begin();
          scores(ahead(kD > 192 ? sm90::anew(q) : q, stage * kQBytes), ahead(k, ks.stage * kStageBytes), s);
          await(kFullV + vs.stage, vs.parity);
          values(st, ahead(v, vs.stage * kStageBytes));
          if (kConsumers > 1) sm90::pass<2 * kGroup>(next_turn);
          sm90::products_wait<1>();
          sm90::pin(s);
          release(kEmptyK + ks.stage);
          ks.next();
          // When maxima are known p.v has ended, or will soon: weights can be packed as they are computed. The wait stands in both branches:
          // before them, the compiler would move it into what is to happen beside the products.
          if (maxima(t, rows, st, n - 1, row, s, top)) {
            follow(st, top, shrink);
            sm90::products_wait<0>();
            sm90::pin(st.o);
#pragma unroll
            for (int i = 0; i < kD / 2; ++i) st.o[i] *= shrink[i >> 1 & 1];
          } else {
            sm90::products_wait<0>();
            sm90::pin(st.o);
          }
          release(kEmptyV + vs.stage);
          vs.next();
          ready = sm90::reached(barrier(kFullK + ks.stage), ks.parity);
          weigh(st, rows, s);
          pack(st, s);
        }
        if (kOwnOut) release(kEmptyQ + stage);
        if (kAhead) await(kFullQ + qs.stage, qs.parity);
        if (kConsumers > 1) sm90::meet<2 * kGroup>(turn);
        await(kFullV + vs.stage, vs.parity);
        sm90::pin(st.o);
        sm90::products_begin();
        values(st, ahead(v, vs.stage * kStageBytes));
        if (kAhead) {
          begin_scores(next, ahead(q, qs.stage * kQBytes), k, ks, s);
          rows = look_at(next, row_of_warp, qs.stage);
        }
        if (kConsumers > 1) sm90::pass<2 * kGroup>(next_turn);
        finish_rows(t, st, row, finished);  // beside the products
        sm90::products_wait<kAhead ? 1 : 0>();
        sm90::pin(st.o);
        release(kEmptyV + vs.stage);
        vs.next();
      } else {  // no row sees a key
        if (kOwnOut) give_q(stage);
        else if (kAhead && tiles > 0) give_q(1 - stage);
        if (kAhead) {
          await(kFullQ + qs.stage, qs.parity);
          begin_scores(next, ahead(q, qs.stage * kQBytes), k, ks, s);
          rows = look_at(next, row_of_warp, qs.stage);
        }
        finish_rows(t, st, row, finished);
      }
      if (kOwnOut) stores_read();
      else sm90::meet<kGroup>(kWriters + group);  // all products that read q are over
      // Told by one lane, so that the compiler knows that all lanes go one way and keeps descriptors in uniform registers.
      const bool boxed = warp::shfl_idx<32>(static_cast<int>(p.flags & kMappedOut && row_of_warp + kBoxRows <= t.rows), 0);
      u8* room = q_tile + (kOwnOut ? kQStages : stage) * kQBytes + row_of_warp * 128;
      if (!kAhead && !kOwnOut && !boxed) give_q(stage);
      if (boxed) write_boxes(t, st, row_of_warp, finished, room);
      else write_rows(t, st, row, finished);
      if (!kAhead && !kOwnOut && boxed) give_q(stage);
      if (!kAhead) {
        await(kFullQ, qs.parity);
        begin_scores(next, q, k, ks, s);
        rows = look_at(next, row_of_warp, qs.stage);
      }
      if (next.b < 0) break;
    }
    sm90::products_wait<0>();
    sm90::stores_read();
  }

  // When what this warp has begun to store has been read.
  PA_DEVICE void stores_read() const {
    sm90::stores_read();
    warp::wave_sync();
  }
  // Gives q's stage back, when what went to out through it has been read.
  PA_DEVICE void give_q(int stage) const {
    stores_read();
    release(kEmptyQ + stage);
  }

  // ---- a block

  PA_DEVICE void run(int block, int blocks) const {
    if (thread_x() == 0) {
      for (int i = 0; i < kBarriers; ++i) sm90::init(barrier(i), arrivals(i));
      sm90::init_done();
      if (p.flags & kMapped) {
        sm90::prefetch(maps.k);
        sm90::prefetch(maps.v);
      }
    }
    block_sync();
    if (thread_x() < sm90::kGroup) {
      sm90::give_registers<kGiveRegisters>();
      if constexpr (!kBoxed) copying(block, blocks);
      else copying_boxes(block, blocks);
    } else if (thread_x() < sm90::kGroup * (kConsumers + 1)) {
      sm90::take_registers<kTakeRegisters>();
      computing();
    } else if constexpr (kOwnWideners) {
      sm90::give_registers<kWidenRegisters>();
      widening();
    }
  }
};

}  // namespace portattn
