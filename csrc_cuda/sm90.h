// What prefill_sm90.h and plain.h need of Hopper besides warp.h: barriers that count arrivals and bytes (mbarrier) or threads (bar) and
// clusters and boxes by the copy engine (TMA), which newer architectures have too; and for sm_90a alone matrix products of a warpgroup on shared memory (wgmma), the fence
// between ordinary stores and the matrix units, and register budgets (setmaxnreg). tests/simt has the same names for a CPU.
//
// Tiles     A tile of r rows of 16-bit elements lies in panels of 64 columns; a panel is r rows of 128 bytes, 1024-byte
//           aligned, whose 16-byte chunk c of row i stands at place c ^ (i % 8) (the 128-byte swizzle). `place` is that.
// Products  C (64 x N, float32) += A (64 x 16) B (16 x N); warpgroup lane t holds of C the elements [4j + e], e = 0..3:
//           row 16 (t / 32) + t % 32 / 4 + 8 (e / 2), column 8j + 2 (t % 4) + e % 2. A in registers is laid out as an
//           mma.m16n8k16 A operand; so are C's elements [8k, 8k + 8), packed in pairs.
//           multiply_rows: A and B in shared memory, B's tile has B's columns as rows (keys of K).
//           multiply_columns: A in registers, B's tile has B's rows as rows (keys of V).
// Source    PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Operation".
#pragma once

#include "portattn/online_softmax.h"
#include "vendor.h"

namespace portattn {
namespace sm90 {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kPanel = 64;   // columns of a panel

// Bytes from the panel's begin to a 16-byte chunk of a row.
PA_DEVICE int place(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Dynamic shared memory where swizzled tiles can stand.
PA_DEVICE u8* shared_tiles() {
  extern __shared__ __align__(1024) u8 portattn_shared_tiles[];
  return portattn_shared_tiles;
}

// ---- barriers

struct alignas(8) Barrier { u64 state; };

PA_DEVICE void init(Barrier& b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&b)), "r"(arrivals) : "memory");
}
PA_DEVICE void init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }  // before the block's barrier
PA_DEVICE void arrive(Barrier& b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&b)) : "memory"); }
PA_DEVICE void arrive(Barrier& b, int times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)), "r"(times) : "memory");
}
// Whether the phase of this parity is over.
PA_DEVICE bool reached(Barrier& b, u32 parity) {
  u32 yes;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(yes) : "r"(shared_address(&b)), "r"(parity) : "memory");
  return yes != 0;
}
PA_DEVICE void wait(Barrier& b, u32 parity) {
  while (!reached(b, parity)) {}
}

// ---- clusters

// Every thread of a cluster arrives once and waits once: after the wait, what was before the others' arrivals has happened.
PA_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
PA_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Where a block of the cluster, by its rank, has what this block has at `p`; and bytes behind.
using Peer = u32;
PA_DEVICE Peer peer(const void* p, int rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  return there;
}
// Sends 16 bytes, which count at the barrier beside them.
PA_DEVICE void send4(Peer to, const float (&x)[4], Peer barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
               ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier) : "memory");
}
// Arrives, and has the phase last until so many bytes have come too.
PA_DEVICE void expect(Barrier& b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)), "r"(bytes) : "memory");
}
// As wait, and what peers sent is there.
PA_DEVICE void wait_for_peers(Barrier& b, u32 parity) {
  u32 yes;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(yes) : "r"(shared_address(&b)), "r"(parity) : "memory");
  } while (!yes);
}

// ---- barriers of threads

