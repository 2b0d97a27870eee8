// The one argument of every kernel: plain structs, packed by the host with the same order (portattn/native.py).
// Pointers come first: they are what changes from call to call. All strides count elements.
#pragma once

#include "vendor.h"

namespace portattn {

enum Flags : u32 {
  kOutFloat = 1 << 0,         // out is float32, whatever q is
  kAligned = 1 << 1,          // k and v rows can be read 16 bytes at a time
  kOutAligned = 1 << 2,       // out rows can be written four elements at a time
  kUniformPages = 1 << 3,     // sixteen keys that start at a multiple of 16 lie in one page, or there are no pages
  kInvariant = 1 << 4,        // batch_invariant: splits depend on nothing but a sequence's own length
  kLengths64 = 1 << 5,        // index tensors of 64 bits; otherwise of 32
  kTable64 = 1 << 6,
  kCuQ64 = 1 << 7,
  kCuK64 = 1 << 8,
  kInterleaved = 1 << 9,      // rotary pairs are neighbours, not halves
  kRotaryFloat = 1 << 10,     // cos and sin are float32
  kSinksFloat = 1 << 11,
  kPaged = 1 << 12,
  kTiled = 1 << 13,           // decode kernel: sequences of more than kDecodeRows rows are another launch's, the next, as what plain.h leaves is;
                              // prefill_sm90.h: those of one token are the launch's before
  kMapped = 1 << 14,          // prefill_sm90.h: there are tensor maps of k and v
  kBefore = 1 << 15,          // lengths count the keys before an append of as many tokens as q has
  kPrefixSums = 1 << 16,      // lengths are prefix sums, one more than there are sequences
  kUnseenInf = 1 << 17,       // without sinks, the lse of a row that sees no key is +inf, not -inf
  kAllTiles = 1 << 18,        // prefill_sm90.h: sequences of few rows are its too, however few
  kMappedQ = 1 << 19,         // prefill_sm90.h: there is a tensor map of q,
  kMappedOut = 1 << 20,       // of out
};

constexpr int kQueues = 4;

// Attention over dense, varlen and paged keys: token t of sequence b is row start(b) + t, of a page where paged.
struct AttentionParams {
  static constexpr bool kPlain = false;
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;               // null: not wanted
  const void* lengths;      // kv_lens, or seqused_k; null: from cu_seqlens_k, else len_k
  const void* block_table;
  const void* cu_q;         // null: every sequence has len_q rows at q_batch strides
  const void* cu_k;
  const float* alibi;
  const void* sinks;
  const float* k_scale;     // null: folded into scale
  const float* v_scale;
  const void* rotary_cos;   // null: q is used as it is
  const void* rotary_sin;
  float* partial;           // workspace: one state a slot, partial_rows x (head size + 2) floats each
  i32* counters;            // zero at entry, zero at exit: kQueues of prefill.h's, then those of shared tiles

  i64 q_batch, q_token, q_head;
  i64 k_batch, k_token, k_head;   // _batch is the page's stride where paged
  i64 v_batch, v_token, v_head;
  i64 out_batch, out_token, out_head;
  i64 lse_batch, lse_token, lse_head;
  i64 table_batch;

  i32 batch, heads_q, heads_kv, group, head_dim, head_dim_v;  // group: query heads a kv head
  i32 len_q, len_k;         // dense: the lengths; paged: len_k is what the table has room for
  i32 page_size, page_shift;  // page_shift: log2 of a page size that is a power of two, else -1
  i32 window_left, window_right;  // -1: unbounded (of plain calls the largest i32); causal is window_right 0
  i32 alibi_batch;          // strides in elements
  i32 scale_batch_k, scale_head_k, scale_batch_v, scale_head_v;
  i32 rotary_dim;
  i32 partial_rows;
  i32 cut_tiles;            // batch_invariant: places for cut tiles a (sequence, kv head) has
  i32 lines, line_heads;    // schedule.h: lines of work, and kv heads of each
  i32 workers;              // of each line
  i32 workers_shift;        // for quotient_by, as is
  u32 workers_inverse;
  float scale;              // softmax_scale, times k_scale where that is a number
  float softcap;
  float v_factor;           // v_scale where that is a number
  u32 flags;
  i32 mixed_stride;         // prefill.h: blocks in a row that begin with the same kind of work

  PA_DEVICE u32 dialect() const { return flags; }  // of them those that plain calls may have: kSinksFloat, and dialect.py's kBefore, kPrefixSums and kUnseenInf
};

// What most decode steps ask for: one query token a sequence, a paged cache read 16 bytes at a time, of features that change scores
// a left window, softcap and sinks alone. What plain.h's helpers know of such calls hides the fields of the same names, but not dialect();
// native.py, is_plain, decides.
template <int kD>
struct PlainParams : AttentionParams {
  static constexpr bool kPlain = true;
  static constexpr i32 head_dim_v = kD;
  static constexpr u32 flags = kAligned | kOutAligned | kUniformPages | kPaged;
};

// Appending keys and values to a paged cache, keys turned by rotary where given.
struct AppendParams {
  const void* k;
  const void* v;
  void* k_cache;
  void* v_cache;
  const void* slots;        // slot_mapping, or null: from lengths and block_table
  const void* lengths;
  const void* block_table;
  const void* cu_q;
  const float* k_scale;
  const float* v_scale;
  const void* rotary_cos;
  const void* rotary_sin;

  i64 k_batch, k_token, k_head;
  i64 v_batch, v_token, v_head;
  i64 kc_page, kc_token, kc_head;
  i64 vc_page, vc_token, vc_head;
  i64 table_batch;

  i32 batch, pages;         // pages of the cache: what lies beyond goes nowhere
  i32 heads_kv, head_dim, head_dim_v;
  i32 len_q;
  i32 page_size;
  i32 scale_batch_k, scale_head_k, scale_batch_v, scale_head_v;
  i32 rotary_dim;
  float k_factor, v_factor; // scales where they are numbers
  u32 flags;
  i32 columns;              // of block_table: likewise
};

// Merging n partial results of `rows` rows (all axes of out but the last).
struct MergeParams {
  const void* outs;
  const float* lses;
  const void* sinks;
  void* out;
  float* lse;
  i64 outs_state;           // stride between partial results; rows are contiguous
  i64 lses_state;
  i64 rows;
  i32 states, heads, head_dim;
  u32 flags;
};

}  // namespace portattn
