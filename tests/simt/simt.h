// A device on the host: every lane of a block is a fiber, so that the shared kernels run as they are, one block (or cluster
// of blocks) after the other, under a debugger or a sanitizer.
//
// What it is strict about: a barrier or collective that some lanes miss, or that lanes of one wave reach at different
// places, ends the run with the places (file and line); shared memory starts as NaN; asynchronous copies land when
// they are waited for, or, where lanes go in reverse, as soon as they are started; lanes run in forward, reverse or random
// order between barriers. In random order copies land at either time, waves fall asleep, and of a cluster some blocks begin late.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef SIMT_WAVE
#define SIMT_WAVE 32
#endif

namespace simt {

struct Place {
  const char* file;
  int line;
};
inline bool operator==(Place a, Place b) { return a.line == b.line && !std::strcmp(a.file, b.file); }
#define SIMT_HERE ::simt::Place here = {__builtin_FILE(), __builtin_LINE()}

[[noreturn]] inline void fail(const std::string& text) { throw std::runtime_error(text); }
inline std::string text(Place p) { return std::string(p.file) + ":" + std::to_string(p.line); }

enum Order { kForward, kReverse, kRandom };

constexpr int kMaxPayload = 64;  // bytes a lane gives to a collective

// Lanes that meet: a block, a wave, or a logical warp of 32.
struct Group {
  std::vector<int> lanes;
  int arrived = 0;
  long generation = 0;
  Place place{nullptr, 0};
  std::vector<std::uint8_t> payload[2];  // of even and odd generations: a lane can be one ahead of another, not two
};

// Threads that meet at a numbered barrier, some without waiting.
struct Named {
  int arrived = 0;
  long generation = 0;
};

struct Copy {
  void* to;
  std::uint8_t bytes[16];
};

struct Lane {
  ucontext_t context;
  std::unique_ptr<std::uint8_t[]> stack;
  bool done = false;
  Group* waits = nullptr;
  long until = 0;
  Place place{nullptr, 0};
  std::vector<std::vector<Copy>> groups;  // committed
  std::vector<Copy> open;
  std::vector<std::vector<std::function<void()>>> products;  // committed, begun and not yet done
  std::vector<std::function<void()>> begun;
  std::vector<std::function<void()>> stores;  // of boxes, that have not read shared memory yet
  bool met_cluster = false;
  void* fake_stack = nullptr;
};

constexpr std::size_t kStack = 256 << 10;

struct Cluster;
struct Block {
  int index = 0, grid_x = 1, threads = 0;
  std::vector<Lane> lanes;
  std::vector<std::uint8_t> memory;
  std::uint8_t* shared = nullptr;
  Group all;
  std::vector<Group> waves, warps, quads;  // quads: of four warps
  std::vector<int> asleep;                 // passes for which a wave does not go on, in random order
  Named named[16];
  std::vector<std::function<void()>> boxes;  // that the copy engine has yet to bring
  long polls = 0;  // of lanes that look again and again, since one of them last found something
  Order order = kForward;
  ucontext_t scheduler;
  void* scheduler_fake = nullptr;
  const void* scheduler_stack = nullptr;
  std::size_t scheduler_size = 0;
  int current = 0;
  const std::function<void()>* body = nullptr;
  Cluster* cluster = nullptr;
  std::string error;
};
// Blocks that run at the same time and reach each other's shared memory; most launches have clusters of one.
struct Cluster {
  std::vector<Block> blocks;
  long arrived = 0;
};

inline Block*& block() {
  static thread_local Block* b = nullptr;
  return b;
}
inline Lane& lane() { return block()->lanes[block()->current]; }

inline void to_scheduler(bool last) {
  Block& b = *block();
  Lane& l = lane();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &l.fake_stack, b.scheduler_stack, b.scheduler_size);
#endif
  swapcontext(&l.context, &b.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(l.fake_stack, &b.scheduler_stack, &b.scheduler_size);
#endif
}

inline void lane_main() {
  Block& b = *block();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &b.scheduler_stack, &b.scheduler_size);
#endif
  try {
    (*b.body)();
    if (!lane().open.empty()) fail("a lane ended with copies that it never committed");
  } catch (const std::exception& e) {
    if (b.error.empty()) b.error = e.what();
  }
  lane().done = true;
  to_scheduler(true);
}

