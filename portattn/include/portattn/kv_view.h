// Where things are: a sequence's rows of q, out and lse, and its keys and values, whatever the layout. Dense is
// varlen with uniform lengths; paged is varlen with a page lookup.
#pragma once

#include "portattn/params.h"
#include "portattn/vec.h"

namespace portattn {

struct Sequence {
  int len_q, len_k;
  i64 start_q, start_k;  // first token of q, out, lse; of k, v where not paged
};

// The keys of a sequence by `lengths`, whatever they count.
PA_DEVICE i64 counted(const void* lengths, int b, int len_q, bool wide, u32 dialect) {
  const i64 n = read_index(lengths, b, wide);
  if (dialect & kPrefixSums) return read_index(lengths, b + 1, wide) - n;
  return dialect & kBefore ? n + len_q : n;
}

// The length given for a sequence of len_q queries that has room for `room` keys.
template <class P>
PA_DEVICE int length_of(const P& p, int b, int len_q, int room) {
  const i64 n = counted(p.lengths, b, len_q, p.flags & kLengths64, p.dialect());
  return n < 0 ? 0 : n < room ? static_cast<int>(n) : room;
}

template <class P>
PA_DEVICE Sequence sequence(const P& p, int b) {
  Sequence s = {p.len_q, p.len_k, 0, 0};
  if (p.cu_q) {
    s.start_q = read_index(p.cu_q, b, p.flags & kCuQ64);
    s.len_q = static_cast<int>(read_index(p.cu_q, b + 1, p.flags & kCuQ64) - s.start_q);
  }
  if (p.cu_k) {
    s.start_k = read_index(p.cu_k, b, p.flags & kCuK64);
    s.len_k = static_cast<int>(read_index(p.cu_k, b + 1, p.flags & kCuK64) - s.start_k);
  }
  if (p.lengths) s.len_k = length_of(p, b, s.len_q, s.len_k);
  return s;
}

template <class P>
PA_DEVICE i64 q_offset(const P& p, const Sequence& s, int b, int token, int head) {
  return b * p.q_batch + (s.start_q + token) * p.q_token + head * p.q_head;
}
template <class P>
PA_DEVICE i64 out_offset(const P& p, const Sequence& s, int b, int token, int head) {
  return b * p.out_batch + (s.start_q + token) * p.out_token + head * p.out_head;
}
template <class P>
PA_DEVICE i64 lse_offset(const P& p, const Sequence& s, int b, int token, int head) {
  return b * p.lse_batch + (s.start_q + token) * p.lse_token + head * p.lse_head;
}

// The keys that rows [first, last] of a sequence can see: [lo, hi); pages that end before may hold anything. Row i stands at
// position i + len_k - len_q.
struct Span { int lo, hi; };
template <class P>
PA_DEVICE Span visible(const P& p, const Sequence& s, int first, int last) {
  Span v = {0, s.len_k};
  const int shift = s.len_k - s.len_q;
  if (p.window_left >= 0 && first + shift > p.window_left) v.lo = min_of(s.len_k, first + shift - p.window_left);
  if (p.window_right >= 0) {
    const i64 hi = static_cast<i64>(last) + shift + p.window_right + 1;
    if (hi < v.hi) v.hi = hi < 0 ? 0 : static_cast<int>(hi);
  }
  if (v.hi < v.lo) v.hi = v.lo;
  return v;
}

// A row of keys and one of values, in elements from k and v.
struct KvOffset { i64 k, v; };

// The page that holds a key (or the batch index of an unpaged cache).
template <class P>
PA_DEVICE i64 page_of(const P& p, int b, int key) {
  if (!(p.flags & kPaged)) return b;
  const int entry = P::kPlain || p.page_shift >= 0 ? key >> p.page_shift : quotient(key, p.page_size);
  return read_index(p.block_table, b * p.table_batch + entry, p.flags & kTable64);
}
// Its row there.
template <class P>
PA_DEVICE i64 row_of_key(const P& p, const Sequence& s, int key) {
  if (!(p.flags & kPaged)) return s.start_k + key;
  return P::kPlain || p.page_shift >= 0 ? key & ((1 << p.page_shift) - 1) : key - quotient(key, p.page_size) * p.page_size;
}
template <class P>
PA_DEVICE KvOffset kv_offset(const P& p, const Sequence& s, i64 page, int key, int head) {
  const i64 row = row_of_key(p, s, key);
  return {page * p.k_batch + row * p.k_token + head * p.k_head, page * p.v_batch + row * p.v_token + head * p.v_head};
}

// out's four elements from column d on.
template <class T, class P>
PA_DEVICE void write_out(const P& p, i64 offset, int d, const float (&x)[4]) {
  if (d >= p.head_dim_v) return;
  if (p.flags & kOutFloat) {
    float* to = in_global(static_cast<float*>(p.out)) + offset + d;
    if (p.flags & kOutAligned) {
      *reinterpret_cast<Float4*>(to) = {{x[0], x[1], x[2], x[3]}};
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (d + i < p.head_dim_v) to[i] = x[i];
    }
    return;
  }
  T* to = in_global(static_cast<T*>(p.out)) + offset + d;
  if (p.flags & kOutAligned) {
    *reinterpret_cast<Bytes8*>(to) = {{pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3])}};
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (d + i < p.head_dim_v) to[i] = from_float<T>(x[i]);
  }
}

}  // namespace portattn
