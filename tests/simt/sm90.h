// csrc_cuda/sm90.h on the host, written from the PTX ISA: matrix products read their tiles through descriptors, and run at
// once where lanes go forward, else as late as they may: when they are waited for. So a stage that is given back too early,
// or read too early, shows.
#pragma once

#include "portattn/online_softmax.h"
#include "warp.h"

namespace portattn {
namespace sm90 {

constexpr int kGroup = 128;
constexpr int kPanel = 64;

inline int place(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
inline u8* shared_tiles() {
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(simt::block()->shared);
  return simt::block()->shared + (1024 - at % 1024) % 1024;
}
constexpr int kAlignment = 1024;  // what shared_tiles may skip

struct alignas(8) Barrier {
  u8 expected, pending;
  u16 phase;
  i32 bytes;  // that are still to come; negative: more came than were asked for yet
};
static_assert(sizeof(Barrier) == 8, "as on the device");

inline void init(Barrier& b, int arrivals) { b = {static_cast<u8>(arrivals), static_cast<u8>(arrivals), 0, 0}; }
inline void init_done() {}
inline void next_phase(Barrier& b) {
  if (b.pending || b.bytes) return;
  b.pending = b.expected;
  ++b.phase;
  for (simt::Block& block : simt::block()->cluster->blocks) block.polls = 0;
}
inline void arrive(Barrier& b, SIMT_HERE) {
  if (b.pending == 0 || b.pending > b.expected) simt::fail("an arrival at a barrier that was not set up, at " + simt::text(here));
  --b.pending;
  next_phase(b);
}
inline void arrive(Barrier& b, int times, SIMT_HERE) {
  for (int i = 0; i < times; ++i) arrive(b, here);
}
inline void expect(Barrier& b, int bytes, SIMT_HERE) {
  b.bytes += bytes;
  arrive(b, here);
}
// A phase's parity: a wait for the parity before the current one succeeds. Of boxes on their way one lands where a lane waits in vain.
inline bool reached(Barrier& b, u32 parity) {
  auto& boxes = simt::block()->boxes;
  if ((b.phase & 1) == parity && !boxes.empty()) {
    auto land = std::move(boxes.front());
    boxes.erase(boxes.begin());
    land();
  }
  return (b.phase & 1) != parity;
}
inline void wait(Barrier& b, u32 parity, SIMT_HERE) {
  while (!reached(b, parity)) simt::yield(here);
}

inline void wait_for_peers(Barrier& b, u32 parity, SIMT_HERE) { wait(b, parity, here); }

inline void cluster_arrive() {
  simt::lane().met_cluster = true;
  ++simt::block()->cluster->arrived;
}
inline void cluster_wait(SIMT_HERE) {
  simt::Cluster& c = *simt::block()->cluster;
  if (!simt::lane().met_cluster) simt::fail("a lane waits for its cluster before it arrives, at " + simt::text(here));
  while (c.arrived < static_cast<long>(c.blocks.size()) * simt::block()->threads) simt::yield(here);
}
using Peer = u8*;
inline Peer peer(const void* p, int rank) {
  simt::Cluster& c = *simt::block()->cluster;
  if (rank < 0 || rank >= static_cast<int>(c.blocks.size())) simt::fail("there is no such block in the cluster");
  return c.blocks[rank].shared + (static_cast<const u8*>(p) - simt::block()->shared);
}
inline void send4(Peer to, const float (&x)[4], Peer barrier, SIMT_HERE) {
  simt::Cluster& c = *simt::block()->cluster;
  if (c.arrived < static_cast<long>(c.blocks.size()) * simt::block()->threads) simt::fail("sent to a block that may not be there yet, at " + simt::text(here));
  for (simt::Block& b : c.blocks)
    if (b.shared <= to && to < b.memory.data() + b.memory.size()) {
      bool left = false;
      for (simt::Lane& l : b.lanes) left |= !l.done;
      if (!left) simt::fail("sent to a block that has ended, at " + simt::text(here));
    }
  std::memcpy(to, x, 16);
  Barrier& b = *reinterpret_cast<Barrier*>(barrier);
  b.bytes -= 16;
  next_phase(b);
}

template <int kThreads>
inline long come(int id) {
  simt::Named& n = simt::block()->named[id];
  const long generation = n.generation;
  if (++n.arrived == kThreads) {
    n.arrived = 0;
    ++n.generation;
    simt::block()->polls = 0;
  }
  return generation;
}
template <int kThreads>
inline void meet(int id, SIMT_HERE) {
  const long generation = come<kThreads>(id);
  while (simt::block()->named[id].generation == generation) simt::yield(here);
}
template <int kThreads>
inline void pass(int id) { come<kThreads>(id); }

inline void arrive_when_copied(Barrier& b, SIMT_HERE) {
  copy_commit();
  copy_wait<0>();
  arrive(b, here);
}
inline void engines_see_writes() {}

// What `encode` below writes, as large as cuda.h's.
struct alignas(64) TensorMap {
  const u8* base;
  u64 shape[4], strides[4];  // the innermost axis first; strides in bytes
  u32 box[4];
  u32 bytes;  // of an element; 16 bits are swizzled
  u8 rest[20];
};
static_assert(sizeof(TensorMap) == 128, "as cuda.h's");
inline void prefetch(const TensorMap&) {}

// The CUDA driver's cuTensorMapEncodeTiled, of maps with four axes of 16-bit elements, swizzled, or of bytes: says 1 (invalid value) as its documentation has it.
inline int encode(TensorMap* map, int type, u32 rank, const void* base, const u64* shape, const u64* strides, const u32* box, const u32* steps,
                  int interleave, int swizzle, int promotion, int fill) {
  const auto at = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
  if (at(map) % 64 || at(base) % 16 || rank != 4 || (type && type != 6 && type != 9) || interleave || swizzle != (type ? 3 : 0) || promotion > 3 || fill)
    return 1;
  const u32 bytes = type ? 2 : 1;
  *map = {static_cast<const u8*>(base), {}, {bytes}, {}, bytes, {}};
  for (int i = 0; i < 4; ++i) {
    if (!shape[i] || shape[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return 1;
    if (i < 3 && (strides[i] % 16 || strides[i] >= 1ull << 40)) return 1;
    map->shape[i] = shape[i];
    map->box[i] = box[i];
    if (i < 3) map->strides[i + 1] = strides[i];
  }
  return type ? box[0] * 2 > 128 : box[0] % 16 != 0;  // a box's rows are the swizzle's at most; else multiples of 16 bytes
}

// Calls with each element of a box: where it lies in shared memory, and where in the tensor, or null outside.
template <class F>
inline void each_of_box(const TensorMap& map, const i64 (&at)[4], u8* panel, F element) {
  for (u32 r = 0; r < map.box[1] * map.box[2] * map.box[3]; ++r)
    for (u32 c = 0; c < map.box[0]; ++c) {
      const i64 place[4] = {at[0] + c, at[1] + r % map.box[1], at[2] + r / map.box[1] % map.box[2], at[3] + r / map.box[1] / map.box[2]};
      bool inside = true;
      i64 offset = 0;
      for (int i = 0; i < 4; ++i) {
        inside &= place[i] >= 0 && place[i] < static_cast<i64>(map.shape[i]);
        offset += place[i] * static_cast<i64>(map.strides[i]);
      }
      element(panel + (map.bytes == 2 ? sm90::place(r, c / 8) + c % 8 * 2 : r * map.box[0] + c), inside ? const_cast<u8*>(map.base) + offset : nullptr);
    }
}
inline void check_box(const TensorMap& map, const void* shared, simt::Place here) {
  if ((static_cast<const u8*>(shared) - shared_tiles()) % (map.bytes == 2 ? 1024 : 128)) simt::fail("a box that does not begin where the swizzle does, at " + simt::text(here));
}

inline void copy_box(void* shared, const TensorMap& map, int column, int y, int z, int w, Barrier& b, SIMT_HERE) {
  check_box(map, shared, here);
  auto land = [=, &map, &b] {
    each_of_box(map, {column, y, z, w}, static_cast<u8*>(shared), [&map](u8* here, const u8* there) {
      if (there) std::memcpy(here, there, map.bytes);
      else std::memset(here, 0, map.bytes);
    });
    b.bytes -= static_cast<i32>(map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.bytes);
    next_phase(b);
  };
  if (simt::block()->order == simt::kForward) land();
  else simt::block()->boxes.push_back(land);
}
// A store reads shared memory as late as it may: when it is waited for, unless lanes go forward.
inline void store_box(const TensorMap& map, int column, int y, int z, int w, const void* shared, SIMT_HERE) {
  check_box(map, shared, here);
  auto read = [=, &map] {
    each_of_box(map, {column, y, z, w}, const_cast<u8*>(static_cast<const u8*>(shared)), [&map](const u8* here, u8* there) {
      if (there) std::memcpy(there, here, map.bytes);
    });
  };
  if (simt::block()->order == simt::kForward) read();
  else simt::lane().stores.push_back(read);
}
inline void stores_commit() {}
inline void stores_read() {
  for (auto& read : simt::lane().stores) read();
  simt::lane().stores.clear();
}

// PTX ISA, stmatrix .m8n8 .x4: lane l holds of matrix i row l / 4, elements 2 (l % 4) and the next; lane 8i + r names row r of matrix i.
inline void store_matrices(void* row, const u32 (&r)[4], SIMT_HERE) {
  if (reinterpret_cast<std::uintptr_t>(row) % 16) simt::fail("stmatrix: a row is not 16-byte aligned, at " + simt::text(here));
  const int lane = thread_x() % 32;
  auto rows = simt::exchange(simt::block()->warps[thread_x() / 32], lane, row, here);
  for (int i = 0; i < 4; ++i) std::memcpy(static_cast<u8*>(rows(8 * i + lane / 4)) + 4 * (lane % 4), &r[i], 4);
}

inline u32 larger_halves(u32 a, u32 b) { return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff); }

template <int kRegisters>
inline void give_registers() {}
template <int kRegisters>
inline void take_registers() {}

inline simt::Group& group() { return simt::block()->quads[thread_x() / kGroup]; }

inline u64 tile_at(const void* p, int leading = 16) {
  const u64 at = static_cast<const u8*>(p) - shared_tiles();
  if (at % 128) simt::fail("a tile that is not aligned");
  return (at >> 4) | static_cast<u64>(leading >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

inline u64 anew(u64 tile) { return tile; }

// Element at `bytes` from a descriptor's begin, before the swizzle of address bits 4..6 by bits 7..9.
template <class T>
inline float element(u64 descriptor, i64 bytes) {
  const i64 at = ((descriptor & 0x3fff) << 4) + bytes;
  return to_float(*reinterpret_cast<const T*>(shared_tiles() + (at ^ (at >> 3 & 0x70))));
}

inline void begin_product(std::function<void()> product) {
  if (simt::block()->order == simt::kForward) product();
  else simt::lane().begun.push_back(std::move(product));
}
inline void products_begin(SIMT_HERE) { simt::meet(group(), here); }
inline void products_commit() {
  simt::lane().products.push_back(std::move(simt::lane().begun));
  simt::lane().begun.clear();
}
template <int kPending>
inline void products_wait(SIMT_HERE) {
  auto& groups = simt::lane().products;
  while (static_cast<int>(groups.size()) > kPending) {
    for (auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  simt::meet(simt::block()->warps[thread_x() / 32], here);
}
template <int kN>
inline void pin(float (&)[kN]) {}

// K-major operands (PTX ISA, "Strides"): row r at (r / 8) x the descriptor's stride + r % 8 x 128 bytes, k at 2 bytes each.
template <int kN, class T>
inline void multiply_rows(float (&c)[kN / 2], u64 a, u64 b, bool add, SIMT_HERE) {
  simt::meet(group(), here);
  const int t = thread_x() % kGroup, stride = static_cast<int>(b >> 32 & 0x3fff) << 4;
  float* to = c;
  begin_product([=] {
    for (int i = 0; i < kN / 2; ++i) {
      const int m = 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2), n = 8 * (i / 4) + 2 * (t % 4) + i % 2;
      float sum = add ? to[i] : 0.0f;
      for (int k = 0; k < 16; ++k)
        sum += element<T>(a, m / 8 * stride + m % 8 * 128 + 2 * k) * element<T>(b, n / 8 * stride + n % 8 * 128 + 2 * k);
      to[i] = sum;
    }
  });
}

// A in registers as mma.m16n8k16's (tests/simt/vendor.h); B, MN-major: 64 columns beside each other, the next 64 at the
// leading distance, row k at (k / 8) x stride + k % 8 x 128 bytes.
template <int kN, class T>
inline void multiply_columns(float (&c)[kN / 2], const u32 (&a)[4], u64 b, SIMT_HERE) {
  struct Operand { u32 x[4]; } mine = {{a[0], a[1], a[2], a[3]}};
  const int t = thread_x() % kGroup, leading = static_cast<int>(b >> 16 & 0x3fff) << 4, stride = static_cast<int>(b >> 32 & 0x3fff) << 4;
  auto of = simt::exchange(group(), t, mine, here);
  struct Rows { float x[2][16]; } rows;
  for (int r = 0; r < 2; ++r)
    for (int k = 0; k < 16; ++k)
      rows.x[r][k] = to_float(T{static_cast<u16>(of(t / 4 * 4 + k % 8 / 2).x[2 * (k / 8) + r] >> (16 * (k % 2)))});
  float* to = c;
  begin_product([=] {
    for (int i = 0; i < kN / 2; ++i) {
      const int n = 8 * (i / 4) + 2 * (t % 4) + i % 2;
      for (int k = 0; k < 16; ++k)
        to[i] += rows.x[i / 2 % 2][k] * element<T>(b, n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2);
    }
  });
}

}  // namespace sm90
}  // namespace portattn