// All lanes of the group meet here; returns the generation that they met in.
inline long meet(Group& g, Place here) {
  Block& b = *block();
  Lane& l = lane();
  if (g.arrived && !(g.place == here))
    fail("divergent collective: lane " + std::to_string(b.current) + " is at " + text(here) + ", another of its group at " + text(g.place));
  g.place = here;
  const long generation = g.generation;
  if (++g.arrived == static_cast<int>(g.lanes.size())) {
    g.arrived = 0;
    ++g.generation;
    return generation;
  }
  l.waits = &g;
  l.until = generation + 1;
  l.place = here;
  to_scheduler(false);
  if (!b.error.empty()) fail("stopped");
  return generation;
}

// A lane that polls lets the others go on.
inline void yield(Place here) {
  Block& b = *block();
  lane().place = here;
  if (++b.polls > 4000L * b.threads) fail("a lane polls for what never comes at " + text(here));
  to_scheduler(false);
  if (!b.error.empty()) fail("stopped");
}

// Every lane gives a value; `read(i)` then gives that of the group's lane i.
template <class T>
struct Exchange {
  const std::uint8_t* all;
  T operator()(int i) const {
    T x;
    std::memcpy(&x, all + i * kMaxPayload, sizeof(T));
    return x;
  }
};
template <class T>
Exchange<T> exchange(Group& g, int i, const T& x, Place here) {
  static_assert(sizeof(T) <= kMaxPayload, "a larger payload");
  auto& payload = g.payload[g.generation & 1];
  std::memcpy(payload.data() + i * kMaxPayload, &x, sizeof(T));
  meet(g, here);
  return {payload.data()};
}

// Every lane that can go on does, until it waits; says whether one could.
inline bool advance(Block& b, Order order, std::mt19937& random) {
  std::vector<int> turn(b.threads);
  for (int i = 0; i < b.threads; ++i) turn[i] = order == kReverse ? b.threads - 1 - i : i;
  if (order == kRandom) {
    std::shuffle(turn.begin(), turn.end(), random);
    for (int& passes : b.asleep) passes = passes ? passes - 1 : random() % 64 ? 0 : static_cast<int>(random() % 100);
  }
  block() = &b;
  bool moved = false;
  for (int i : turn) {
    Lane& l = b.lanes[i];
    if (b.asleep[i / SIMT_WAVE] && b.error.empty()) continue;
    if (l.done || (l.waits && l.waits->generation < l.until && b.error.empty())) continue;
    moved = true;
    l.waits = nullptr;
    b.current = i;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&b.scheduler_fake, l.stack.get(), kStack);
#endif
    swapcontext(&b.scheduler, &l.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(b.scheduler_fake, nullptr, nullptr);
#endif
  }
  if (!moved)
    for (int& passes : b.asleep) {
      moved |= passes > 0;
      passes = 0;
    }
  return moved;
}

// Returns the first error, or "".
inline std::string run_cluster(Cluster& c, Order order, std::mt19937& random) {
  std::vector<int> turn(c.blocks.size()), begins(c.blocks.size(), 0);
  int round = 0;
  if (order == kRandom)
    for (int& b : begins) b = static_cast<int>(random() % 3 ? 0 : random() % 2000);
  for (std::size_t i = 0; i < turn.size(); ++i) turn[i] = static_cast<int>(order == kReverse ? turn.size() - 1 - i : i);
  for (;;) {
    if (order == kRandom) std::shuffle(turn.begin(), turn.end(), random);
    bool moved = false, left = false;
    std::string error;
    for (int i : turn)
      if (round >= begins[i]) moved |= advance(c.blocks[i], order, random);
    if (!moved && std::any_of(begins.begin(), begins.end(), [&](int b) { return b > round; })) {
      std::fill(begins.begin(), begins.end(), 0);  // the others wait for the late ones
      continue;
    }
    ++round;
    for (Block& b : c.blocks) {
      for (Lane& l : b.lanes) left |= !l.done;
      if (error.empty()) error = b.error;
    }
    if (!error.empty())
      for (Block& b : c.blocks) b.error = error;  // all lanes end
    if (!left) return error;
    if (moved) continue;
    std::string where;
    for (std::size_t i = 0; i < c.blocks.size(); ++i)
      for (int n = 0; n < c.blocks[i].threads && where.size() < 500; ++n)
        if (!c.blocks[i].lanes[n].done)
          where += (i ? " block " + std::to_string(i) : std::string()) + " lane " + std::to_string(n) + " at " + text(c.blocks[i].lanes[n].place) + ";";
    c.blocks[0].error = "lanes wait for others that never come:" + where;
  }
}

