// The instructions that portattn's objects are made of, by their descriptions in AMD's ISA documents. Names are those of the newer
// generations (program.py renames gfx9's). An instruction that is not here is an error, not a guess.
#include "machine.h"

namespace isa {
namespace {

float as_float(u32 x) { return std::bit_cast<float>(x); }
u32 as_bits(float x) { return std::bit_cast<u32>(x); }

float half_to_float(u16 h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  float x = exponent == 31 ? (mantissa ? NAN : INFINITY)
            : exponent     ? std::ldexp(1024.0f + mantissa, exponent - 25)
                           : std::ldexp(static_cast<float>(mantissa), -24);
  return h & 0x8000 ? -x : x;
}
u16 float_to_half(float x) {
  const u16 sign = std::signbit(x) ? 0x8000 : 0;
  const float a = std::fabs(x);
  if (std::isnan(x)) return 0x7e00;
  if (a >= 65520.0f) return sign | 0x7c00;
  if (a == 0.0f) return sign;
  int e;
  std::frexp(a, &e);
  const int step = std::max(e - 11, -24);
  const int units = static_cast<int>(std::nearbyint(std::ldexp(a, -step)));
  return sign | static_cast<u16>(step == -24 ? units : units - 1024 + ((step + 25) << 10));
}
u16 float_to_half_towards_zero(float x) {
  const u16 near = float_to_half(x);
  return !std::isnan(x) && std::fabs(half_to_float(near)) > std::fabs(x) ? near - 1 : near;
}
float bf16_to_float(u16 h) { return as_float(static_cast<u32>(h) << 16); }
u16 float_to_bf16(float x) {
  const u32 b = as_bits(x);
  if (std::isnan(x)) return static_cast<u16>(b >> 16 | 0x40);
  return static_cast<u16>((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// An 8-bit float of `mantissa` bits by its definition: OCP (bias 7 or 15) or fnuz (8 or 16; 0x80 is NaN, no infinity).
float fp8_value(u8 x, int mantissa, bool fnuz) {
  const int width = 7 - mantissa, bias = (1 << (width - 1)) - (fnuz ? 0 : 1), e = (x & 0x7f) >> mantissa, m = x & ((1 << mantissa) - 1);
  float y;
  if (fnuz && x == 0x80) return NAN;
  if (!fnuz && mantissa == 3 && (x & 0x7f) == 0x7f) return NAN;
  if (!fnuz && mantissa == 2 && e == 31) return m ? NAN : (x & 0x80 ? -INFINITY : INFINITY);
  y = e ? std::ldexp(static_cast<float>((1 << mantissa) + m), e - bias - mantissa) : std::ldexp(static_cast<float>(m), 1 - bias - mantissa);
  return x & 0x80 ? -y : y;
}

// ---- operands

u32 select(u32 x, i64 sel, bool sext) {
  if (sel >= 6) return x;
  const int bits = sel < 4 ? 8 : 16, shift = sel < 4 ? 8 * static_cast<int>(sel) : 16 * static_cast<int>(sel - 4);
  x = x >> shift & ((1u << bits) - 1);
  if (sext && x >> (bits - 1) & 1) x |= ~0u << bits;
  return x;
}
u32 raw(Machine& m, const Operand& o, int lane, int part = 0) {
  switch (o.kind) {
    case kVector: return m.w.v[o.index + part][lane];
    case kScalar: return m.w.s[o.index + part];
    case kLiteral: return static_cast<u32>(o.value >> 32 * part);
    case kScc: return m.w.scc;
    default: return 0;
  }
}
// The source lane of a DPP move, or -1.
int dpp_lane(const Machine& m, const Inst& i, int lane) {
  const int row = lane & ~15, in = lane & 15, n = static_cast<int>(i.dpp_arg);
  int from = lane;
  switch (i.dpp) {
    case kQuadPerm: from = (lane & ~3) + (n >> 2 * (lane & 3) & 3); break;
    case kRowShl: from = in + n > 15 ? -1 : lane + n; break;
    case kRowShr: from = in - n < 0 ? -1 : lane - n; break;
    case kRowRor: from = row + ((in - n) & 15); break;
    case kRowMirror: from = row + 15 - in; break;
    case kRowHalfMirror: from = (lane & ~7) + 7 - (lane & 7); break;
    case kRowShare: from = row + n; break;
    case kRowXmask: from = row + (in ^ n); break;
    default: break;
  }
  return from >= 0 && m.active(from) ? from : -1;
}
u32 modified(u32 x, const Operand& o) {
  if (o.absolute) x &= 0x7fffffffu;
  if (o.negate) x ^= 0x80000000u;
  return x;
}
// Source n of a vector instruction, 32 bits, for one lane.
u32 source(Machine& m, const Inst& i, int n, int lane) {
  const Operand& o = i.o[n];
  if (n == 1 && i.dpp && o.kind == kVector) {
    const int from = dpp_lane(m, i, lane);
    return from < 0 ? 0 : modified(m.w.v[o.index][from], o);
  }
  return modified(select(raw(m, o, lane), o.sel, o.sext), o);
}
u64 source64(Machine& m, const Inst& i, int n, int lane) {
  const Operand& o = i.o[n];
  if (o.kind == kLiteral) return static_cast<u64>(o.value);
  return raw(m, o, lane, 0) | static_cast<u64>(raw(m, o, lane, 1)) << 32;
}
// Whether a lane takes part: its bit of exec, and what DPP switches off.
bool writes(Machine& m, const Inst& i, int lane) {
  if (!m.active(lane)) return false;
  if (!i.dpp) return true;
  if (!(i.row_mask >> (lane / 16 & 3) & 1) || !(i.bank_mask >> (lane / 4 & 3) & 1)) return false;
  return i.bound_ctrl || dpp_lane(m, i, lane) >= 0;
}

// Results of all lanes are found before the first is written.
template <class F>
void each_lane(Machine& m, const Inst& i, F f) {
  u32 result[64];
  bool on[64];
  for (int l = 0; l < m.lanes; ++l) {
    on[l] = writes(m, i, l);
    if (on[l]) result[l] = f(l);
  }
  const i64 reg = i.flags & kDual ? 512 : i.o[0].index;
  for (int l = 0; l < m.lanes; ++l) {
    if (!on[l]) continue;
    u32& to = m.w.v[reg][l];
    if (i.dst_sel >= 6) {
      to = result[l];
      continue;
    }
    const int bits = i.dst_sel < 4 ? 8 : 16, shift = i.dst_sel < 4 ? 8 * static_cast<int>(i.dst_sel) : 16 * static_cast<int>(i.dst_sel - 4);
    const u32 mask = ((1u << bits) - 1) << shift, placed = result[l] << shift & mask;
    if (i.dst_unused == 1) fail("SDWA with a sign-extended result");
    to = i.dst_unused == 2 ? (to & ~mask) | placed : placed;
  }
}
template <class F>
void each_lane64(Machine& m, const Inst& i, F f) {
  u64 result[64];
  for (int l = 0; l < m.lanes; ++l)
    if (m.active(l)) result[l] = f(l);
  for (int l = 0; l < m.lanes; ++l) {
    if (!m.active(l)) continue;
    m.w.v[i.o[0].index][l] = static_cast<u32>(result[l]);
    m.w.v[i.o[0].index + 1][l] = static_cast<u32>(result[l] >> 32);
  }
}

template <auto kF>
void vector1(Machine& m, const Inst& i) { each_lane(m, i, [&](int l) -> u32 { return kF(source(m, i, 1, l)); }); }
template <auto kF>
void vector2(Machine& m, const Inst& i) { each_lane(m, i, [&](int l) -> u32 { return kF(source(m, i, 1, l), source(m, i, 2, l)); }); }
template <auto kF>
void vector3(Machine& m, const Inst& i) {
  each_lane(m, i, [&](int l) -> u32 { return kF(source(m, i, 1, l), source(m, i, 2, l), source(m, i, 3, l)); });
}
u32 difference(u32 a, u32 b, bool clamp) { return clamp && a < b ? 0 : a - b; }
template <auto kF>
void float1(Machine& m, const Inst& i) { each_lane(m, i, [&](int l) { return as_bits(kF(as_float(source(m, i, 1, l)))); }); }
template <auto kF>
void float2(Machine& m, const Inst& i) {
  each_lane(m, i, [&](int l) {
    const float x = kF(as_float(source(m, i, 1, l)), as_float(source(m, i, 2, l)));
    return as_bits(i.clamp ? std::fmin(std::fmax(x, 0.0f), 1.0f) : x);
  });
}
template <auto kF>
void float3(Machine& m, const Inst& i) {
  each_lane(m, i, [&](int l) { return as_bits(kF(as_float(source(m, i, 1, l)), as_float(source(m, i, 2, l)), as_float(source(m, i, 3, l)))); });
}
template <auto kF>
void fused(Machine& m, const Inst& i) {  // with the destination as the third operand
  each_lane(m, i, [&](int l) { return as_bits(kF(as_float(source(m, i, 1, l)), as_float(source(m, i, 2, l)), as_float(m.w.v[i.o[0].index][l]))); });
}

// Sixteen-bit results: gfx9 clears the upper half, the others keep it. Operands and results may be upper halves.
u32 half_source(Machine& m, const Inst& i, int n, int lane) {
  const Operand& o = i.o[n];
  u32 x = select(raw(m, o, lane), o.sel, false);
  if (o.sel >= 6 && o.kind == kVector && i.op_sel >> (n - 1) & 1) x >>= 16;
  x &= 0xffff;
  if (o.absolute) x &= 0x7fff;
  if (o.negate) x ^= 0x8000;
  return x;
}
template <class F>
void each_half(Machine& m, const Inst& i, F f) {
  if (i.dst_sel < 6) return each_lane(m, i, f);
  const bool high = i.op_sel >> 3 & 1 || i.o[0].sel == 5;
  each_lane(m, i, [&](int l) -> u32 {
    const u32 x = f(l) & 0xffff, old = m.w.v[i.o[0].index][l];
    if (high) return (old & 0xffff) | x << 16;
    return m.launch.target->generation == 9 ? x : (old & 0xffff0000u) | x;
  });
}
template <auto kF>
void half2(Machine& m, const Inst& i) {
  each_half(m, i, [&](int l) -> u32 { return float_to_half(kF(half_to_float(half_source(m, i, 1, l)), half_to_float(half_source(m, i, 2, l)))); });
}
template <auto kF>
void half_int2(Machine& m, const Inst& i) {
  each_half(m, i, [&](int l) -> u32 { return kF(half_source(m, i, 1, l), half_source(m, i, 2, l)); });
}

// bitop3: bit (a, b, c) of the table for each bit.
u32 bitop3(const Inst& i, u32 a, u32 b, u32 c) {
  u32 x = 0;
  for (int n = 0; n < 8; ++n)
    if (i.offset >> n & 1) x |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
  return x;
}

// ---- comparisons and masks

template <class T, bool kExecToo>
void write_mask(Machine& m, const Inst& i, T bit) {
  u64 mask = 0;
  for (int l = 0; l < m.lanes; ++l)
    if (m.active(l) && bit(l)) mask |= 1ull << l;
  if (i.o[0].kind != kNone) m.set_mask(static_cast<int>(i.o[0].index), mask);
  if (kExecToo) m.set_mask(kExec, mask);
}
template <class T, class F, bool kExecToo>
void compare_as(Machine& m, const Inst& i, F f) {
  write_mask<std::function<bool(int)>, kExecToo>(m, i, [&](int l) {
    if constexpr (sizeof(T) == 8) return f(static_cast<T>(source64(m, i, 1, l)), static_cast<T>(source64(m, i, 2, l)));
    else if constexpr (std::is_same_v<T, float>) return f(as_float(source(m, i, 1, l)), as_float(source(m, i, 2, l)));
    else if constexpr (sizeof(T) == 2) return f(static_cast<T>(half_source(m, i, 1, l)), static_cast<T>(half_source(m, i, 2, l)));
    else return f(static_cast<T>(source(m, i, 1, l)), static_cast<T>(source(m, i, 2, l)));
  });
}

template <auto kF>
void carry(Machine& m, const Inst& i, bool carries_in) {  // o: sum, carry out, a, b, carry in
  const u64 in = carries_in ? m.mask_at(static_cast<int>(i.o[4].index)) : 0;
  u64 out = 0;
  u32 sum[64];
  for (int l = 0; l < m.lanes; ++l) {
    if (!m.active(l)) continue;
    const u64 x = kF(static_cast<u64>(source(m, i, 2, l)), static_cast<u64>(source(m, i, 3, l)), in >> l & 1);
    sum[l] = static_cast<u32>(x);
    out |= (x >> 32 & 1) << l;
  }
  for (int l = 0; l < m.lanes; ++l)
    if (m.active(l)) m.w.v[i.o[0].index][l] = sum[l];
  if (i.o[1].kind == kScalar) m.set_mask(static_cast<int>(i.o[1].index), out);
}
constexpr auto kPlus = [](u64 a, u64 b, u64 c) { return a + b + c; };
constexpr auto kMinus = [](u64 a, u64 b, u64 c) { return a - b - c; };
constexpr auto kMinusReversed = [](u64 a, u64 b, u64 c) { return b - a - c; };
template <auto kF, bool kIn>
void with_carry(Machine& m, const Inst& i) { carry<kF>(m, i, kIn); }

void multiply_add64(Machine& m, const Inst& i, bool is_signed) {  // o: sum, carry out, a, b, c
  u64 out = 0;
  std::vector<u64> sum(64);
  for (int l = 0; l < m.lanes; ++l) {
    if (!m.active(l)) continue;
    const u32 a = source(m, i, 2, l), b = source(m, i, 3, l);
    const u64 product = is_signed ? static_cast<u64>(static_cast<i64>(static_cast<i32>(a)) * static_cast<i32>(b)) : static_cast<u64>(a) * b;
    sum[l] = product + source64(m, i, 4, l);
    out |= static_cast<u64>(sum[l] < product) << l;
  }
  each_lane64(m, i, [&](int l) { return sum[l]; });
  if (i.o[1].kind == kScalar) m.set_mask(static_cast<int>(i.o[1].index), out);
}

// ---- division: v_div_scale, v_div_fmas and v_div_fixup

int exponent_of(u32 x) { return static_cast<int>(x >> 23 & 255); }
bool denormal(float x) { return x != 0.0f && std::fabs(x) < 0x1p-126f; }
void div_scale(Machine& m, const Inst& i) {  // o: result, vcc, value, denominator, numerator
  u64 flags = 0;
  u32 result[64];
  for (int l = 0; l < m.lanes; ++l) {
    if (!m.active(l)) continue;
    const float a = as_float(source(m, i, 2, l)), below = as_float(source(m, i, 3, l)), above = as_float(source(m, i, 4, l));
    float d = a;
    bool flag = false;
    if (above == 0.0f || below == 0.0f) d = NAN;
    else if (exponent_of(as_bits(above)) - exponent_of(as_bits(below)) >= 96) {
      flag = true;
      if (a == below) d = std::ldexp(a, 64);
    } else if (denormal(below)) d = std::ldexp(a, 64);
    else if (denormal(1.0f / below) && denormal(above / below)) {
      flag = true;
      if (a == below) d = std::ldexp(a, 64);
    } else if (denormal(1.0f / below)) d = std::ldexp(a, -64);
    else if (denormal(above / below)) {
      flag = true;
      if (a == above) d = std::ldexp(a, 64);
    } else if (exponent_of(as_bits(above)) <= 23) d = std::ldexp(a, 64);
    result[l] = as_bits(d);
    flags |= static_cast<u64>(flag) << l;
  }
  for (int l = 0; l < m.lanes; ++l)
    if (m.active(l)) m.w.v[i.o[0].index][l] = result[l];
  if (i.o[1].kind == kScalar) m.set_mask(static_cast<int>(i.o[1].index), flags);
}
void div_fmas(Machine& m, const Inst& i) {
  const u64 flags = m.mask_at(kVcc);
  each_lane(m, i, [&](int l) {
    const float c = as_float(source(m, i, 3, l)), x = std::fma(as_float(source(m, i, 1, l)), as_float(source(m, i, 2, l)), c);
    return as_bits(flags >> l & 1 ? std::ldexp(x, exponent_of(as_bits(c)) > 127 ? 64 : -64) : x);
  });
}
void div_fixup(Machine& m, const Inst& i) {  // quotient, denominator, numerator
  each_lane(m, i, [&](int l) {
    const float q = as_float(source(m, i, 1, l)), below = as_float(source(m, i, 2, l)), above = as_float(source(m, i, 3, l));
    const float sign = std::signbit(below) != std::signbit(above) ? -1.0f : 1.0f;
    if (std::isnan(above) || std::isnan(below)) return as_bits(above + below);
    if ((above == 0.0f && below == 0.0f) || (std::isinf(above) && std::isinf(below))) return as_bits(NAN);
    if (below == 0.0f || std::isinf(above)) return as_bits(std::copysign(INFINITY, sign));
    if (std::isinf(below) || above == 0.0f) return as_bits(std::copysign(0.0f, sign));
    return as_bits(std::copysign(q, sign));
  });
}

// ---- mixed and packed

float mixed(Machine& m, const Inst& i, int n, int lane) {  // op_sel_hi: this operand is 16 bits; op_sel: its upper half
  const Operand& o = i.o[n];
  u32 x = raw(m, o, lane);
  float y = as_float(x);
  if (i.op_sel_hi >> (n - 1) & 1) y = half_to_float(static_cast<u16>(i.op_sel >> (n - 1) & 1 ? x >> 16 : x));
  if (o.absolute || i.neg_hi >> (n - 1) & 1) y = std::fabs(y);
  return o.negate || i.neg_lo >> (n - 1) & 1 ? -y : y;
}
float mix(Machine& m, const Inst& i, int l) { return std::fma(mixed(m, i, 1, l), mixed(m, i, 2, l), mixed(m, i, 3, l)); }
void fma_mix(Machine& m, const Inst& i) { each_lane(m, i, [&](int l) { return as_bits(mix(m, i, l)); }); }
void fma_mixlo(Machine& m, const Inst& i) {
  each_lane(m, i, [&](int l) -> u32 { return (m.w.v[i.o[0].index][l] & 0xffff0000u) | float_to_half(mix(m, i, l)); });
}
void fma_mixhi(Machine& m, const Inst& i) {
  each_lane(m, i, [&](int l) -> u32 { return (m.w.v[i.o[0].index][l] & 0xffff) | static_cast<u32>(float_to_half(mix(m, i, l))) << 16; });
}

// Part 0 or 1 of a packed operand: which of its two halves op_sel and op_sel_hi say.
float packed_float(Machine& m, const Inst& i, int n, int lane, int part) {
  const Operand& o = i.o[n];
  const bool high = (part ? i.op_sel_hi : i.op_sel) >> (n - 1) & 1, minus = (part ? i.neg_hi : i.neg_lo) >> (n - 1) & 1;
  const float x = as_float(o.kind == kLiteral ? static_cast<u32>(o.value) : raw(m, o, lane, high));
  return minus != (o.negate != 0) ? -x : x;
}
template <auto kF>
void packed2(Machine& m, const Inst& i) {
  each_lane64(m, i, [&](int l) {
    u64 x = 0;
    for (int part = 0; part < 2; ++part) x |= static_cast<u64>(as_bits(kF(packed_float(m, i, 1, l, part), packed_float(m, i, 2, l, part)))) << 32 * part;
    return x;
  });
}
void packed_fma(Machine& m, const Inst& i) {
  each_lane64(m, i, [&](int l) {
    u64 x = 0;
    for (int part = 0; part < 2; ++part)
      x |= static_cast<u64>(as_bits(std::fma(packed_float(m, i, 1, l, part), packed_float(m, i, 2, l, part), packed_float(m, i, 3, l, part)))) << 32 * part;
    return x;
  });
}
void packed_mov(Machine& m, const Inst& i) {  // op_sel: the half that each result takes
  each_lane64(m, i, [&](int l) {
    auto half = [&](int n) { return i.o[n].kind == kLiteral ? static_cast<u32>(i.o[n].value) : raw(m, i.o[n], l, i.op_sel >> (n - 1) & 1); };
    return half(1) | static_cast<u64>(half(2)) << 32;
  });
}
u16 packed_half(Machine& m, const Inst& i, int n, int lane, int part) {
  const Operand& o = i.o[n];
  const bool high = (part ? i.op_sel_hi : i.op_sel) >> (n - 1) & 1, minus = (part ? i.neg_hi : i.neg_lo) >> (n - 1) & 1;
  const u16 x = static_cast<u16>(o.kind == kLiteral ? (o.value > 0xffff && high ? o.value >> 16 : o.value) : raw(m, o, lane) >> (high ? 16 : 0));
  return minus ? x ^ 0x8000 : x;
}
template <auto kF>
void packed_half2(Machine& m, const Inst& i) {
  each_lane(m, i, [&](int l) -> u32 {
    u32 x = 0;
    for (int part = 0; part < 2; ++part)
      x |= static_cast<u32>(float_to_half(kF(half_to_float(packed_half(m, i, 1, l, part)), half_to_float(packed_half(m, i, 2, l, part))))) << 16 * part;
    return x;
  });
}
template <auto kF>
void packed_int2(Machine& m, const Inst& i) {
  each_lane(m, i, [&](int l) -> u32 {
    u32 x = 0;
    for (int part = 0; part < 2; ++part) x |= static_cast<u32>(static_cast<u16>(kF(packed_half(m, i, 1, l, part), packed_half(m, i, 2, l, part)))) << 16 * part;
    return x;
  });
}

u32 permute_bytes(u32 high, u32 low, u32 sel) {
  const u64 all = static_cast<u64>(high) << 32 | low;
  u32 to = 0;
  for (int b = 0; b < 4; ++b) {
    const u32 s = sel >> 8 * b & 255;
    u32 x = 0;
    if (s < 8) x = static_cast<u32>(all >> 8 * s & 255);
    else if (s >= 13) x = 255;
    else if (s < 12) x = all >> (16 * (s - 8) + 15) & 1 ? 255 : 0;
    to |= x << 8 * b;
  }
  return to;
}

u32 float_to_u32(float x) { return std::isnan(x) || x <= 0.0f ? 0 : x >= 4294967296.0f ? 0xffffffffu : static_cast<u32>(x); }
u32 float_to_i32(float x) {
  return static_cast<u32>(std::isnan(x) ? 0 : x <= -2147483648.0f ? INT32_MIN : x >= 2147483648.0f ? INT32_MAX : static_cast<i32>(x));
}
float minimum(float a, float b) { return std::fmin(a, b); }
float maximum(float a, float b) { return std::fmax(a, b); }

// ---- conversions of 8-bit floats; fnuz on gfx9 before gfx950 (program.py names those _fnuz)

template <int kMantissa, bool kFnuz, bool kPacked>
void from_fp8(Machine& m, const Inst& i) {
  const Operand& o = i.o[1];
  auto word = [&](int l) { return raw(m, o, l); };
  if (!kPacked) {
    // SDWA's byte, or op_sel[1:0] as a byte number
    each_lane(m, i, [&](int l) {
      const i64 byte = o.sel < 4 ? o.sel : (i.op_sel & 1) * 2 + (i.op_sel >> 1 & 1);
      return as_bits(fp8_value(static_cast<u8>(word(l) >> 8 * byte), kMantissa, kFnuz));
    });
    return;
  }
  const int shift = o.sel == 5 || i.op_sel & 1 ? 16 : 0;
  each_lane64(m, i, [&](int l) {
    return as_bits(fp8_value(static_cast<u8>(word(l) >> shift), kMantissa, kFnuz)) |
           static_cast<u64>(as_bits(fp8_value(static_cast<u8>(word(l) >> (shift + 8)), kMantissa, kFnuz))) << 32;
  });
}

// ---- matrices

// Where MFMA keeps things: lane l has row or column l % rows of A and B and k = each * (l / rows) .. + each; D's register r
// is row 8 (r / 4) + 4 (l / 32) + r % 4 for 32 rows, 4 (l / 16) + r for 16, in column l % rows.
template <class F>
void mfma(Machine& m, const Inst& i, int rows, int depth, int bits, F value) {
  const int groups = 64 / rows, each = depth / groups, out = rows * rows / 64;
  float a[32][32], b[32][32];
  for (int l = 0; l < 64; ++l)
    for (int j = 0; j < each; ++j) {
      const int word = j * bits / 32, shift = j * bits % 32, k = each * (l / rows) + j;
      a[l % rows][k] = value(raw(m, i.o[1], l, word) >> shift);
      b[l % rows][k] = value(raw(m, i.o[2], l, word) >> shift);
    }
  float d[16][64];
  for (int l = 0; l < 64; ++l)
    for (int r = 0; r < out; ++r) {
      const int row = rows == 32 ? 8 * (r / 4) + 4 * (l / 32) + r % 4 : 4 * (l / 16) + r;
      float sum = as_float(i.o[3].kind == kLiteral ? static_cast<u32>(i.o[3].value) : raw(m, i.o[3], l, r));
      for (int k = 0; k < depth; ++k) sum += a[row][k] * b[l % rows][k];
      d[r][l] = sum;
    }
  for (int r = 0; r < out; ++r)
    for (int l = 0; l < 64; ++l) m.w.v[i.o[0].index + r][l] = as_bits(d[r][l]);
}
template <int kRows, int kDepth>
void mfma_f16(Machine& m, const Inst& i) { mfma(m, i, kRows, kDepth, 16, [](u32 x) { return half_to_float(static_cast<u16>(x)); }); }
template <int kRows, int kDepth>
void mfma_bf16(Machine& m, const Inst& i) { mfma(m, i, kRows, kDepth, 16, [](u32 x) { return bf16_to_float(static_cast<u16>(x)); }); }

// WMMA in waves of 32. gfx11: lanes l and l + 16 hold the same row (column), k in order; D's register r is row 2r + l / 16.
// gfx12: k = (element & 3) + 4 (l / 16) + 8 (element / 4); D's register r is row 8 (l / 16) + r.
template <class F>
void wmma(Machine& m, const Inst& i, F value) {
  const bool old = m.launch.target->generation == 11;
  float a[16][16], b[16][16];
  for (int l = 0; l < 32; ++l)
    for (int e = 0; e < (old ? 16 : 8); ++e) {
      const int k = old ? e : (e & 3) + 4 * (l / 16) + 8 * (e / 4);
      const float x = value(raw(m, i.o[1], l, e / 2) >> 16 * (e % 2)), y = value(raw(m, i.o[2], l, e / 2) >> 16 * (e % 2));
      if (old && l >= 16 && (as_bits(a[l % 16][k]) != as_bits(x) || as_bits(b[l % 16][k]) != as_bits(y)))
        fail("the halves of a wave hold different operands of WMMA");
      a[l % 16][k] = x;
      b[l % 16][k] = y;
    }
  if (m.exec() != 0xffffffffull) fail("WMMA with lanes switched off");
  float d[8][32];
  for (int l = 0; l < 32; ++l)
    for (int r = 0; r < 8; ++r) {
      const int row = old ? 2 * r + l / 16 : 8 * (l / 16) + r;
      float sum = as_float(i.o[3].kind == kLiteral ? static_cast<u32>(i.o[3].value) : raw(m, i.o[3], l, r));
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[l % 16][k];
      d[r][l] = sum;
    }
  for (int r = 0; r < 8; ++r)
    for (int l = 0; l < 32; ++l) m.w.v[i.o[0].index + r][l] = as_bits(d[r][l]);
}

// ---- moves between lanes

void readlane(Machine& m, const Inst& i, int lane) { m.w.s[i.o[0].index] = raw(m, i.o[1], lane); }
void readfirstlane(Machine& m, const Inst& i) { readlane(m, i, m.exec() ? std::countr_zero(m.exec()) : 0); }
void permlane16(Machine& m, const Inst& i, int other_row) {
  if (i.op_sel & 1) fail("permlane16 that fetches from inactive lanes");
  const u64 sel = raw(m, i.o[2], 0) | static_cast<u64>(raw(m, i.o[3], 0)) << 32;
  each_lane(m, i, [&](int l) {
    const int from = ((l & ~15) ^ other_row) + static_cast<int>(sel >> 4 * (l & 15) & 15);
    if (!m.active(from)) return i.op_sel & 2 ? 0u : m.w.v[i.o[0].index][l];
    return raw(m, i.o[1], from);
  });
}
void permlane_swap(Machine& m, const Inst& i, int width) {  // rows 1 and 3 of the first (or its upper half) for 0 and 2 of the second
  for (int l = 0; l < 64; ++l)
    if (l & width) std::swap(m.w.v[i.o[0].index][l], m.w.v[i.o[1].index][l ^ width]);
}
void mbcnt(Machine& m, const Inst& i, int first) {
  each_lane(m, i, [&](int l) -> u32 {
    const int n = std::clamp(l - first, 0, 32);
    const u32 below = n == 32 ? 0xffffffffu : (1u << n) - 1;
    return std::popcount(source(m, i, 1, l) & below) + source(m, i, 2, l);
  });
}

// ---- LDS

void lds_load(Machine& m, const Inst& i, int words, int scale0 = 0, int scale1 = 0) {  // words a lane and address; scale: of two addresses
  const int parts = scale0 ? 2 : 1;
  std::vector<std::array<u32, 64>> got(parts * words);
  std::vector<std::pair<int, u64>> at;
  for (int part = 0; part < parts; ++part) {
    at.clear();
    for (int l = 0; l < m.lanes; ++l) {
      if (!m.active(l)) continue;
      const u64 base = raw(m, i.o[1], l) + (scale0 ? (part ? i.offset1 * scale1 : i.offset * scale0) : i.offset);
      at.push_back({l, base});
      for (int n = 0; n < words; ++n) got[part * words + n][l] = m.shared_load<u32>(base + 4 * n);
    }
    m.count_banks(at, 4 * words);
  }
  for (int n = 0; n < parts * words; ++n) {
    u32 values[64];
    std::copy(got[n].begin(), got[n].end(), values);
    m.later(kShared, static_cast<int>(i.o[0].index) + n, values);
  }
}
void lds_store(Machine& m, const Inst& i, int words, int scale0 = 0, int scale1 = 0) {
  std::vector<std::pair<int, u64>> at;
  for (int part = 0; part < (scale0 ? 2 : 1); ++part) {
    at.clear();
    for (int l = 0; l < m.lanes; ++l) {
      if (!m.active(l)) continue;
      const u64 base = raw(m, i.o[0], l) + (scale0 ? (part ? i.offset1 * scale1 : i.offset * scale0) : i.offset);
      at.push_back({l, base});
      for (int n = 0; n < words; ++n) m.shared_store<u32>(base + 4 * n, raw(m, i.o[1 + part], l, n));
    }
    m.count_banks(at, 4 * words);
  }
  m.nothing_later(kShared);
}
template <class T>
void lds_store_part(Machine& m, const Inst& i, int shift) {
  std::vector<std::pair<int, u64>> at;
  for (int l = 0; l < m.lanes; ++l) {
    if (!m.active(l)) continue;
    at.push_back({l, raw(m, i.o[0], l) + i.offset});
    m.shared_store<T>(at.back().second, static_cast<T>(raw(m, i.o[1], l) >> shift));
  }
  m.count_banks(at, sizeof(T));
  m.nothing_later(kShared);
}
// A part of a register: T into the low bits (extended), or 16 bits into one half, keeping the other.
template <class T>
void lds_load_part(Machine& m, const Inst& i, int half) {
  u32 values[64];
  std::vector<std::pair<int, u64>> at;
  for (int l = 0; l < m.lanes; ++l) {
    if (!m.active(l)) continue;
    at.push_back({l, raw(m, i.o[1], l) + i.offset});
    const u32 x = static_cast<u32>(static_cast<i32>(m.shared_load<T>(at.back().second))), old = m.w.v[i.o[0].index][l];
    values[l] = half < 0 ? x : half ? (old & 0xffff) | x << 16 : (old & 0xffff0000u) | (x & 0xffff);
  }
  m.count_banks(at, sizeof(T));
  m.later(kShared, static_cast<int>(i.o[0].index), values);
}
void bpermute(Machine& m, const Inst& i) {
  u32 values[64];
  for (int l = 0; l < m.lanes; ++l) {
    const int from = static_cast<int>((raw(m, i.o[1], l) + i.offset) / 4 % m.lanes);
    values[l] = m.active(from) ? raw(m, i.o[2], from) : 0;
  }
  m.later(kShared, static_cast<int>(i.o[0].index), values);
}
void swizzle(Machine& m, const Inst& i) {
  if (i.offset & 0x8000) fail("a swizzle of quads");
  const int all = i.offset & 31, set = i.offset >> 5 & 31, flip = i.offset >> 10 & 31;
  u32 values[64];
  for (int l = 0; l < m.lanes; ++l) {
    const int from = (l & 32) | (((l & 31 & all) | set) ^ flip);
    values[l] = m.active(from) ? raw(m, i.o[1], from) : 0;
  }
  m.later(kShared, static_cast<int>(i.o[0].index), values);
}
// ds_read_b64_tr_b16 of gfx950: the 16 lanes of a row give 16 addresses of 8 bytes, a 16 x 4 (or 4 x 16) tile of 16-bit
// elements; lane n receives column n.
void lds_load_transposed(Machine& m, const Inst& i) {
  std::vector<std::pair<int, u64>> at;
  u32 values[2][64];
  for (int l = 0; l < m.lanes; ++l) at.push_back({l, raw(m, i.o[1], l) + i.offset});
  for (int l = 0; l < m.lanes; ++l) {
    u16 e[4];
    for (int j = 0; j < 4; ++j) e[j] = m.shared_load<u16>(at[(l & ~15) + 4 * j + l % 16 / 4].second + 2 * (l % 4));
    values[0][l] = e[0] | static_cast<u32>(e[1]) << 16;
    values[1][l] = e[2] | static_cast<u32>(e[3]) << 16;
  }
  m.count_banks(at, 8);
  for (int n = 0; n < 2; ++n) m.later(kShared, static_cast<int>(i.o[0].index) + n, values[n]);
}

// ---- global memory: o is data, address, base (loads) or address, data, base (stores)

u64 address(Machine& m, const Inst& i, const Operand& at, const Operand& base, int lane) {
  u64 x = raw(m, at, lane);
  if (base.kind == kNone) x |= static_cast<u64>(raw(m, at, lane, 1)) << 32;
  else x += raw(m, base, 0, 0) | static_cast<u64>(raw(m, base, 0, 1)) << 32;
  return x + static_cast<u64>(i.offset);
}
template <class T>
void global_load(Machine& m, const Inst& i, int words, int half = -1) {
  std::vector<std::array<u32, 64>> got(words);
  for (int l = 0; l < m.lanes; ++l) {
    if (!m.active(l)) continue;
    const u64 at = address(m, i, i.o[1], i.o[2], l);
    if (sizeof(T) == 4 && at % 4) fail("a load of words at " + std::to_string(at % 4) + " past a word");
    for (int n = 0; n < words; ++n) {
      const u32 x = static_cast<u32>(static_cast<i32>(m.load<T>(at + 4 * n))), old = m.w.v[i.o[0].index + n][l];
      got[n][l] = half < 0 ? x : half ? (old & 0xffff) | x << 16 : (old & 0xffff0000u) | (x & 0xffff);
    }
    m.launch.stats->load_bytes += words * static_cast<i64>(sizeof(T));
    m.launch.stats->wide_loads += words == 4;
  }
  for (int n = 0; n < words; ++n) {
    u32 values[64];
    std::copy(got[n].begin(), got[n].end(), values);
    m.later(kLoads, static_cast<int>(i.o[0].index) + n, values);
  }
}
// At any address: amdhsa runs in unaligned access mode (LLVM's AMDGPU guide), and compilers make one store of elements side by side. Loads
// that are not aligned would be ours.
template <class T>
void global_store(Machine& m, const Inst& i, int words, int shift = 0) {
  for (int l = 0; l < m.lanes; ++l) {
    if (!m.active(l)) continue;
    const u64 at = address(m, i, i.o[0], i.o[2], l);
    for (int n = 0; n < words; ++n) m.store<T>(at + 4 * n, static_cast<T>(raw(m, i.o[1], l, n) >> shift));
    m.launch.stats->store_bytes += words * static_cast<i64>(sizeof(T));
  }
  m.nothing_later(m.launch.target->split ? kStores : kLoads);
}
void global_atomic_add(Machine& m, const Inst& i) {
  const int first = i.flags & kReturns ? 1 : 0;
  u32 values[64];
  for (int l = 0; l < m.lanes; ++l) {
    if (!m.active(l)) continue;
    const u64 at = address(m, i, i.o[first], i.o[first + 2], l);
    values[l] = m.load<u32>(at);
    m.store<u32>(at, values[l] + raw(m, i.o[first + 1], l));
  }
  if (first) m.later(kLoads, static_cast<int>(i.o[0].index), values);
  else m.nothing_later(m.launch.target->split ? kStores : kLoads);
}

// ---- scalars

u32 s1(Machine& m, const Inst& i, int n = 1) { return raw(m, i.o[n], 0); }
u64 s2(Machine& m, const Inst& i, int n = 1) { return source64(m, i, n, 0); }
void set(Machine& m, const Inst& i, u32 x) {
  if (i.o[0].kind == kScalar) m.w.s[i.o[0].index] = x;
}
void set64(Machine& m, const Inst& i, u64 x) {
  if (i.o[0].kind != kScalar) return;
  m.w.s[i.o[0].index] = static_cast<u32>(x);
  m.w.s[i.o[0].index + 1] = static_cast<u32>(x >> 32);
}
template <auto kF, bool kScc>
void scalar2(Machine& m, const Inst& i) {
  const u32 x = kF(s1(m, i, 1), s1(m, i, 2));
  set(m, i, x);
  if (kScc) m.w.scc = x != 0;
}
template <auto kF, bool kScc>
void scalar64(Machine& m, const Inst& i) {
  const u64 x = kF(s2(m, i, 1), s2(m, i, 2));
  set64(m, i, x);
  if (kScc) m.w.scc = x != 0;
}
void scalar_add(Machine& m, const Inst& i, bool with_carry) {
  const u64 x = static_cast<u64>(s1(m, i, 1)) + s1(m, i, 2) + (with_carry && m.w.scc);
  set(m, i, static_cast<u32>(x));
  m.w.scc = x >> 32 & 1;
}
void scalar_sub(Machine& m, const Inst& i, bool with_carry) {
  const u64 x = static_cast<u64>(s1(m, i, 1)) - s1(m, i, 2) - (with_carry && m.w.scc);
  set(m, i, static_cast<u32>(x));
  m.w.scc = x >> 32 & 1;
}
void scalar_add_signed(Machine& m, const Inst& i, bool minus) {
  const i64 a = static_cast<i32>(s1(m, i, 1)), b = static_cast<i32>(s1(m, i, 2)), x = minus ? a - b : a + b;
  set(m, i, static_cast<u32>(x));
  m.w.scc = x != static_cast<i32>(x);
}
template <class T, auto kF>
void scalar_extreme(Machine& m, const Inst& i) {
  const T a = static_cast<T>(s1(m, i, 1)), b = static_cast<T>(s1(m, i, 2));
  m.w.scc = kF(a, b);
  set(m, i, static_cast<u32>(m.w.scc ? a : b));
}
// exec is saved and combined: the wave's own width.
template <auto kF>
void saveexec(Machine& m, const Inst& i) {
  const u64 s = m.lanes == 64 ? s2(m, i) : s1(m, i), before = m.exec();
  u64 x = kF(s, before);
  if (m.lanes == 32) x &= 0xffffffffu;
  if (i.o[0].kind == kScalar) m.set_mask(static_cast<int>(i.o[0].index), before);
  m.set_mask(kExec, x);
  m.w.scc = x != 0;
}
void scalar_load(Machine& m, const Inst& i, int words) {
  u64 at = s2(m, i, 1) + static_cast<u64>(i.offset);
  if (i.o[2].kind == kScalar) at += s1(m, i, 2);
  else if (i.o[2].kind == kLiteral) at += static_cast<u64>(i.o[2].value);
  at &= ~3ull;
  for (int n = 0; n < words; ++n) m.later_scalar(static_cast<int>(i.o[0].index) + n, m.load<u32>(at + 4 * n));
}
void jump(Machine& m, const Inst& i) { m.w.pc = i.next + 4 * static_cast<i64>(static_cast<std::int16_t>(i.o[0].value)); }
void jump_if(Machine& m, const Inst& i, bool b) {
  if (b) jump(m, i);
}
void nothing(Machine&, const Inst&) {}

std::map<std::string, Handler> make() {
  std::map<std::string, Handler> h;
  auto names = [&](std::initializer_list<const char*> all, Handler f) {
    for (const char* n : all) h[n] = f;
  };
#define OP(name, ...) h[name] = [](Machine & m, const Inst& i) { (void)m, (void)i; __VA_ARGS__; }
#define V1(name, expr) { constexpr auto f = [](u32 a) -> u32 { return expr; }; h[name] = vector1<f>; }
#define V2(name, expr) { constexpr auto f = [](u32 a, u32 b) -> u32 { return expr; }; h[name] = vector2<f>; }
#define V3(name, expr) { constexpr auto f = [](u32 a, u32 b, u32 c) -> u32 { return expr; }; h[name] = vector3<f>; }
#define F1(name, expr) { constexpr auto f = [](float a) -> float { return expr; }; h[name] = float1<f>; }
#define F2(name, expr) { constexpr auto f = [](float a, float b) -> float { return expr; }; h[name] = float2<f>; }
#define F3(name, expr) { constexpr auto f = [](float a, float b, float c) -> float { return expr; }; h[name] = float3<f>; }
#define S2(name, scc, expr) { constexpr auto f = [](u32 a, u32 b) -> u32 { return expr; }; h[name] = scalar2<f, scc>; }
#define S264(name, scc, expr) { constexpr auto f = [](u64 a, u64 b) -> u64 { return expr; }; h[name] = scalar64<f, scc>; }

  V1("v_mov_b32", a)
  V1("v_not_b32", ~a)
  V1("v_bfrev_b32", [&] { u32 r = 0; for (int n = 0; n < 32; ++n) r |= (a >> n & 1) << (31 - n); return r; }())
  V1("v_ffbh_u32", a ? static_cast<u32>(std::countl_zero(a)) : ~0u)
  OP("v_mov_b64", each_lane64(m, i, [&](int l) { return source64(m, i, 1, l); }));
  names({"v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"}, h["v_mov_b32"]);
  OP("v_add_nc_u32", each_lane(m, i, [&](int l) -> u32 {
       const u64 sum = static_cast<u64>(source(m, i, 1, l)) + source(m, i, 2, l);
       return static_cast<u32>(i.clamp ? std::min<u64>(sum, 0xffffffff) : sum);
     }));
  OP("v_sub_nc_u32", each_lane(m, i, [&](int l) { return difference(source(m, i, 1, l), source(m, i, 2, l), i.clamp); }));
  OP("v_subrev_nc_u32", each_lane(m, i, [&](int l) { return difference(source(m, i, 2, l), source(m, i, 1, l), i.clamp); }));
  V2("v_and_b32", a & b)
  V2("v_or_b32", a | b)
  V2("v_xor_b32", a ^ b)
  V2("v_xnor_b32", ~(a ^ b))
  V2("v_lshlrev_b32", b << (a & 31))
  V2("v_lshrrev_b32", b >> (a & 31))
  V2("v_ashrrev_i32", static_cast<u32>(static_cast<i32>(b) >> (a & 31)))
  V2("v_min_u32", std::min(a, b))
  V2("v_max_u32", std::max(a, b))
  V2("v_min_i32", static_cast<u32>(std::min<i32>(a, b)))
  V2("v_max_i32", static_cast<u32>(std::max<i32>(a, b)))
  V2("v_mul_lo_u32", a * b)
  V2("v_mul_hi_u32", static_cast<u32>(static_cast<u64>(a) * b >> 32))
  V2("v_mul_hi_i32", static_cast<u32>(static_cast<i64>(static_cast<i32>(a)) * static_cast<i32>(b) >> 32))
  V2("v_mul_u32_u24", (a & 0xffffff) * (b & 0xffffff))
  V2("v_mul_i32_i24", static_cast<u32>((static_cast<i32>(a << 8) >> 8) * (static_cast<i32>(b << 8) >> 8)))
  V3("v_add3_u32", a + b + c)
  V3("v_lshl_add_u32", (a << (b & 31)) + c)
  V3("v_add_lshl_u32", (a + b) << (c & 31))
  V3("v_lshl_or_b32", (a << (b & 31)) | c)
  V3("v_and_or_b32", (a & b) | c)
  V3("v_or3_b32", a | b | c)
  V3("v_xad_u32", (a ^ b) + c)
  V3("v_mad_i32_i24", static_cast<u32>((static_cast<i32>(a << 8) >> 8) * (static_cast<i32>(b << 8) >> 8)) + c)
  V3("v_mad_u32_u24", (a & 0xffffff) * (b & 0xffffff) + c)
  V3("v_bfi_b32", (a & b) | (~a & c))
  V3("v_bfe_u32", (c & 31) ? a >> (b & 31) & ((1u << (c & 31)) - 1) : 0)
  V3("v_bfe_i32", (c & 31) ? static_cast<u32>(static_cast<i32>(a >> (b & 31) << (32 - (c & 31))) >> (32 - (c & 31))) : 0)
  V3("v_alignbit_b32", static_cast<u32>((static_cast<u64>(a) << 32 | b) >> (c & 31)))
  V3("v_alignbyte_b32", static_cast<u32>((static_cast<u64>(a) << 32 | b) >> 8 * (c & 3)))
  V3("v_perm_b32", permute_bytes(a, b, c))
  V3("v_min3_u32", std::min({a, b, c}))
  V3("v_max3_i32", static_cast<u32>(std::max({static_cast<i32>(a), static_cast<i32>(b), static_cast<i32>(c)})))
  V3("v_min3_i32", static_cast<u32>(std::min({static_cast<i32>(a), static_cast<i32>(b), static_cast<i32>(c)})))
  V3("v_med3_i32", static_cast<u32>(std::max(std::min<i32>(a, b), std::min(std::max<i32>(a, b), static_cast<i32>(c)))))
  V3("v_maxmin_i32", static_cast<u32>(std::min(std::max(static_cast<i32>(a), static_cast<i32>(b)), static_cast<i32>(c))))
  V3("v_minmax_i32", static_cast<u32>(std::max(std::min(static_cast<i32>(a), static_cast<i32>(b)), static_cast<i32>(c))))
  V3("v_maxmin_u32", std::min(std::max(a, b), c))
  V3("v_minmax_u32", std::max(std::min(a, b), c))
  V3("v_med3_u32", std::max(std::min(a, b), std::min(std::max(a, b), c)))
  OP("v_lshlrev_b64", each_lane64(m, i, [&](int l) { return source64(m, i, 2, l) << (source(m, i, 1, l) & 63); }));
  OP("v_lshrrev_b64", each_lane64(m, i, [&](int l) { return source64(m, i, 2, l) >> (source(m, i, 1, l) & 63); }));
  OP("v_ashrrev_i64", each_lane64(m, i, [&](int l) { return static_cast<u64>(static_cast<i64>(source64(m, i, 2, l)) >> (source(m, i, 1, l) & 63)); }));
  OP("v_lshl_add_u64", each_lane64(m, i, [&](int l) { return (source64(m, i, 1, l) << (source(m, i, 2, l) & 7)) + source64(m, i, 3, l); }));

  F2("v_add_f32", a + b)
  F2("v_sub_f32", a - b)
  F2("v_subrev_f32", b - a)
  F2("v_mul_f32", a * b)
  F2("v_max_f32", maximum(a, b))
  F2("v_min_f32", minimum(a, b))
  F3("v_fma_f32", std::fma(a, b, c))
  F3("v_fmamk_f32", std::fma(a, b, c))
  F3("v_fmaak_f32", std::fma(a, b, c))
  F3("v_mad_f32", a * b + c)
  F3("v_madmk_f32", a * b + c)
  F3("v_madak_f32", a * b + c)
  { constexpr auto f = [](float a, float b, float c) -> float { return a * b + c; }; h["v_mac_f32"] = fused<f>; }
  F3("v_max3_f32", maximum(maximum(a, b), c))
  F3("v_maxmin_f32", minimum(maximum(a, b), c))
  F3("v_minmax_f32", maximum(minimum(a, b), c))
  F3("v_med3_f32", maximum(minimum(a, b), minimum(maximum(a, b), c)))
  { constexpr auto f = [](float a, float b, float c) -> float { return std::fma(a, b, c); }; h["v_fmac_f32"] = fused<f>; }
  F1("v_exp_f32", std::exp2(a))
  F1("v_log_f32", std::log2(a))
  F1("v_rcp_f32", 1.0f / a)
  F1("v_rcp_iflag_f32", 1.0f / a)
  F1("v_trunc_f32", std::trunc(a))
  F1("v_floor_f32", std::floor(a))
  F1("v_rndne_f32", std::nearbyint(a))
  V1("v_cvt_f32_i32", as_bits(static_cast<float>(static_cast<i32>(a))))
  V1("v_cvt_f32_u32", as_bits(static_cast<float>(a)))
  V1("v_cvt_u32_f32", float_to_u32(as_float(a)))
  V1("v_cvt_i32_f32", float_to_i32(as_float(a)))
  OP("v_ldexp_f32", each_lane(m, i, [&](int l) { return as_bits(std::ldexp(as_float(source(m, i, 1, l)), static_cast<i32>(source(m, i, 2, l)))); }));
  OP("v_cvt_f16_f32", each_half(m, i, [&](int l) -> u32 { return float_to_half(as_float(source(m, i, 1, l))); }));
  OP("v_cvt_f32_f16", each_lane(m, i, [&](int l) { return as_bits(half_to_float(static_cast<u16>(half_source(m, i, 1, l)))); }));
  OP("v_cvt_pkrtz_f16_f32", each_lane(m, i, [&](int l) -> u32 {
       return float_to_half_towards_zero(as_float(source(m, i, 1, l))) | static_cast<u32>(float_to_half_towards_zero(as_float(source(m, i, 2, l)))) << 16;
     }));
  OP("v_cvt_pk_bf16_f32", each_lane(m, i, [&](int l) -> u32 {
       return float_to_bf16(as_float(source(m, i, 1, l))) | static_cast<u32>(float_to_bf16(as_float(source(m, i, 2, l)))) << 16;
     }));
  OP("v_cvt_pk_f16_f32", each_lane(m, i, [&](int l) -> u32 {
       return float_to_half(as_float(source(m, i, 1, l))) | static_cast<u32>(float_to_half(as_float(source(m, i, 2, l)))) << 16;
     }));
  OP("v_bitop3_b32", each_lane(m, i, [&](int l) { return bitop3(i, source(m, i, 1, l), source(m, i, 2, l), source(m, i, 3, l)); }));
  OP("v_bitop3_b16", each_half(m, i, [&](int l) { return bitop3(i, half_source(m, i, 1, l), half_source(m, i, 2, l), half_source(m, i, 3, l)); }));
  OP("v_pack_b32_f16", each_lane(m, i, [&](int l) -> u32 { return half_source(m, i, 1, l) | half_source(m, i, 2, l) << 16; }));
  { constexpr auto f = [](float a, float b) -> float { return a + b; }; h["v_add_f16"] = half2<f>; }
  { constexpr auto f = [](float a, float b) -> float { return a - b; }; h["v_sub_f16"] = half2<f>; }
  { constexpr auto f = [](float a, float b) -> float { return a * b; }; h["v_mul_f16"] = half2<f>; }
  { constexpr auto f = [](float a, float b) -> float { return maximum(a, b); }; h["v_max_f16"] = half2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return b << (a & 15); }; h["v_lshlrev_b16"] = half_int2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return b >> (a & 15); }; h["v_lshrrev_b16"] = half_int2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return a + b; }; h["v_add_nc_u16"] = half_int2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return a - b; }; h["v_sub_nc_u16"] = half_int2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return a * b; }; h["v_mul_lo_u16"] = half_int2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return a & b; }; h["v_and_b16"] = half_int2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return a | b; }; h["v_or_b16"] = half_int2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return std::max(a, b); }; h["v_max_u16"] = half_int2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return std::min(a, b); }; h["v_min_u16"] = half_int2<f>; }
  { constexpr auto f = [](float a, float b) -> float { return a * b; }; h["v_pk_mul_f16"] = packed_half2<f>; }
  { constexpr auto f = [](float a, float b) -> float { return a + b; }; h["v_pk_add_f16"] = packed_half2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return b << (a & 15); }; h["v_pk_lshlrev_b16"] = packed_int2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return b >> (a & 15); }; h["v_pk_lshrrev_b16"] = packed_int2<f>; }
  { constexpr auto f = [](u32 a, u32 b) -> u32 { return a + b; }; h["v_pk_add_u16"] = packed_int2<f>; }
  { constexpr auto f = [](float a, float b) -> float { return a + b; }; h["v_pk_add_f32"] = packed2<f>; }
  { constexpr auto f = [](float a, float b) -> float { return a * b; }; h["v_pk_mul_f32"] = packed2<f>; }
  h["v_pk_fma_f32"] = packed_fma;
  h["v_pk_mov_b32"] = packed_mov;
  h["v_fma_mix_f32"] = fma_mix;
  h["v_fma_mixlo_f16"] = fma_mixlo;
  h["v_fma_mixhi_f16"] = fma_mixhi;
  h["v_div_scale_f32"] = div_scale;
  h["v_div_fmas_f32"] = div_fmas;
  h["v_div_fixup_f32"] = div_fixup;
  h["v_cvt_f32_fp8"] = from_fp8<3, false, false>;
  h["v_cvt_f32_bf8"] = from_fp8<2, false, false>;
  h["v_cvt_pk_f32_fp8"] = from_fp8<3, false, true>;
  h["v_cvt_pk_f32_bf8"] = from_fp8<2, false, true>;
  h["v_cvt_f32_fp8_fnuz"] = from_fp8<3, true, false>;
  h["v_cvt_f32_bf8_fnuz"] = from_fp8<2, true, false>;
  h["v_cvt_pk_f32_fp8_fnuz"] = from_fp8<3, true, true>;
  h["v_cvt_pk_f32_bf8_fnuz"] = from_fp8<2, true, true>;

  OP("v_cndmask_b32", {
    const u64 mask = m.mask_at(i.count > 3 ? static_cast<int>(i.o[3].index) : kVcc);
    each_lane(m, i, [&](int l) { return mask >> l & 1 ? source(m, i, 2, l) : source(m, i, 1, l); });
  });
  h["v_add_co_u32"] = with_carry<kPlus, false>;
  h["v_sub_co_u32"] = with_carry<kMinus, false>;
  h["v_subrev_co_u32"] = with_carry<kMinusReversed, false>;
  h["v_add_co_ci_u32"] = with_carry<kPlus, true>;
  h["v_sub_co_ci_u32"] = with_carry<kMinus, true>;
  h["v_subrev_co_ci_u32"] = with_carry<kMinusReversed, true>;
  OP("v_mad_co_u64_u32", multiply_add64(m, i, false));
  OP("v_mad_co_i64_i32", multiply_add64(m, i, true));

