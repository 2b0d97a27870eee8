// What the shared kernels need of a CUDA device: thread coordinates, barriers, asynchronous copies, conversions,
// and the few maths instructions whose names differ between vendors. No header is included, so that nvcc and
// NVRTC (which finds none) compile the same text.
#pragma once

#define PA_DEVICE __device__ __forceinline__

namespace portattn {

using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(2) f16 { u16 bits; };
struct alignas(2) bf16 { u16 bits; };

PA_DEVICE int thread_x() { return threadIdx.x; }
PA_DEVICE int block_x() { return blockIdx.x; }
PA_DEVICE int block_y() { return blockIdx.y; }
PA_DEVICE int grid_x() { return gridDim.x; }

PA_DEVICE void block_sync() { __syncthreads(); }

// A value that is the same in every lane of the wave (a hint where the hardware has scalar registers).
template <class T>
PA_DEVICE T uniform(T x) { return x; }

// The block's dynamic shared memory, 128-byte aligned.
PA_DEVICE u8* shared_memory() {
  extern __shared__ __align__(128) u8 portattn_shared[];
  return portattn_shared;
}

PA_DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// A value of 32 bits, or a shared address, that is in a register from here on: neither computed later nor again.
template <class T>
PA_DEVICE T kept(T x) {
  asm volatile("" : "+r"(x));
  return x;
}
PA_DEVICE u8* kept_shared(u8* p) { return static_cast<u8*>(__cvta_shared_to_generic(kept(shared_address(p)))); }

// Starts a copy of 16 bytes to shared memory; only `bytes` of them are read, the rest become zero.
PA_DEVICE void copy_async16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
}
// The same of what nobody reads again: it is the first to leave L2, where tables, lengths and states stay.
constexpr u64 kFirstToLeave = 0x12F0000000000000;  // createpolicy.fractional.L2::evict_first of 1.0, as a constant, which takes no registers
PA_DEVICE void copy_async16_once(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes),
               "l"(kFirstToLeave) : "memory");
}
PA_DEVICE void copy_async16_once(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "l"(kFirstToLeave) : "memory");
}
PA_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of this thread's groups are unfinished.
template <int kPending>
PA_DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// Hints for hardware with scalar registers: a pointer known to be to global memory, and params that are read anew from
// here on instead of being kept.
template <class T>
PA_DEVICE T* in_global(T* p) { return p; }
// An index of 64 bits where `wide`, else of 32.
PA_DEVICE i64 read_index(const void* p, i64 i, bool wide) {
  return wide ? static_cast<const i64*>(p)[i] : static_cast<const i32*>(p)[i];
}
PA_DEVICE i64 read_whole_index(const void* p, i64 i, bool wide) { return read_index(p, i, wide); }
template <class P>
PA_DEVICE const P& anew(const P& params) { return params; }
PA_DEVICE int anew(int x) { return x; }

// Before the barrier that comes before atomic_add_ordered: this thread's writes are for other blocks. Nothing to do
// here, the atomic's release speaks for all that the barrier ordered before it.
PA_DEVICE void publish_to_blocks() {}
// Adds and returns what was there. What the block wrote before its last barrier is visible to whoever sees the sum; what
// others wrote before theirs is visible after it, and to the block after its next barrier.
PA_DEVICE int atomic_add_ordered(int* p, int x) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(x) : "memory");
  return before;
}
// A load that other blocks' writes of this launch are visible to (it goes past L1).
PA_DEVICE float load_shared_by_blocks(const float* p) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}

PA_DEVICE void load4_shared_by_blocks(const float* p, float (&x)[4]) {
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(p) : "memory");
}

// Adds and returns what was there; orders nothing else.
PA_DEVICE int atomic_add(int* p, int x) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(x) : "memory");
  return before;
}

// Launches that overlap (Hopper on): the next one of the stream may begin once every block of this one has said so or ended, if it was
// launched to; it says where it needs the one before complete, which it is then. Elsewhere, and of other launches, both are nothing.
PA_DEVICE void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
PA_DEVICE void await_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

PA_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PA_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PA_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PA_DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
PA_DEVICE float rint_of(float x) { return rintf(x); }

PA_DEVICE float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
PA_DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

// Nearest even; NaN stays NaN.
template <class T>
PA_DEVICE T from_float(float x);
template <>
PA_DEVICE f16 from_float<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
PA_DEVICE bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
PA_DEVICE float from_float<float>(float x) { return x; }
PA_DEVICE float to_float(float x) { return x; }

// Two values in one register, `lo` in the low half.
template <class T>
PA_DEVICE u32 pack2(float lo, float hi);
template <>
PA_DEVICE u32 pack2<f16>(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
template <>
PA_DEVICE u32 pack2<bf16>(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

// Four e4m3fn values as f16, exactly, NaN too: the lower two and the upper two (sm_89 and newer).
PA_DEVICE void halves_of_e4m3(u32 four, u32& low, u32& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(low), "=r"(high) : "r"(four));
}
// Four of the eight bytes of a and b: digit i of `which`, hexadecimal, names byte i's source; 0 to 3 are a's.
PA_DEVICE u32 pick_bytes(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }

// ldmatrix: four 8 x 8 matrices of 16-bit elements; lanes 8i .. 8i + 7 name the rows of matrix i. Lane 4g + c gets
// elements (g, 2c) and (g, 2c + 1) of each; transposed: (2c, g) and (2c + 1, g).
PA_DEVICE void load_matrices(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
PA_DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// movmatrix: an 8 x 8 matrix of 16-bit elements, of which lane 4g + c has (g, 2c) and (g, 2c + 1): it gets (2c, g) and (2c + 1, g).
PA_DEVICE u32 turn_matrix(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// mma.sync m16n8k16: c (4 floats a lane) += a b, float32 accumulation.
PA_DEVICE void multiply_16x8x16(float* c, const u32 (&a)[4], u32 b0, u32 b1, f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
PA_DEVICE void multiply_16x8x16(float* c, const u32 (&a)[4], u32 b0, u32 b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

PA_DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
PA_DEVICE float bits_float(u32 x) { return __uint_as_float(x); }

}  // namespace portattn