// Runs `body` for every lane of every block; `cluster` blocks of a column together. Returns the first error, or "".
inline std::string launch(int grid_x, int grid_y, int threads, int shared_bytes, Order order, unsigned seed, const std::function<void()>& body,
                          int cluster = 1) {
  std::mt19937 random(seed);
  const int grid = grid_x * grid_y / cluster;
  std::vector<int> turn(grid);
  for (int i = 0; i < grid; ++i) turn[i] = order == kReverse ? grid - 1 - i : i;
  if (order == kRandom) std::shuffle(turn.begin(), turn.end(), random);
  Cluster c;
  c.blocks.resize(cluster);
  for (Block& b : c.blocks) {
    b.cluster = &c;
    b.grid_x = grid_x;
    b.threads = threads;
    b.body = &body;
    b.order = order;
    b.lanes.resize(threads);
    for (Lane& l : b.lanes) l.stack.reset(new std::uint8_t[kStack]);
    auto group = [&](Group& g, int from, int n) {
      for (int i = 0; i < n; ++i) g.lanes.push_back(from + i);
      for (auto& p : g.payload) p.resize(static_cast<std::size_t>(n) * kMaxPayload);
    };
    group(b.all, 0, threads);
    b.waves.resize(threads / SIMT_WAVE);
    b.asleep.assign(threads / SIMT_WAVE, 0);
    for (std::size_t w = 0; w < b.waves.size(); ++w) group(b.waves[w], static_cast<int>(w) * SIMT_WAVE, SIMT_WAVE);
    b.warps.resize(threads / 32);
    for (std::size_t w = 0; w < b.warps.size(); ++w) group(b.warps[w], static_cast<int>(w) * 32, 32);
    b.quads.resize(threads / 128);
    for (std::size_t w = 0; w < b.quads.size(); ++w) group(b.quads[w], static_cast<int>(w) * 128, 128);
  }
  std::string error;
  for (int n : turn) {
    c.arrived = 0;
    for (int rank = 0; rank < cluster; ++rank) {
      Block& b = c.blocks[rank];
      b.index = n % grid_x + (n / grid_x * cluster + rank) * grid_x;
      b.polls = 0;
      for (Named& x : b.named) x = {};
      b.boxes.clear();
      // A block of its own for each run, exactly as large as asked for: an overrun is a sanitizer's finding.
      b.memory = std::vector<std::uint8_t>(shared_bytes + 128, 0xff);
      b.shared = b.memory.data() + (128 - reinterpret_cast<std::uintptr_t>(b.memory.data()) % 128) % 128;
      for (Lane& l : b.lanes) {
        l.done = l.met_cluster = false;
        l.waits = nullptr;
        l.groups.clear();
        l.open.clear();
        l.products.clear();
        l.begun.clear();
        getcontext(&l.context);
        l.context.uc_stack.ss_sp = l.stack.get();
        l.context.uc_stack.ss_size = kStack;
        l.context.uc_link = nullptr;
        makecontext(&l.context, lane_main, 0);
      }
    }
    error = run_cluster(c, order, random);
    if (!error.empty()) break;
  }
  block() = nullptr;
  return error;
}

}  // namespace simt