// `threads` threads meet at barrier `id` (1..15): those that call meet wait for the others, those that call pass do not.
template <int kThreads>
PA_DEVICE void meet(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory"); }
template <int kThreads>
PA_DEVICE void pass(int id) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory"); }

// Arrives, some time later, when the copies are done that this thread began (copy_async16).
PA_DEVICE void arrive_when_copied(Barrier& b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&b)) : "memory");
}
// The copy engine: boxes of a tensor of four axes, the innermost first, each as rows of one panel; what lies outside of the tensor is zeros.
struct alignas(64) TensorMap { u64 encoded[16]; };  // cuda.h's CUtensorMap
PA_DEVICE void prefetch(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// Begins to copy the box at these coordinates, the innermost axis first; its bytes count at the barrier.
PA_DEVICE void copy_box(void* shared, const TensorMap& map, int column, int y, int z, int w, Barrier& b) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5}], [%6];"
               ::"r"(shared_address(shared)), "l"(&map), "r"(column), "r"(y), "r"(z), "r"(w), "r"(shared_address(&b)) : "memory");
}
// Begins to write a box; after stores_read, what it had been in shared memory may be written over.
PA_DEVICE void store_box(const TensorMap& map, int column, int y, int z, int w, const void* shared) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1,%2,%3,%4}], [%5];"
               ::"l"(&map), "r"(column), "r"(y), "r"(z), "r"(w), "r"(shared_address(shared)) : "memory");
}
PA_DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
PA_DEVICE void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // of this thread's

