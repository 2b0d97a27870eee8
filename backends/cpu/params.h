// What a call passes: Shape holds for every call of the same shapes and types, Args changes with each.
// Every field is 8 bytes, in the order that backends/cpu/__init__.py packs them. Strides are in elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pa {

enum Kind : int64_t { kDense = 0, kVarlen = 1, kPaged = 2, kPagedRagged = 3 };
enum Counting : int64_t { kAfter = 0, kBefore = 1, kPrefixSums = 2 };  // portattn/dialect.py
enum LseForm : int64_t { kOurs = 0, kHeadsFirst = 1, kFlashAttn2 = 2 };  // likewise; the order of axes is in the strides

struct Shape {
  int64_t kind, batch, heads_q, heads_kv, dim, dim_v;
  int64_t q_type, kv_type, out_type;
  int64_t len_q, len_k;  // dense and 4-D paged; dense. Of ragged tensors, the rows that there are
  int64_t page_size, pages, width;  // width: table entries of a sequence
  int64_t q[3], out[3], lse[3];  // sequence, token, head
  int64_t k[3], v[3];           // sequence or page, token, head
  int64_t k_new[3], v_new[3];   // sequence, token, head
  int64_t table[2];             // sequence, entry
  int64_t bias_type, bias[4];   // -1: none
  int64_t alibi[2];             // sequence, head
  int64_t k_scale[2], v_scale[2];
  int64_t table_64, cu_q_64, cu_k_64, used_64, lens_64;  // 1: int64, 0: int32
  int64_t counting, lse_form;  // what lens count; what the lse of a row that sees no key is
  int64_t rotary_half, rotary_interleaved, rotary_type, rotary_rows, cos, sin;
  int64_t invariant;
  int64_t given;                // bit i: address i of Args is a tensor's that has elements
  uint64_t low_from, low_to;    // where memory was found below kLow
  int64_t reach[4];             // k, v, k_new, v_new: bytes from the first to the last, where tokens are appended
};

struct Args {
  const void *q, *k, *v;
  void* out;
  float* lse;
  const void *table, *cu_q, *cu_k, *used, *lens, *bias;
  const float *alibi, *sinks;
  const void *k_new, *v_new, *cos, *sin;
  const float *k_scales, *v_scales, *values;  // values: what an 8-bit cache's 256 codes stand for (F8)
  int64_t left, right, splits, threads;
  double scale, softcap, k_scale, v_scale;
};

constexpr int kAddresses = 20;  // fields of Args, the first ones
constexpr uint64_t kLow = uint64_t{1} << 36;  // below it lies no memory but that of programs at fixed places and of some systems

// Whether some tensor's storage may have been freed: its address is then its offset into nothing.
inline bool may_be_freed(const Shape& s, const Args& a) {
  uint64_t at[kAddresses];
  std::memcpy(at, &a, sizeof(at));
  for (uint64_t left = uint64_t(s.given); left; left &= left - 1) {
    const uint64_t x = at[__builtin_ctzll(left)];
    if (x < kLow && (x < s.low_from || x >= s.low_to)) return true;
  }
  return false;
}

// Whether new tokens may lie in the memory that they are written to.
inline bool may_overlap(const Shape& s, const Args& a) {
  if (!a.k_new) return false;
  const int64_t at[4] = {int64_t(a.k), int64_t(a.v), int64_t(a.k_new), int64_t(a.v_new)};
  bool found = false;
  for (int x = 2; x < 4; x++)
    for (int cache = 0; cache < 2; cache++) found |= at[x] - at[cache] < s.reach[cache] && at[cache] - at[x] < s.reach[x];
  return found;
}

inline int64_t entry(const void* base, int64_t i, int64_t is_64) {
  return is_64 ? static_cast<const int64_t*>(base)[i] : static_cast<const int32_t*>(base)[i];
}

// One sequence: where its rows start, and its lengths.
struct Sequence {
  int64_t row, len_q;      // first row of lse, and of a ragged q
  int64_t first_k, len_k;  // varlen: first row of k and v
  int64_t there;           // keys that the table has room for: a longer length reads and writes nothing beyond
};

inline Sequence sequence(const Shape& s, const Args& a, int64_t b) {
  Sequence x{b * s.len_q, s.len_q, 0, s.len_k, 0};
  if (s.kind == kVarlen || s.kind == kPagedRagged) {
    x.row = std::clamp<int64_t>(entry(a.cu_q, b, s.cu_q_64), 0, s.len_q);  // ends past the tensor are the caller's fault: never a wild access
    x.len_q = std::min(entry(a.cu_q, b + 1, s.cu_q_64), s.len_q) - x.row;
  }
  if (s.kind == kVarlen) {
    x.first_k = std::clamp<int64_t>(entry(a.cu_k, b, s.cu_k_64), 0, s.len_k);
    x.len_k = std::min(entry(a.cu_k, b + 1, s.cu_k_64), s.len_k) - x.first_k;
    if (a.used) x.len_k = std::min(entry(a.used, b, s.used_64), x.len_k);
  } else if (s.kind != kDense) {
    x.len_k = s.counting == kPrefixSums ? entry(a.lens, b + 1, s.lens_64) - entry(a.lens, b, s.lens_64) : entry(a.lens, b, s.lens_64);
  }
  if (x.len_q < 0) x.len_q = 0;
  if (s.counting == kBefore) x.len_k += x.len_q;
  if (x.len_k < 0) x.len_k = 0;
  x.there = x.len_k;
  if (s.kind == kPaged || s.kind == kPagedRagged) x.there = std::min(x.len_k, s.pages ? s.width * s.page_size : 0);
  return x;
}

// Offset of token i of a tensor with strides (sequence, token, head): ragged tensors count tokens from the first row of all.
inline int64_t token(const int64_t stride[3], const Shape& s, const Sequence& x, int64_t b, int64_t i, int64_t head) {
  const bool ragged = s.kind == kVarlen || s.kind == kPagedRagged;
  return (ragged ? (x.row + i) * stride[1] : b * stride[0] + i * stride[1]) + head * stride[2];
}

}  // namespace pa