#define COMPARE(kind, T)                                                                                         \
  COMPARE1("eq", kind, T, a == b) COMPARE1("ne", kind, T, a != b) COMPARE1("lg", kind, T, a < b || a > b)        \
  COMPARE1("lt", kind, T, a < b) COMPARE1("le", kind, T, a <= b) COMPARE1("gt", kind, T, a > b) COMPARE1("ge", kind, T, a >= b)
#define COMPARE1(word, kind, T, expr)                                                                           \
  OP("v_cmp_" word "_" kind, (compare_as<T, bool (*)(T, T), false>(m, i, [](T a, T b) { return expr; })));       \
  OP("v_cmpx_" word "_" kind, (compare_as<T, bool (*)(T, T), true>(m, i, [](T a, T b) { return expr; })));
  COMPARE("u32", u32)
  COMPARE("i32", i32)
  COMPARE("u64", u64)
  COMPARE("i64", i64)
  COMPARE("u16", u16)
  COMPARE("i16", std::int16_t)
  COMPARE("f32", float)
  COMPARE1("neq", "f32", float, !(a == b))
  COMPARE1("nlt", "f32", float, !(a < b))
  COMPARE1("nle", "f32", float, !(a <= b))
  COMPARE1("ngt", "f32", float, !(a > b))
  COMPARE1("nge", "f32", float, !(a >= b))
  COMPARE1("nlg", "f32", float, !(a < b || a > b))
  COMPARE1("o", "f32", float, !std::isnan(a) && !std::isnan(b))
  COMPARE1("u", "f32", float, std::isnan(a) || std::isnan(b))

  h["v_readfirstlane_b32"] = readfirstlane;
  OP("v_readlane_b32", readlane(m, i, static_cast<int>(raw(m, i.o[2], 0) % m.lanes)));
  OP("v_writelane_b32", m.w.v[i.o[0].index][raw(m, i.o[2], 0) % m.lanes] = raw(m, i.o[1], 0));
  OP("v_permlane16_b32", permlane16(m, i, 0));
  OP("v_permlanex16_b32", permlane16(m, i, 16));
  OP("v_permlane32_swap_b32", permlane_swap(m, i, 32));
  OP("v_permlane16_swap_b32", permlane_swap(m, i, 16));
  OP("v_mbcnt_lo_u32_b32", mbcnt(m, i, 0));
  OP("v_mbcnt_hi_u32_b32", mbcnt(m, i, 32));
  OP("v_s_rcp_f32", set(m, i, as_bits(1.0f / as_float(s1(m, i)))));
  OP("v_s_exp_f32", set(m, i, as_bits(std::exp2(as_float(s1(m, i))))));
  OP("v_s_log_f32", set(m, i, as_bits(std::log2(as_float(s1(m, i))))));

  h["v_mfma_f32_16x16x16_f16"] = mfma_f16<16, 16>;
  h["v_mfma_f32_16x16x16_bf16"] = mfma_bf16<16, 16>;
  h["v_mfma_f32_32x32x8_f16"] = mfma_f16<32, 8>;
  h["v_mfma_f32_32x32x8_bf16"] = mfma_bf16<32, 8>;
  h["v_mfma_f32_16x16x32_f16"] = mfma_f16<16, 32>;
  h["v_mfma_f32_16x16x32_bf16"] = mfma_bf16<16, 32>;
  h["v_mfma_f32_32x32x16_f16"] = mfma_f16<32, 16>;
  h["v_mfma_f32_32x32x16_bf16"] = mfma_bf16<32, 16>;
  OP("v_wmma_f32_16x16x16_f16", wmma(m, i, [](u32 x) { return half_to_float(static_cast<u16>(x)); }));
  OP("v_wmma_f32_16x16x16_bf16", wmma(m, i, [](u32 x) { return bf16_to_float(static_cast<u16>(x)); }));

  OP("ds_load_b32", lds_load(m, i, 1));
  OP("ds_load_b64", lds_load(m, i, 2));
  OP("ds_load_b96", lds_load(m, i, 3));
  OP("ds_load_b128", lds_load(m, i, 4));
  OP("ds_load_2addr_b32", lds_load(m, i, 1, 4, 4));
  OP("ds_load_2addr_b64", lds_load(m, i, 2, 8, 8));
  OP("ds_load_2addr_stride64_b32", lds_load(m, i, 1, 256, 256));
  OP("ds_load_2addr_stride64_b64", lds_load(m, i, 2, 512, 512));
  OP("ds_load_u8", lds_load_part<u8>(m, i, -1));
  OP("ds_load_u16", lds_load_part<u16>(m, i, -1));
  OP("ds_load_u16_d16", lds_load_part<u16>(m, i, 0));
  OP("ds_load_u16_d16_hi", lds_load_part<u16>(m, i, 1));
  OP("ds_load_u8_d16", lds_load_part<u8>(m, i, 0));
  OP("ds_load_u8_d16_hi", lds_load_part<u8>(m, i, 1));
  h["ds_load_b64_tr_b16"] = lds_load_transposed;
  OP("ds_store_b32", lds_store(m, i, 1));
  OP("ds_store_b64", lds_store(m, i, 2));
  OP("ds_store_b96", lds_store(m, i, 3));
  OP("ds_store_b128", lds_store(m, i, 4));
  OP("ds_store_2addr_b32", lds_store(m, i, 1, 4, 4));
  OP("ds_store_2addr_b64", lds_store(m, i, 2, 8, 8));
  OP("ds_store_2addr_stride64_b32", lds_store(m, i, 1, 256, 256));
  OP("ds_store_2addr_stride64_b64", lds_store(m, i, 2, 512, 512));
  OP("ds_store_b16", lds_store_part<u16>(m, i, 0));
  OP("ds_store_b16_d16_hi", lds_store_part<u16>(m, i, 16));
  OP("ds_store_b8", lds_store_part<u8>(m, i, 0));
  OP("ds_store_b8_d16_hi", lds_store_part<u8>(m, i, 16));
  h["ds_bpermute_b32"] = bpermute;
  h["ds_swizzle_b32"] = swizzle;

  OP("global_load_b32", global_load<u32>(m, i, 1));
  OP("global_load_b64", global_load<u32>(m, i, 2));
  OP("global_load_b96", global_load<u32>(m, i, 3));
  OP("global_load_b128", global_load<u32>(m, i, 4));
  OP("global_load_u8", global_load<u8>(m, i, 1));
  OP("global_load_u16", global_load<u16>(m, i, 1));
  OP("global_load_d16_b16", global_load<u16>(m, i, 1, 0));
  OP("global_load_d16_hi_b16", global_load<u16>(m, i, 1, 1));
  OP("global_load_d16_u8", global_load<u8>(m, i, 1, 0));
  OP("global_load_d16_hi_u8", global_load<u8>(m, i, 1, 1));
  OP("global_store_b32", global_store<u32>(m, i, 1));
  OP("global_store_b64", global_store<u32>(m, i, 2));
  OP("global_store_b96", global_store<u32>(m, i, 3));
  OP("global_store_b128", global_store<u32>(m, i, 4));
  OP("global_store_b8", global_store<u8>(m, i, 1));
  OP("global_store_b16", global_store<u16>(m, i, 1));
  OP("global_store_d16_hi_b16", global_store<u16>(m, i, 1, 16));
  OP("global_store_d16_hi_b8", global_store<u8>(m, i, 1, 16));
  h["global_atomic_add_u32"] = global_atomic_add;
  names({"buffer_wbl2", "buffer_inv", "buffer_wbinvl1_vol", "buffer_gl0_inv", "buffer_gl1_inv", "global_wb", "global_inv", "s_dcache_inv"}, nothing);

  OP("s_load_b32", scalar_load(m, i, 1));
  OP("s_load_b64", scalar_load(m, i, 2));
  OP("s_load_b96", scalar_load(m, i, 3));
  OP("s_load_b128", scalar_load(m, i, 4));
  OP("s_load_b256", scalar_load(m, i, 8));
  OP("s_load_b512", scalar_load(m, i, 16));

  OP("s_mov_b32", set(m, i, s1(m, i)));
  OP("s_mov_b64", set64(m, i, s2(m, i)));
  OP("s_movk_i32", set(m, i, static_cast<u32>(static_cast<std::int16_t>(i.o[1].value))));
  OP("s_mulk_i32", set(m, i, m.w.s[i.o[0].index] * static_cast<u32>(static_cast<std::int16_t>(i.o[1].value))));
  OP("s_addk_i32", {
    const i64 x = static_cast<i64>(static_cast<i32>(m.w.s[i.o[0].index])) + static_cast<std::int16_t>(i.o[1].value);
    m.w.scc = x != static_cast<i32>(x);
    set(m, i, static_cast<u32>(x));
  });
  OP("s_cmovk_i32", if (m.w.scc) set(m, i, static_cast<u32>(static_cast<std::int16_t>(i.o[1].value))));
  OP("s_cmov_b32", if (m.w.scc) set(m, i, s1(m, i)));
  OP("s_cmov_b64", if (m.w.scc) set64(m, i, s2(m, i)));
  OP("s_not_b32", set(m, i, ~s1(m, i)); m.w.scc = m.w.s[i.o[0].index] != 0);
  OP("s_not_b64", { const u64 x = ~s2(m, i); set64(m, i, x); m.w.scc = x != 0; });
  OP("s_brev_b32", { const u32 a = s1(m, i); u32 r = 0; for (int n = 0; n < 32; ++n) r |= (a >> n & 1) << (31 - n); set(m, i, r); });
  OP("s_abs_i32", { const u32 a = s1(m, i); const u32 x = static_cast<i32>(a) < 0 ? 0 - a : a; set(m, i, x); m.w.scc = x != 0; });
  OP("s_bcnt1_i32_b32", { const u32 x = std::popcount(s1(m, i)); set(m, i, x); m.w.scc = x != 0; });
  OP("s_bcnt1_i32_b64", { const u32 x = std::popcount(s2(m, i)); set(m, i, x); m.w.scc = x != 0; });
  OP("s_ff1_i32_b32", { const u32 a = s1(m, i); set(m, i, a ? std::countr_zero(a) : ~0u); });
  OP("s_ff1_i32_b64", { const u64 a = s2(m, i); set(m, i, a ? std::countr_zero(a) : ~0u); });
  OP("s_flbit_i32_b32", { const u32 a = s1(m, i); set(m, i, a ? std::countl_zero(a) : ~0u); });
  OP("s_sext_i32_i16", set(m, i, static_cast<u32>(static_cast<std::int16_t>(s1(m, i)))));
  OP("s_sext_i32_i8", set(m, i, static_cast<u32>(static_cast<std::int8_t>(s1(m, i)))));
  OP("s_bitset1_b32", set(m, i, m.w.s[i.o[0].index] | 1u << (s1(m, i) & 31)));
  OP("s_bitset0_b32", set(m, i, m.w.s[i.o[0].index] & ~(1u << (s1(m, i) & 31))));
  OP("s_add_u32", scalar_add(m, i, false));
  OP("s_addc_u32", scalar_add(m, i, true));
  OP("s_sub_u32", scalar_sub(m, i, false));
  OP("s_subb_u32", scalar_sub(m, i, true));
  OP("s_add_i32", scalar_add_signed(m, i, false));
  OP("s_sub_i32", scalar_add_signed(m, i, true));
  S264("s_add_nc_u64", false, a + b)
  S264("s_sub_nc_u64", false, a - b)
  S264("s_mul_u64", false, a * b)
  S2("s_mul_i32", false, a * b)
  S2("s_mul_hi_u32", false, static_cast<u32>(static_cast<u64>(a) * b >> 32))
  S2("s_mul_hi_i32", false, static_cast<u32>(static_cast<i64>(static_cast<i32>(a)) * static_cast<i32>(b) >> 32))
  S2("s_and_b32", true, a & b)
  S2("s_or_b32", true, a | b)
  S2("s_xor_b32", true, a ^ b)
  S2("s_nor_b32", true, ~(a | b))
  S2("s_nand_b32", true, ~(a & b))
  S2("s_xnor_b32", true, ~(a ^ b))
  S2("s_and_not1_b32", true, a & ~b)
  S2("s_or_not1_b32", true, a | ~b)
  S264("s_and_b64", true, a & b)
  S264("s_or_b64", true, a | b)
  S264("s_xor_b64", true, a ^ b)
  S264("s_nor_b64", true, ~(a | b))
  S264("s_nand_b64", true, ~(a & b))
  S264("s_xnor_b64", true, ~(a ^ b))
  S264("s_and_not1_b64", true, a & ~b)
  S264("s_or_not1_b64", true, a | ~b)
  S2("s_lshl_b32", true, a << (b & 31))
  S2("s_lshr_b32", true, a >> (b & 31))
  S2("s_ashr_i32", true, static_cast<u32>(static_cast<i32>(a) >> (b & 31)))
  S264("s_lshl_b64", true, a << (b & 63))
  S264("s_lshr_b64", true, a >> (b & 63))
  S264("s_ashr_i64", true, static_cast<u64>(static_cast<i64>(a) >> (b & 63)))
  S2("s_bfm_b32", false, ((1u << (a & 31)) - 1) << (b & 31))
  S2("s_bfe_u32", true, (b >> 16 & 127) >= 32 ? a >> (b & 31) : a >> (b & 31) & ((1u << (b >> 16 & 31)) - 1))
  S2("s_bfe_i32", true, (b >> 16 & 127) == 0 ? 0 : static_cast<u32>(static_cast<i32>(a >> (b & 31) << (32 - (b >> 16 & 127))) >> (32 - (b >> 16 & 127))))
  S2("s_pack_ll_b32_b16", false, (a & 0xffff) | b << 16)
  S2("s_pack_lh_b32_b16", false, (a & 0xffff) | (b & 0xffff0000u))
  S2("s_pack_hh_b32_b16", false, a >> 16 | (b & 0xffff0000u))
  OP("s_lshl1_add_u32", { const u64 x = (static_cast<u64>(s1(m, i, 1)) << 1) + s1(m, i, 2); set(m, i, static_cast<u32>(x)); m.w.scc = x >> 32 != 0; });
  OP("s_lshl2_add_u32", { const u64 x = (static_cast<u64>(s1(m, i, 1)) << 2) + s1(m, i, 2); set(m, i, static_cast<u32>(x)); m.w.scc = x >> 32 != 0; });
  OP("s_lshl3_add_u32", { const u64 x = (static_cast<u64>(s1(m, i, 1)) << 3) + s1(m, i, 2); set(m, i, static_cast<u32>(x)); m.w.scc = x >> 32 != 0; });
  OP("s_lshl4_add_u32", { const u64 x = (static_cast<u64>(s1(m, i, 1)) << 4) + s1(m, i, 2); set(m, i, static_cast<u32>(x)); m.w.scc = x >> 32 != 0; });
  { constexpr auto f = [](i32 a, i32 b) { return a < b; }; h["s_min_i32"] = scalar_extreme<i32, f>; }
  { constexpr auto f = [](i32 a, i32 b) { return a > b; }; h["s_max_i32"] = scalar_extreme<i32, f>; }
  { constexpr auto f = [](u32 a, u32 b) { return a < b; }; h["s_min_u32"] = scalar_extreme<u32, f>; }
  { constexpr auto f = [](u32 a, u32 b) { return a > b; }; h["s_max_u32"] = scalar_extreme<u32, f>; }
  OP("s_cselect_b32", set(m, i, m.w.scc ? s1(m, i, 1) : s1(m, i, 2)));
  OP("s_cselect_b64", set64(m, i, m.w.scc ? s2(m, i, 1) : s2(m, i, 2)));
  OP("s_mul_f32", set(m, i, as_bits(as_float(s1(m, i, 1)) * as_float(s1(m, i, 2)))));
  OP("s_add_f32", set(m, i, as_bits(as_float(modified(s1(m, i, 1), i.o[1])) + as_float(s1(m, i, 2)))));
  OP("s_sub_f32", set(m, i, as_bits(as_float(s1(m, i, 1)) - as_float(s1(m, i, 2)))));
  OP("s_max_num_f32", set(m, i, as_bits(maximum(as_float(s1(m, i, 1)), as_float(s1(m, i, 2))))));
  OP("s_fmamk_f32", set(m, i, as_bits(std::fma(as_float(s1(m, i, 1)), as_float(s1(m, i, 2)), as_float(s1(m, i, 3))))));
  OP("s_fmac_f32", set(m, i, as_bits(std::fma(as_float(s1(m, i, 1)), as_float(s1(m, i, 2)), as_float(m.w.s[i.o[0].index])))));
  OP("s_trunc_f32", set(m, i, as_bits(std::trunc(as_float(s1(m, i))))));
  OP("s_cvt_f32_u32", set(m, i, as_bits(static_cast<float>(s1(m, i)))));
  OP("s_cvt_f32_i32", set(m, i, as_bits(static_cast<float>(static_cast<i32>(s1(m, i))))));
  OP("s_cvt_u32_f32", set(m, i, float_to_u32(as_float(s1(m, i)))));
  OP("s_cvt_f32_f16", set(m, i, as_bits(half_to_float(static_cast<u16>(s1(m, i))))));

