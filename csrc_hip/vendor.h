// What the shared kernels need of an AMD device: the names of csrc_cuda/vendor.h by the compiler's builtins. No header
// is included, HIP's own neither, so that clang compiles this with no ROCm installed and hiprtc compiles the same text.
//
// gfx9 (CDNA) runs waves of 64 lanes, gfx11 and gfx12 (RDNA) of 32. The wave comes from __GFX9__: newer compilers no
// longer define a macro for it, and HIP's warpSize is no constant. Blocks are one-dimensional.
#pragma once

#define PA_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define PA_KERNEL(threads, blocks) \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads))) __attribute__((amdgpu_waves_per_eu(blocks)))

namespace portattn {

using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(2) f16 { u16 bits; };
struct alignas(2) bf16 { u16 bits; };

#if defined(__GFX9__)
constexpr int kWaveLanes = 64;
#elif defined(__GFX11__) || defined(__GFX12__)
constexpr int kWaveLanes = 32;
#elif defined(__AMDGCN__)
#error "portattn is for gfx90a, gfx942, gfx950, gfx11 and gfx12"
#else
constexpr int kWaveLanes = 64;  // the host's pass of a HIP compiler
#endif

PA_DEVICE u32 float_bits(float x) { return __builtin_bit_cast(u32, x); }
PA_DEVICE float bits_float(u32 x) { return __builtin_bit_cast(float, x); }

// thread_x() is found anew wherever it is asked for: what rare steps derive from it would else be kept through the hot
// loop, in registers that the loop needs. warp.h and mma.h use thread_kept().
PA_DEVICE int anew(int x) {
  asm volatile("" : "+v"(x));
  return x;
}
PA_DEVICE int thread_kept() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
PA_DEVICE int thread_x() { return anew(thread_kept()); }
PA_DEVICE int block_x() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
PA_DEVICE int grid_x(int threads) { return static_cast<int>(__builtin_amdgcn_grid_size_x()) / threads; }  // it counts threads
PA_DEVICE int block_y() { return static_cast<int>(__builtin_amdgcn_workgroup_id_y()); }

// A value that is the same in every lane of the wave, moved to a scalar register.
PA_DEVICE int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }
PA_DEVICE i64 uniform(i64 x) {
  const u32 lo = __builtin_amdgcn_readfirstlane(static_cast<int>(x)), hi = __builtin_amdgcn_readfirstlane(static_cast<int>(x >> 32));
  return static_cast<i64>(static_cast<u64>(hi) << 32 | lo);
}
template <class V>
PA_DEVICE V uniform(const V& value) {
  static_assert(sizeof(V) % 4 == 0, "it is moved word by word");
  struct Words { int of[sizeof(V) / 4]; } words = __builtin_bit_cast(Words, value);
#pragma unroll
  for (int& word : words.of) word = uniform(word);
  return __builtin_bit_cast(V, words);
}

PA_DEVICE void block_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// Orders the lanes' shared-memory accesses. A wave runs in step and its accesses keep their order: only the compiler is told.
PA_DEVICE void wave_fence() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
PA_DEVICE void warp_fence() { wave_fence(); }  // of 32 lanes, which the wave may not all be at

// The compiler moves nothing across: what it would read far ahead needs registers.
PA_DEVICE void schedule_fence() { __builtin_amdgcn_sched_barrier(0); }

// ---- copies to shared memory, through registers

typedef u32 Words4 __attribute__((ext_vector_type(4)));

// Copies 16 bytes of which the first `bytes` count and the rest become zero, and lands at once: loads in a row still
// wait together. (decode.h's loop keeps its own pieces in registers instead, across a whole unit.) All 16 bytes are
// read, none where bytes is 0: the address is a multiple of 16, so they lie in one memory page.
PA_DEVICE void copy_async16(void* shared, const void* global, int bytes) {
  Words4 x = 0;
  if (bytes > 0) x = *static_cast<const Words4*>(global);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = bytes - 4 * i;
    if (n < 4) x[i] = n <= 0 ? 0 : x[i] & ((1u << (8 * n)) - 1);
  }
  *static_cast<Words4*>(shared) = x;
}
PA_DEVICE void copy_commit() {}
template <int kPending>
PA_DEVICE void copy_wait() {}

