// New keys and values into a paged cache, keys turned by rotary first.
//
// Computes   cache[slot(t), h] = round(turn(k[t, h]) / k_scale), likewise v without the turn, for every token t whose
//            slot is not negative. A block owns a token; a thread eight elements of a row at a time.
// Layouts    k, v by strides; caches (page, token, head, d) by strides; the slot is given, or the token's position
//            (kv_lens, which count the append or what was there before) looked up in the block table.
// Numerics   float32; rounded once, to nearest even; 8-bit types saturate and NaN stays NaN.
// Cost       bytes: each element read once (twice where turned) and written once.
// Vendor     nothing but thread coordinates.
#pragma once

#include "portattn/rows.h"

namespace portattn {

// Where a token goes: its sequence, its position in it, and whether it goes anywhere.
struct Landing { i64 slot; int b, index, position; bool lands; };

PA_DEVICE Landing landing_of(const AppendParams& p, int t) {
  Landing at = {-1, 0, t, 0, false};
  if (p.slots) {
    at.slot = read_whole_index(p.slots, t, p.flags & kLengths64);  // one past the cache is written nowhere
    at.lands = at.slot >= 0 && at.slot < static_cast<i64>(p.pages) * p.page_size;
    return at;
  }
  int len_q = p.len_q;
  if (p.cu_q) {  // the last sequence that starts at or before t
    int lo = 0, hi = p.batch;
    while (hi - lo > 1) {
      const int mid = (lo + hi) / 2;
      (read_index(p.cu_q, mid, p.flags & kCuQ64) <= t ? lo : hi) = mid;
    }
    const int start = static_cast<int>(read_index(p.cu_q, lo, p.flags & kCuQ64));
    len_q = static_cast<int>(read_index(p.cu_q, lo + 1, p.flags & kCuQ64)) - start;
    at.b = lo;
    at.index = t - start;
    if (at.index < 0 || at.index >= len_q) return at;  // a row of no sequence
  } else {
    at.b = quotient(t, len_q);
    at.index = t - at.b * len_q;
  }
  const int len_k = max_of(0, static_cast<int>(counted(p.lengths, at.b, len_q, p.flags & kLengths64, p.flags)));
  at.position = len_k - len_q + at.index;
  if (at.position < 0) return at;
  const int entry = quotient(at.position, p.page_size);
  if (entry >= p.columns) return at;
  const i64 page = read_whole_index(p.block_table, at.b * p.table_batch + entry, p.flags & kTable64);
  at.slot = page * p.page_size + at.position - entry * p.page_size;
  at.lands = page >= 0 && page < p.pages;
  return at;
}

template <class T, class C, int kThreads>
PA_DEVICE void append(const AppendParams& p, int t) {
  const Landing at = landing_of(p, t);
  if (!at.lands) return;
  const i64 page = at.slot / p.page_size, token = at.slot - page * p.page_size;
  const int chunks = ceil_div(max_of(p.head_dim, p.head_dim_v), 8);
  // Rows of k and v are (b, index) where they are batched, else t: with no batch stride, index is t.
  const int index = p.cu_q || p.slots ? t : at.index;
  for (int i = thread_x(); i < p.heads_kv * 2 * chunks; i += kThreads) {
    const int row = quotient(i, chunks), d = (i - row * chunks) * 8, head = row >> 1;
    const bool is_v = row & 1;
    const int dim = is_v ? p.head_dim_v : p.head_dim;
    const T* from = is_v ? static_cast<const T*>(p.v) + at.b * p.v_batch + index * p.v_token + head * p.v_head
                         : static_cast<const T*>(p.k) + at.b * p.k_batch + index * p.k_token + head * p.k_head;
    C* to = is_v ? static_cast<C*>(p.v_cache) + page * p.vc_page + token * p.vc_token + head * p.vc_head
                 : static_cast<C*>(p.k_cache) + page * p.kc_page + token * p.kc_token + head * p.kc_head;
    float scale = is_v ? p.v_factor : p.k_factor;
    if (is_v ? p.v_scale != nullptr : p.k_scale != nullptr)
      scale = is_v ? p.v_scale[at.b * p.scale_batch_v + head * p.scale_head_v] : p.k_scale[at.b * p.scale_batch_k + head * p.scale_head_k];
    const bool turn = p.rotary_cos && !is_v && d < p.rotary_dim;
    if (!turn && sizeof(T) == sizeof(C) && scale == 1.0f && d + 8 <= dim &&
        ((reinterpret_cast<u64>(from + d) | reinterpret_cast<u64>(to + d)) & 15) == 0) {
      for (u32 part = 0; part < sizeof(T) / 2; ++part)
        reinterpret_cast<Bytes16*>(to + d)[part] = reinterpret_cast<const Bytes16*>(from + d)[part];
      continue;
    }
#pragma unroll 1
    for (int e = d; e < min_of(d + 8, dim); ++e) {
      const float x = turn ? turned(from, e, p.rotary_dim, at.position, p.rotary_cos, p.rotary_sin, p.flags & kInterleaved, p.flags & kRotaryFloat)
                           : to_float(from[e]);
      to[e] = Store<C>::of(scale == 1.0f ? x : x / scale);
    }
  }
}

}  // namespace portattn