#define SCOMPARE(word, expr)                                                                                             \
  OP("s_cmp_" word "_u32", { const u32 a = s1(m, i, 0), b = s1(m, i, 1); m.w.scc = expr; });                              \
  OP("s_cmp_" word "_i32", { const i32 a = static_cast<i32>(s1(m, i, 0)), b = static_cast<i32>(s1(m, i, 1)); m.w.scc = expr; }); \
  OP("s_cmpk_" word "_u32", { const u32 a = s1(m, i, 0), b = static_cast<u16>(i.o[1].value); m.w.scc = expr; });          \
  OP("s_cmpk_" word "_i32", { const i32 a = static_cast<i32>(s1(m, i, 0)), b = static_cast<std::int16_t>(i.o[1].value); m.w.scc = expr; }); \
  OP("s_cmp_" word "_f32", { const float a = as_float(modified(s1(m, i, 0), i.o[0])), b = as_float(modified(s1(m, i, 1), i.o[1])); m.w.scc = expr; });
  SCOMPARE("eq", a == b)
  SCOMPARE("lg", a != b)
  SCOMPARE("lt", a < b)
  SCOMPARE("le", a <= b)
  SCOMPARE("gt", a > b)
  SCOMPARE("ge", a >= b)
  SCOMPARE("nlt", !(a < b))
  SCOMPARE("ngt", !(a > b))
  SCOMPARE("nle", !(a <= b))
  SCOMPARE("nge", !(a >= b))
  SCOMPARE("neq", !(a == b))
  OP("s_cmp_eq_u64", m.w.scc = s2(m, i, 0) == s2(m, i, 1));
  OP("s_cmp_lg_u64", m.w.scc = s2(m, i, 0) != s2(m, i, 1));
  OP("s_bitcmp0_b32", m.w.scc = !(s1(m, i, 0) >> (s1(m, i, 1) & 31) & 1));
  OP("s_bitcmp1_b32", m.w.scc = s1(m, i, 0) >> (s1(m, i, 1) & 31) & 1);
  { constexpr auto f = [](u64 s, u64 e) { return s & e; }; h["s_and_saveexec"] = saveexec<f>; }
  { constexpr auto f = [](u64 s, u64 e) { return s | e; }; h["s_or_saveexec"] = saveexec<f>; }
  { constexpr auto f = [](u64 s, u64 e) { return s ^ e; }; h["s_xor_saveexec"] = saveexec<f>; }
  { constexpr auto f = [](u64 s, u64 e) { return s & ~e; }; h["s_and_not1_saveexec"] = saveexec<f>; }
  { constexpr auto f = [](u64 s, u64 e) { return ~s & e; }; h["s_and_not0_saveexec"] = saveexec<f>; }

  h["s_branch"] = jump;
  OP("s_cbranch_scc0", jump_if(m, i, !m.w.scc));
  OP("s_cbranch_scc1", jump_if(m, i, m.w.scc));
  OP("s_cbranch_vccz", jump_if(m, i, m.mask_at(kVcc) == 0));
  OP("s_cbranch_vccnz", jump_if(m, i, m.mask_at(kVcc) != 0));
  OP("s_cbranch_execz", jump_if(m, i, m.exec() == 0));
  OP("s_cbranch_execnz", jump_if(m, i, m.exec() != 0));
  OP("s_getpc_b64", set64(m, i, static_cast<u64>(i.next)));
  OP("s_endpgm", m.w.done = true);
  OP("s_wait", {  // every kind of waiting: program.py says for what
    for (int c = 0; c < kCounters; ++c)
      if (i.waits[c] >= 0) m.wait(static_cast<Counter>(c), static_cast<int>(i.waits[c]));
  });
  OP("s_barrier", {
    if (m.under_way(kShared)) fail("a wave is at a barrier with LDS accesses under way");
  });
  names({"s_nop", "s_clause", "s_delay_alu", "s_set_inst_prefetch_distance", "s_sendmsg", "s_waitcnt_depctr", "s_wait_alu", "s_setprio",
         "s_barrier_signal", "s_sleep", "s_inst_prefetch"},
        nothing);
  return h;
}

}  // namespace