// ---- the params

// A pointer that was read from memory, known to be to global memory: flat accesses would wait for shared memory too.
template <class T>
PA_DEVICE T* in_global(T* p) {
  return (T*)(__attribute__((address_space(1))) T*)reinterpret_cast<u64>(p);
}
// An index of 64 bits where `wide`, else of 32. The lower half is read of both, without a branch: no token, page or length has more
// than 31 bits, and this stands in a dozen places.
PA_DEVICE i64 read_index(const void* p, i64 i, bool wide) {
  return *reinterpret_cast<const i32*>(in_global(static_cast<const u8*>(p)) + (i << (wide ? 3 : 2)));
}
// Of one that may be anything: all of it.
PA_DEVICE i64 read_whole_index(const void* p, i64 i, bool wide) {
  return wide ? in_global(static_cast<const i64*>(p))[i] : in_global(static_cast<const i32*>(p))[i];
}
// The kernel's only argument, read anew from here on: a loop that keeps all of it has no scalar registers left. A loop
// that asks again and again holds one Params, for it is one pointer.
template <class P>
struct Params {
  const __attribute__((address_space(4))) P* at = (const __attribute__((address_space(4))) P*)__builtin_amdgcn_kernarg_segment_ptr();
  PA_DEVICE const P& anew() {
    asm volatile("" : "+s"(at));
    return *(const P*)at;
  }
};
template <class P>
PA_DEVICE Params<P> params_of(const P&) { return {}; }
template <class P>
PA_DEVICE const P& anew(const P& p) { return params_of(p).anew(); }

// ---- between blocks

