// An AMD compute unit on the host: registers, lanes, memory and counters, as the ISA documents of CDNA 2 to 4 and RDNA 3 and 4
// describe them. instructions.cpp gives the instructions; program.py the decoded programs.
//
// What it is strict about: a loaded register holds garbage until its counter is waited for; registers and LDS begin with garbage;
// every access lies in memory that the launch was given; a wave at a barrier has no LDS access under way; waves and blocks run
// in any order that the caller asks for.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace isa {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr int kAcc = 256;                                      // accumulation registers lie behind the vector registers
constexpr int kVcc = 106, kM0 = 124, kExec = 126;              // as scalar registers
constexpr u32 kGarbage = 0x7fc0beef;                           // NaN in every type

// ---- instructions, as program.py packs them

enum Kind : i64 { kNone, kVector, kScalar, kLiteral, kScc };
struct Operand {
  i64 kind, index, value;   // value: of a literal, 64 bits
  i64 count;                // registers
  i64 negate, absolute;
  i64 sel;                  // SDWA: 0..3 byte, 4..5 word, 6 all; of 16-bit operands of the newer encodings: 5 for .h
  i64 sext;
};
struct Inst {
  i64 pc, next, op, count;
  Operand o[7];
  i64 offset, offset1;
  i64 dpp, dpp_arg, row_mask, bank_mask, bound_ctrl;  // dpp: see Dpp
  i64 dst_sel, dst_unused;                            // SDWA; dst_sel 6: the whole register
  i64 op_sel, op_sel_hi, neg_lo, neg_hi, clamp;
  i64 waits[4];                                       // of kLoads .. kScalarLoads; -1: does not wait
  i64 flags;                                          // kReturns, kDual
  i64 line;                                           // of the listing, for messages
};
enum InstFlags : i64 { kReturns = 1, kDual = 2, kSdwa = 4 };
enum Dpp : i64 { kNoDpp, kQuadPerm, kRowShl, kRowShr, kRowRor, kRowMirror, kRowHalfMirror, kRowShare, kRowXmask };

// ---- state

enum Counter { kLoads, kStores, kShared, kScalarLoads, kCounters };
struct Pending {
  Counter counter;
  int reg;                     // vector register of 64 values, or a scalar one, or -1: nothing comes back
  bool scalar;
  u64 lanes;
  u32 values[64];
  long issue;                  // registers of one instruction return together
};

struct Target {
  int wave;          // lanes
  int generation;    // 9, 11, 12
  bool split;        // loads and stores have their own counters (from gfx10 on)
  bool split_shared; // LDS and scalar loads have their own counters (gfx12)
};

struct Range { u64 begin, end; };

struct Stats {
  i64 instructions;
  i64 load_bytes, store_bytes, wide_loads;   // wide: 16 bytes a lane
  i64 shared_cycles, shared_least;           // by bank arithmetic, and if no two words met in a bank
};

struct Block;
struct Wave {
  Block* block;
  int index;
  u32 s[128];
  u32 v[512 + 1][64];          // one more: where a dual instruction's first half waits
  bool scc = false, done = false;
  u64 pc = 0;
  long issued = 0;
  std::deque<Pending> pending;
};

struct Launch {
  const Target* target;
  std::vector<Range> memory;
  Stats* stats;
  long limit;
};
struct Block {
  const Launch* launch;
  std::vector<u8> lds;
};

[[noreturn]] inline void fail(const std::string& text) { throw std::runtime_error(text); }

struct Machine {
  Wave& w;
  const Launch& launch;
  const int lanes;

  explicit Machine(Wave& wave) : w(wave), launch(*wave.block->launch), lanes(launch.target->wave) {}

  u64 mask_at(int i) const { return lanes == 64 ? w.s[i] | static_cast<u64>(w.s[i + 1]) << 32 : w.s[i]; }
  void set_mask(int i, u64 x) {
    w.s[i] = static_cast<u32>(x);
    if (lanes == 64) w.s[i + 1] = static_cast<u32>(x >> 32);
  }
  u64 exec() const { return mask_at(kExec); }
  bool active(int lane) const { return exec() >> lane & 1; }

  // ---- global memory