const std::map<std::string, Handler>& handlers() {
  static const std::map<std::string, Handler> all = make();
  return all;
}

}  // namespace isa

// ---- the interface to program.py

using namespace isa;

namespace {
std::vector<Handler>& table() {
  static std::vector<Handler> t;
  return t;
}
thread_local std::string error;
}  // namespace

// The number of an instruction's name, or -1.
extern "C" i64 isa_op(const char* name) {
  static std::map<std::string, i64> known;
  auto found = known.find(name);
  if (found != known.end()) return found->second;
  auto h = handlers().find(name);
  if (h == handlers().end()) return -1;
  table().push_back(h->second);
  return known[name] = static_cast<i64>(table().size()) - 1;
}
extern "C" i64 isa_inst_bytes() { return sizeof(Inst); }

struct LaunchArguments {
  const Inst* program;
  i64 count;
  const i32* places;      // of (pc - first pc) / 4: the instruction there, or -1
  i64 place_count;
  i64 barrier_op;
  i64 wave, generation;
  i64 grid_x, grid_y, threads, lds_bytes;
  i64 kernarg, dispatch;  // addresses
  i64 private_segment, dispatch_ptr, user_registers, workgroup_id_x, workgroup_id_y;  // which scalar registers are set up, in the order of the descriptor
  i64 order, seed;        // 0 forward, 1 reverse, 2 random
  const Range* ranges;
  i64 range_count;
  i64 limit;
};