// Before the barrier that comes before atomic_add_ordered: this thread's writes to global memory are for other blocks.
// (AMD's workgroup barrier does not wait for them, and the atomic's release speaks for its own wave only.)
PA_DEVICE void publish_to_blocks() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent"); }
// Adds and returns what was there. What the block published before its last barrier is visible to whoever sees the sum;
// what others published before theirs is visible after it, and to the block after its next barrier.
PA_DEVICE int atomic_add_ordered(int* p, int x) {
  return __hip_atomic_fetch_add(p, x, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
// Loads after atomic_add_ordered and a barrier: the acquire has emptied the caches, plain loads do.
PA_DEVICE float load_shared_by_blocks(const float* p) { return *p; }
PA_DEVICE void load4_shared_by_blocks(const float* p, float (&x)[4]) {
  const Words4 y = *reinterpret_cast<const Words4*>(p);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = bits_float(y[i]);
}

// ---- arithmetic

PA_DEVICE float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
PA_DEVICE float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
PA_DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
PA_DEVICE float max_of(float a, float b) { return __builtin_fmaxf(a, b); }
PA_DEVICE float rint_of(float x) { return __builtin_rintf(x); }

PA_DEVICE float to_float(float x) { return x; }
PA_DEVICE float to_float(f16 x) { return static_cast<float>(__builtin_bit_cast(_Float16, x.bits)); }
PA_DEVICE float to_float(bf16 x) { return bits_float(static_cast<u32>(x.bits) << 16); }

// A float's bits rounded to nearest even at bit 16; NaN stays NaN.
PA_DEVICE u32 rounded_to_bf16(float x) {
  const u32 bits = float_bits(x), rounded = bits + 0x7fffu + ((bits >> 16) & 1);
  return x != x ? bits | 0x400000u : rounded;
}

template <class T>
PA_DEVICE T from_float(float x);
template <>
PA_DEVICE float from_float<float>(float x) { return x; }
template <>
PA_DEVICE f16 from_float<f16>(float x) { return {__builtin_bit_cast(u16, static_cast<_Float16>(x))}; }
template <>
PA_DEVICE bf16 from_float<bf16>(float x) { return {static_cast<u16>(rounded_to_bf16(x) >> 16)}; }

// Two values in one register, `lo` in the low half.
template <class T>
PA_DEVICE u32 pack2(float lo, float hi);
template <>
PA_DEVICE u32 pack2<f16>(float lo, float hi) {
  return from_float<f16>(lo).bits | static_cast<u32>(from_float<f16>(hi).bits) << 16;
}
template <>
PA_DEVICE u32 pack2<bf16>(float lo, float hi) {
#if defined(__gfx950__)
  typedef __bf16 Pair __attribute__((ext_vector_type(2)));
  const Pair p = {static_cast<__bf16>(lo), static_cast<__bf16>(hi)};  // v_cvt_pk_bf16_f32
  return __builtin_bit_cast(u32, p);
#else
  return __builtin_amdgcn_perm(rounded_to_bf16(hi), rounded_to_bf16(lo), 0x07060302u);
#endif
}

// The same of values of which a NaN may become any number.
template <class T>
PA_DEVICE u32 pack2_numbers(float lo, float hi) { return pack2<T>(lo, hi); }
#if !defined(__gfx950__)
template <>
PA_DEVICE u32 pack2_numbers<bf16>(float lo, float hi) {
  auto rounded = [](float x) { return float_bits(x) + 0x7fffu + ((float_bits(x) >> 16) & 1); };
  return __builtin_amdgcn_perm(rounded(hi), rounded(lo), 0x07060302u);
}
#endif

// Of values that need no rounding.
template <class T>
PA_DEVICE u32 pack2_exact(float lo, float hi);
template <>
PA_DEVICE u32 pack2_exact<f16>(float lo, float hi) { return __builtin_bit_cast(u32, __builtin_amdgcn_cvt_pkrtz(lo, hi)); }
template <>
PA_DEVICE u32 pack2_exact<bf16>(float lo, float hi) { return __builtin_amdgcn_perm(float_bits(hi), float_bits(lo), 0x07060302u); }

// Two f16 times one whose bits are given.
PA_DEVICE u32 times_pair(u32 two, u16 factor) {
  typedef _Float16 Pair __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, __builtin_bit_cast(Pair, two) * __builtin_bit_cast(_Float16, factor));
}

// What the device converts of 8-bit floats: gfx942 the fnuz formats, gfx950 and gfx12 OCP's, gfx90a and gfx11 none.
#if defined(__gfx942__)
constexpr bool kConvertsFnuz = true, kConvertsOcp = false;
#elif defined(__gfx950__) || defined(__GFX12__)
constexpr bool kConvertsFnuz = false, kConvertsOcp = true;
#else
constexpr bool kConvertsFnuz = false, kConvertsOcp = false;
#endif
// Two of four 8-bit floats, those of 3 mantissa bits (e4m3) or of 2 (e5m2).
template <int kMantissa, bool kHigh>
PA_DEVICE void convert_two(u32 four, float (&x)[2]) {
#if defined(__gfx942__) || defined(__gfx950__) || defined(__GFX12__)
  typedef float Two __attribute__((ext_vector_type(2)));
  Two y;
  if constexpr (kMantissa == 3) y = __builtin_amdgcn_cvt_pk_f32_fp8(four, kHigh);
  else y = __builtin_amdgcn_cvt_pk_f32_bf8(four, kHigh);
  x[0] = y[0];
  x[1] = y[1];
#endif
}

// ---- lanes: what warp.h is made of

// Lane `from` of the wave, which is active and in the same 32 lanes.
PA_DEVICE u32 lane_of_wave(u32 x, int from) { return __builtin_amdgcn_ds_bpermute(from * 4, x); }
// Lane ^ kMask, kMask < 32. DPP moves inside a row of 16 lanes cost an ordinary instruction; a swizzle goes through the
// shared memory's crossbar. gfx9's DPP knows no xor by 4.
template <int kMask>
PA_DEVICE u32 lane_xor(u32 x) {
  static_assert(kMask >= 0 && kMask < 32, "a logical warp has 32 lanes");
  if constexpr (kMask == 0) return x;
#if defined(__GFX11__) || defined(__GFX12__)
  else if constexpr (kMask < 16) return __builtin_amdgcn_update_dpp(0, x, 0x160 + kMask, 0xf, 0xf, true);  // row_xmask
  else if constexpr (kMask == 16) return __builtin_amdgcn_permlanex16(x, x, 0x76543210u, 0xfedcba98u, false, false);
#else
  else if constexpr (kMask < 4) return __builtin_amdgcn_update_dpp(0, x, (0 ^ kMask) | (1 ^ kMask) << 2 | (2 ^ kMask) << 4 | (3 ^ kMask) << 6, 0xf, 0xf, true);  // quad_perm
  else if constexpr (kMask == 7) return __builtin_amdgcn_update_dpp(0, x, 0x141, 0xf, 0xf, true);   // row_half_mirror
  else if constexpr (kMask == 8) return __builtin_amdgcn_update_dpp(0, x, 0x128, 0xf, 0xf, true);   // row_ror:8
  else if constexpr (kMask == 15) return __builtin_amdgcn_update_dpp(0, x, 0x140, 0xf, 0xf, true);  // row_mirror
#endif
  else return __builtin_amdgcn_ds_swizzle(x, kMask << 10 | 0x1f);
}
// Lane ^ 32 of a wave of 64.
PA_DEVICE u32 lane_xor_32(u32 x) { return __builtin_amdgcn_ds_bpermute((thread_kept() ^ 32) * 4, x); }
// Bit i: lane i's of these 32 lanes.
PA_DEVICE u32 half_ballot(bool b) {
#if defined(__GFX9__)
  const u64 all = __builtin_amdgcn_ballot_w64(b);
  return static_cast<u32>(thread_kept() & 32 ? all >> 32 : all);
#else
  return __builtin_amdgcn_ballot_w32(b);
#endif
}
PA_DEVICE bool any_of_wave(bool b) {
#if defined(__GFX9__)
  return __builtin_amdgcn_ballot_w64(b) != 0;
#else
  return __builtin_amdgcn_ballot_w32(b) != 0;
#endif
}

// ---- the matrix instruction: D (16 x 16, float32) += A (16 x 16) B (16 x 16); mma.h says which lane holds what

enum MatrixLayout { kMfma, kWmmaGfx11, kWmmaGfx12 };
#if defined(__GFX12__)
constexpr MatrixLayout kMatrixLayout = kWmmaGfx12;
#elif defined(__GFX11__)
constexpr MatrixLayout kMatrixLayout = kWmmaGfx11;
#else
constexpr MatrixLayout kMatrixLayout = kMfma;
#endif
constexpr int kMatrixIn = kMatrixLayout == kMfma ? 2 : kMatrixLayout == kWmmaGfx11 ? 8 : 4;  // registers of an operand
constexpr int kMatrixOut = kMatrixLayout == kMfma ? 4 : 8;

typedef float MatrixAcc __attribute__((ext_vector_type(kMatrixOut)));
typedef _Float16 MatrixF16 __attribute__((ext_vector_type(2 * kMatrixIn)));
typedef short MatrixBf16 __attribute__((ext_vector_type(2 * kMatrixIn)));
template <int kWords>
struct Words { u32 r[kWords]; };
using MatrixOperand = Words<kMatrixIn>;

PA_DEVICE MatrixAcc matrix_instruction(MatrixAcc c, const MatrixOperand& a, const MatrixOperand& b, f16) {
  const MatrixF16 x = __builtin_bit_cast(MatrixF16, a), y = __builtin_bit_cast(MatrixF16, b);
#if defined(__GFX12__)
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(x, y, c);
#elif defined(__GFX11__)
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(x, y, c);
#elif defined(__GFX9__)
  return __builtin_amdgcn_mfma_f32_16x16x16f16(x, y, c, 0, 0, 0);
#else
  return c;
#endif
}
PA_DEVICE MatrixAcc matrix_instruction(MatrixAcc c, const MatrixOperand& a, const MatrixOperand& b, bf16) {
  const MatrixBf16 x = __builtin_bit_cast(MatrixBf16, a), y = __builtin_bit_cast(MatrixBf16, b);
#if defined(__GFX12__)
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(x, y, c);
#elif defined(__GFX11__)
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(x, y, c);
#elif defined(__GFX9__)
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, c, 0, 0, 0);
#else
  return c;
#endif
}
template <class T>
PA_DEVICE void multiply_matrices(float (&c)[kMatrixOut], const MatrixOperand& a, const MatrixOperand& b) {
  const MatrixAcc d = matrix_instruction(__builtin_bit_cast(MatrixAcc, c), a, b, T{});
#pragma unroll
  for (int i = 0; i < kMatrixOut; ++i) c[i] = d[i];
}