  void check(u64 at, int bytes, const char* what) const {
    for (const Range& r : launch.memory)
      if (at >= r.begin && at + bytes <= r.end) return;
    char text[120];
    std::snprintf(text, sizeof text, "%s of %d bytes at %#llx: memory that the launch was not given", what, bytes, static_cast<unsigned long long>(at));
    fail(text);
  }
  template <class T>
  T load(u64 at) const {
    check(at, sizeof(T), "a load");
    T x;
    std::memcpy(&x, reinterpret_cast<const void*>(at), sizeof(T));
    return x;
  }
  template <class T>
  void store(u64 at, T x) const {
    check(at, sizeof(T), "a store");
    std::memcpy(reinterpret_cast<void*>(at), &x, sizeof(T));
  }

  // ---- LDS

  template <class T>
  T shared_load(u64 at) const {
    if (at + sizeof(T) > w.block->lds.size()) fail("an LDS read at " + std::to_string(at) + " of " + std::to_string(w.block->lds.size()));
    T x;
    std::memcpy(&x, w.block->lds.data() + at, sizeof(T));
    return x;
  }
  template <class T>
  void shared_store(u64 at, T x) const {
    if (at + sizeof(T) > w.block->lds.size()) fail("an LDS write at " + std::to_string(at) + " of " + std::to_string(w.block->lds.size()));
    std::memcpy(w.block->lds.data() + at, &x, sizeof(T));
  }
  // Cycles of an access by 32 banks of 4 bytes: words of one bank wait for each other, equal words do not. Wide accesses go in
  // groups of lanes that could fill the banks once.
  void count_banks(const std::vector<std::pair<int, u64>>& at, int bytes) const {
    const int words = std::max(1, bytes / 4), group = std::max(1, 32 / words);
    for (int first = 0; first < lanes; first += group) {
      std::map<int, std::vector<u64>> banks;
      int most = 0;
      for (const auto& [lane, address] : at) {
        if (lane < first || lane >= first + group) continue;
        for (int i = 0; i < words; ++i) {
          const u64 word = address / 4 + i;
          auto& b = banks[static_cast<int>(word % 32)];
          if (std::find(b.begin(), b.end(), word) == b.end()) b.push_back(word);
          most = std::max(most, static_cast<int>(b.size()));
        }
      }
      launch.stats->shared_cycles += most;
      launch.stats->shared_least += most > 0;
    }
  }

  // ---- what comes back later

  void poison(int reg, u64 mask) {
    for (int l = 0; l < lanes; ++l)
      if (mask >> l & 1) w.v[reg][l] = kGarbage;
  }
  void later(Counter c, int reg, const u32 (&values)[64]) {
    Pending p{c, reg, false, exec(), {}, w.issued};
    std::copy(values, values + 64, p.values);
    w.pending.push_back(p);
    poison(reg, p.lanes);
  }
  void later_scalar(int reg, u32 value) {
    Pending p{launch.target->split_shared ? kScalarLoads : kShared, reg, true, 0, {value}, w.issued};
    w.s[reg] = kGarbage;
    w.pending.push_back(p);
  }
  void nothing_later(Counter c) { w.pending.push_back({c, -1, false, 0, {}, w.issued}); }

  // Until at most `left` instructions of a counter are under way. They return in order, but scalar loads in any.
  void wait(Counter c, int left) {
    std::vector<long> issues;
    for (const Pending& p : w.pending)
      if (p.counter == c && (issues.empty() || issues.back() != p.issue)) issues.push_back(p.issue);
    if (static_cast<int>(issues.size()) <= left) return;
    const long last = issues[issues.size() - left - 1];
    std::deque<Pending> rest;
    for (const Pending& p : w.pending) {
      if (p.counter != c || p.issue > last || (p.scalar && left > 0)) {
        rest.push_back(p);
      } else if (p.scalar) {
        w.s[p.reg] = p.values[0];
      } else if (p.reg >= 0) {
        for (int l = 0; l < lanes; ++l)
          if (p.lanes >> l & 1) w.v[p.reg][l] = p.values[l];
      }
    }
    w.pending = std::move(rest);
  }
  bool under_way(Counter c) const {
    return std::any_of(w.pending.begin(), w.pending.end(), [&](const Pending& p) { return p.counter == c && !p.scalar; });
  }
};

using Handler = void (*)(Machine&, const Inst&);
const std::map<std::string, Handler>& handlers();

}  // namespace isa