// Runs a grid; returns "" or what went wrong.
extern "C" const char* isa_run(const LaunchArguments* a, Stats* stats) {
  error.clear();
  const Target target = {static_cast<int>(a->wave), static_cast<int>(a->generation), a->generation >= 10, a->generation >= 12};
  Launch launch = {&target, std::vector<Range>(a->ranges, a->ranges + a->range_count), stats, a->limit};
  std::mt19937_64 random(a->seed);
  const int grid = static_cast<int>(a->grid_x * a->grid_y), waves = static_cast<int>(a->threads / a->wave);
  std::vector<int> blocks(grid);
  for (int b = 0; b < grid; ++b) blocks[b] = a->order == 1 ? grid - 1 - b : b;
  if (a->order == 2) std::shuffle(blocks.begin(), blocks.end(), random);
  std::vector<Wave> all(waves);
  for (int number : blocks) {
    Block block = {&launch, std::vector<u8>(a->lds_bytes)};
    for (u8& x : block.lds) x = static_cast<u8>(random() | 0x7f);
    const u32 x = static_cast<u32>(number % a->grid_x), y = static_cast<u32>(number / a->grid_x);
    for (int n = 0; n < waves; ++n) {
      Wave& w = all[n];
      w.block = &block;
      w.index = n;
      w.scc = w.done = false;
      w.issued = 0;
      w.pending.clear();
      w.pc = a->program[0].pc;
      for (u32& s : w.s) s = kGarbage ^ static_cast<u32>(random() & 0xff);
      for (auto& v : w.v)
        for (u32& e : v) e = kGarbage ^ static_cast<u32>(random() & 0xff);
      for (int l = 0; l < a->wave; ++l) w.v[0][l] = static_cast<u32>(n * a->wave + l);
      int s = 0;
      auto pair = [&](i64 value) { w.s[s++] = static_cast<u32>(value), w.s[s++] = static_cast<u32>(value >> 32); };
      if (a->private_segment) s += 4;
      if (a->dispatch_ptr) pair(a->dispatch);
      pair(a->kernarg);
      s = static_cast<int>(a->user_registers);
      if (a->generation < 12) {
        if (a->workgroup_id_x) w.s[s++] = x;
        if (a->workgroup_id_y) w.s[s++] = y;
      }
      w.s[108 + 9] = x;  // gfx12: in ttmp9, ttmp7 and ttmp8
      w.s[108 + 7] = y;
      w.s[108 + 8] = static_cast<u32>(n) << 25;
      Machine(w).set_mask(kExec, a->wave == 64 ? ~0ull : 0xffffffffull);
    }
    std::vector<int> turn(waves);
    for (int n = 0; n < waves; ++n) turn[n] = a->order == 1 ? waves - 1 - n : n;
    int left = waves;
    while (left) {
      if (a->order == 2) std::shuffle(turn.begin(), turn.end(), random);
      int at_barrier = 0;
      for (int n : turn) {
        Wave& w = all[n];
        if (w.done) continue;
        Machine m(w);
        const Inst* i = nullptr;
        try {
          for (long count = 0;; ++count) {
            if (count > a->limit) fail("a wave does not end");
            const i64 place = static_cast<i64>(w.pc - a->program[0].pc) / 4;
            if (place < 0 || place >= a->place_count || a->places[place] < 0) fail("a jump to where no instruction begins");
            i = a->program + a->places[place];
            w.pc = i->next;
            ++w.issued;
            ++stats->instructions;
            table()[i->op](m, *i);
            if (i->flags & kDual) {  // the second half still sees the registers as they were
              const Inst* second = i + 1;
              table()[second->op](m, *second);
              for (int l = 0; l < m.lanes; ++l)
                if (m.active(l)) w.v[i->o[0].index][l] = w.v[512][l];
              w.pc = second->next;
            }
            if (w.done || i->op == a->barrier_op) break;
          }
        } catch (const std::exception& e) {
          error = "block (" + std::to_string(x) + ", " + std::to_string(y) + "), wave " + std::to_string(n) + ", line " +
                  std::to_string(i ? i->line : -1) + ": " + e.what();
          return error.c_str();
        }
        if (w.done) --left;
        else ++at_barrier;
      }
      if (left && at_barrier == 0) break;
    }
  }
  return error.c_str();
}