// gfx950: the same of depth 32, from two operands of depth 16 each.
#if defined(__gfx950__)
constexpr bool kMatrixTwice = true;
#else
constexpr bool kMatrixTwice = false;
#endif
template <class T>
PA_DEVICE void multiply_matrices_twice(float (&c)[kMatrixOut], const MatrixOperand& a0, const MatrixOperand& a1, const MatrixOperand& b0, const MatrixOperand& b1) {
#if defined(__gfx950__)
  struct Both { MatrixOperand first, second; };
  MatrixAcc d = __builtin_bit_cast(MatrixAcc, c);
  if constexpr (__is_same(T, f16)) {
    typedef _Float16 Eight __attribute__((ext_vector_type(8)));
    d = __builtin_amdgcn_mfma_f32_16x16x32_f16(__builtin_bit_cast(Eight, Both{a0, a1}), __builtin_bit_cast(Eight, Both{b0, b1}), d, 0, 0, 0);
  } else {
    typedef __bf16 Eight __attribute__((ext_vector_type(8)));
    d = __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(Eight, Both{a0, a1}), __builtin_bit_cast(Eight, Both{b0, b1}), d, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kMatrixOut; ++i) c[i] = d[i];
#endif
}

// Elements of a result are here in gfx9's accumulation registers, where compilers before LLVM 22 have MFMA write them.
template <int kCount>
PA_DEVICE void keep_as_result(float (&x)[kCount]) {
#if defined(__GFX9__) && __clang_major__ < 22
  typedef float Elements __attribute__((ext_vector_type(kCount)));
  Elements all = __builtin_bit_cast(Elements, x);
  asm volatile("" : "+a"(all));
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = all[i];
#endif
}