// Four 8 x 8 matrices of 16-bit elements, laid out as accumulators packed in pairs; lane 8i + r names row r of matrix i.
PA_DEVICE void store_matrices(void* row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// In threads that wrote to shared memory, or copied (copy_async16), before the barrier that tells of it: that is before the products and the stores
// of boxes that come after the barrier.
PA_DEVICE void engines_see_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Of two pairs of unsigned 16-bit numbers the larger ones.
PA_DEVICE u32 larger_halves(u32 a, u32 b) {
  u32 y;
  asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Registers a thread of this warpgroup may have from here on.
template <int kRegisters>
PA_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
PA_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// ---- products

// A tile's descriptor; one product later, `+ (bytes >> 4)`. leading: bytes between panels, of multiply_columns.
PA_DEVICE u64 tile_at(const void* p, int leading = 16) {
  return static_cast<u64>(shared_address(p) >> 4) | static_cast<u64>(leading >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// The same descriptor, of which the compiler knows the upper half alone: what is computed from it is not kept in registers.
PA_DEVICE u64 anew(u64 tile) {
  u32 low = static_cast<u32>(tile);
  asm volatile("" : "+r"(low));
  return (tile & ~0xffffffffull) | low;
}

// Registers written before are for the products after.
PA_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PA_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the committed groups are unfinished.
template <int kPending>
PA_DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }
// Products in flight write these registers: no use of them moves over this point.
template <int kN>
PA_DEVICE void pin(float (&x)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int kN> struct Product;

#define PA_O(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define PA_R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define PA_R1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define PA_R2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define PA_R3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define PA_R4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define PA_R5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define PA_R6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define PA_R7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define PA_R8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define PA_R9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define PA_R10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define PA_R11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define PA_R12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define PA_R13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define PA_R14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define PA_R15 "%120,%121,%122,%123,%124,%125,%126,%127"

// Lists of registers: of N columns, N / 2.
#define PA_C64 PA_R0 "," PA_R1 "," PA_R2 "," PA_R3
#define PA_C80 PA_C64 "," PA_R4
#define PA_C96 PA_C80 "," PA_R5
#define PA_C128 PA_C96 "," PA_R6 "," PA_R7
#define PA_C112 PA_C96 "," PA_R6
#define PA_C160 PA_C128 "," PA_R8 "," PA_R9
#define PA_C192 PA_C160 "," PA_R10 "," PA_R11
#define PA_C256 PA_C192 "," PA_R12 "," PA_R13 "," PA_R14 "," PA_R15
#define PA_O64 PA_O(d, 0), PA_O(d, 8), PA_O(d, 16), PA_O(d, 24)
#define PA_O80 PA_O64, PA_O(d, 32)
#define PA_O96 PA_O80, PA_O(d, 40)
#define PA_O128 PA_O96, PA_O(d, 48), PA_O(d, 56)
#define PA_O112 PA_O96, PA_O(d, 48)
#define PA_O160 PA_O128, PA_O(d, 64), PA_O(d, 72)
#define PA_O192 PA_O160, PA_O(d, 80), PA_O(d, 88)
#define PA_O256 PA_O192, PA_O(d, 96), PA_O(d, 104), PA_O(d, 112), PA_O(d, 120)

// N0 to N4: the operands behind them.
#define PA_ROWS(N, TYPE, N0, N1, N2)                                                                                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " N2 ", 0;\n"                                                           \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PA_C##N "}, " N0 ", " N1              \
               ", p, 1, 1, 0, 0;\n}" : PA_O##N : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define PA_COLUMNS(N, TYPE, N0, N1, N2, N3, N4)                                                                          \
  asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                                                \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PA_C##N "}, "                         \
               "{" N0 "," N1 "," N2 "," N3 "}, " N4 ", p, 1, 1, 1;\n}"                                                    \
               : PA_O##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PA_PRODUCT(N, N0, N1, N2, N3, N4)                                                                                \
  template <> struct Product<N> {                                                                                        \
    static PA_DEVICE void rows(float (&d)[N / 2], u64 a, u64 b, bool add, bf16) { PA_ROWS(N, "bf16", N0, N1, N2); }       \
    static PA_DEVICE void rows(float (&d)[N / 2], u64 a, u64 b, bool add, f16) { PA_ROWS(N, "f16", N0, N1, N2); }         \
    static PA_DEVICE void columns(float (&d)[N / 2], const u32 (&a)[4], u64 b, bf16) {                                   \
      PA_COLUMNS(N, "bf16", N0, N1, N2, N3, N4);                                                                         \
    }                                                                                                                    \
    static PA_DEVICE void columns(float (&d)[N / 2], const u32 (&a)[4], u64 b, f16) {                                    \
      PA_COLUMNS(N, "f16", N0, N1, N2, N3, N4);                                                                          \
    }                                                                                                                    \
  };
PA_PRODUCT(64, "%32", "%33", "%34", "%35", "%36")
PA_PRODUCT(80, "%40", "%41", "%42", "%43", "%44")
PA_PRODUCT(96, "%48", "%49", "%50", "%51", "%52")
PA_PRODUCT(112, "%56", "%57", "%58", "%59", "%60")
PA_PRODUCT(128, "%64", "%65", "%66", "%67", "%68")
PA_PRODUCT(160, "%80", "%81", "%82", "%83", "%84")
PA_PRODUCT(192, "%96", "%97", "%98", "%99", "%100")
PA_PRODUCT(256, "%128", "%129", "%130", "%131", "%132")
#undef PA_PRODUCT
#undef PA_COLUMNS
#undef PA_ROWS
#undef PA_O
#undef PA_C64
#undef PA_C80
#undef PA_C96
#undef PA_C112
#undef PA_C128
#undef PA_C160
#undef PA_C192
#undef PA_C256
#undef PA_O64
#undef PA_O80
#undef PA_O96
#undef PA_O112
#undef PA_O128
#undef PA_O160
#undef PA_O192
#undef PA_O256
#undef PA_R0
#undef PA_R1
#undef PA_R2
#undef PA_R3
#undef PA_R4
#undef PA_R5
#undef PA_R6
#undef PA_R7
#undef PA_R8
#undef PA_R9
#undef PA_R10
#undef PA_R11
#undef PA_R12
#undef PA_R13
#undef PA_R14
#undef PA_R15

// C (+)= A B: begun, not finished.
template <int kN, class T>
PA_DEVICE void multiply_rows(float (&c)[kN / 2], u64 a, u64 b, bool add) { Product<kN>::rows(c, a, b, add, T{}); }
template <int kN, class T>
PA_DEVICE void multiply_columns(float (&c)[kN / 2], const u32 (&a)[4], u64 b) { Product<kN>::columns(c, a, b, T{}); }

}  // namespace sm90
}  // namespace portattn
