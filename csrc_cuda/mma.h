// Matrix tiles on CUDA: mma.sync m16n8k16 and ldmatrix (sm_80 and newer).
//
// The interface that every vendor's mma.h gives: C (16 x 16, float32) += A (16 x 16) B (16 x 16), one wave.
//   Acc        a lane's part of C: element e stands at row(slot_of(e)), column col(e); a lane sees kSlots rows
//   FragA      a lane's part of A; load_a reads row-major shared memory; to_a turns an Acc into an A
//   FragB      a lane's part of B; load_b_rows reads it from memory that holds B's columns as rows (keys of K),
//              load_b_cols from memory that holds B's rows as rows (keys of V). What load_a read is multiplied by what
//              load_b_rows read, and what to_a made by what load_b_cols read: other vendors order k differently in the two
//   store_row  puts a lane's elements of one of its rows into memory
//   row_max, row_sum   combine kSlots values a lane over the lanes that see the same rows
// Shared-memory rows are 16-byte aligned; a pitch that is an odd number of 16 bytes has no bank conflicts.
// Layout (PTX ISA, "Matrix Fragments for mma.m16n8k16"): g = lane / 4, c = lane % 4. Acc: two m16n8 tiles beside
// each other, of each c0 (g, 2c), c1 (g, 2c + 1), c2 (g + 8, 2c), c3 (g + 8, 2c + 1).
#pragma once

#include <warp.h>  // in angle brackets: tests/simt compiles this file with its own warp.h in front

namespace portattn {
namespace mma {

constexpr int kAcc = 8;
constexpr int kSlots = 2;

struct Acc { float x[kAcc]; };
struct FragA { u32 r[4]; };
struct FragB { u32 r[4]; };

PA_DEVICE constexpr int slot_of(int e) { return (e >> 1) & 1; }
PA_DEVICE int row(int slot) { return (warp::lane() >> 2) + 8 * slot; }
PA_DEVICE int col(int e) { return 2 * (warp::lane() & 3) + (e & 1) + 8 * (e >> 2); }

template <class T>
PA_DEVICE void load_a(FragA& a, const T* tile, int pitch) {
  load_matrices(a.r, tile + (warp::lane() & 15) * pitch + (warp::lane() >> 4) * 8);
}
template <class T>
PA_DEVICE void load_b_rows(FragB& b, const T* tile, int pitch) {
  const int lane = warp::lane();
  load_matrices(b.r, tile + ((lane & 7) + (lane >> 4) * 8) * pitch + ((lane >> 3) & 1) * 8);
}
template <class T>
PA_DEVICE void load_b_cols(FragB& b, const T* tile, int pitch) {
  load_matrices_transposed(b.r, tile + (warp::lane() & 15) * pitch + (warp::lane() >> 4) * 8);
}

// The same 16 columns from `column` on of rows of whole 128-byte lines, whose 16-byte pieces the row's number turns: piece i of row r
// lies where piece i ^ r % 8 would. No bank conflicts either.
template <class T>
PA_DEVICE void load_b_rows(FragB& b, const T* tile, int pitch, int column) {
  const int lane = warp::lane();
  load_matrices(b.r, tile + ((lane & 7) + (lane >> 4) * 8) * pitch + ((column / 8 + ((lane >> 3) & 1)) ^ (lane & 7)) * 8);
}
template <class T>
PA_DEVICE void load_b_cols(FragB& b, const T* tile, int pitch, int column) {
  const int lane = warp::lane();
  load_matrices_transposed(b.r, tile + (lane & 15) * pitch + ((column / 8 + (lane >> 4)) ^ (lane & 7)) * 8);
}

template <class T>
PA_DEVICE void multiply(Acc& c, const FragA& a, const FragB& b) {
  multiply_16x8x16(c.x, a.r, b.r[0], b.r[1], T{});
  multiply_16x8x16(c.x + 4, a.r, b.r[2], b.r[3], T{});
}

template <class T>
PA_DEVICE FragA to_a(const Acc& c) {
  return {{pack2<T>(c.x[0], c.x[1]), pack2<T>(c.x[2], c.x[3]), pack2<T>(c.x[4], c.x[5]), pack2<T>(c.x[6], c.x[7])}};
}

// A lane's elements of one of its rows, to the row's 16 floats.
PA_DEVICE void store_row(const Acc& c, int slot, float* to) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    struct alignas(8) Pair { float x[2]; };
    *reinterpret_cast<Pair*>(to + 2 * (warp::lane() & 3) + 8 * half) = {{c.x[4 * half + 2 * slot], c.x[4 * half + 2 * slot + 1]}};
  }
}

// The same in 16 bits, times a factor.
template <class T>
PA_DEVICE void store_row(const Acc& c, int slot, float factor, T* to) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    *reinterpret_cast<u32*>(to + 2 * (warp::lane() & 3) + 8 * half) =
        pack2<T>(c.x[4 * half + 2 * slot] * factor, c.x[4 * half + 2 * slot + 1] * factor);
}

PA_DEVICE void row_max(float (&x)[kSlots]) {
#pragma unroll
  for (int s = 0; s < kSlots; ++s) x[s] = warp::reduce_max<4>(x[s]);
}
PA_DEVICE void row_sum(float (&x)[kSlots]) {
#pragma unroll
  for (int s = 0; s < kSlots; ++s) x[s] = warp::reduce_sum<4>(x[s]);
}

}  // namespace mma
}  // namespace portattn