// gfx9's larger one: D (32 x 32) += A (32 x 16) B (16 x 32), in two steps of depth 8 before gfx950.
constexpr int kLargeIn = 4, kLargeOut = 16;
using LargeOperand = Words<kLargeIn>;
template <class T>
PA_DEVICE void multiply_large_matrices(float (&c)[kLargeOut], const LargeOperand& a, const LargeOperand& b) {
#if defined(__GFX9__)
  typedef float LargeAcc __attribute__((ext_vector_type(kLargeOut)));
  LargeAcc d = __builtin_bit_cast(LargeAcc, c);
#if defined(__gfx950__)
  if constexpr (__is_same(T, f16)) {
    typedef _Float16 Eight __attribute__((ext_vector_type(8)));
    d = __builtin_amdgcn_mfma_f32_32x32x16_f16(__builtin_bit_cast(Eight, a), __builtin_bit_cast(Eight, b), d, 0, 0, 0);
  } else {
    typedef __bf16 Eight __attribute__((ext_vector_type(8)));
    d = __builtin_amdgcn_mfma_f32_32x32x16_bf16(__builtin_bit_cast(Eight, a), __builtin_bit_cast(Eight, b), d, 0, 0, 0);
  }
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const MatrixOperand x = {{a.r[2 * i], a.r[2 * i + 1]}}, y = {{b.r[2 * i], b.r[2 * i + 1]}};
    if constexpr (__is_same(T, f16))
      d = __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(MatrixF16, x), __builtin_bit_cast(MatrixF16, y), d, 0, 0, 0);
    else
      d = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(MatrixBf16, x), __builtin_bit_cast(MatrixBf16, y), d, 0, 0, 0);
  }
#endif
#pragma unroll
  for (int i = 0; i < kLargeOut; ++i) c[i] = d[i];
#endif
}

}  // namespace portattn
