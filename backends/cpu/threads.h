// The threads of a call: torch's own OpenMP team while it is awake, else sleepers that are woken for one job at a time and never spin.
// torch's threads spin for a few milliseconds after each of its operations. Others that work meanwhile share their cores with them and take up to twice
// as long; once the team sleeps, a job may wait as many milliseconds for it as it spins (the woken thread is put on the core of the one that waits).
// A second caller at the same time works alone. After fork OpenMP's threads are gone, and its next team would wait for them: the child makes its own.
#pragma once

#include <pthread.h>
#if defined(__linux__)
#include <dlfcn.h>
#include <sched.h>
#include <time.h>
#endif

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace pa {

// The OpenMP that this process has already: libgomp, or libiomp5, which has the same entry. None is linked.
#if defined(__linux__)
class Team {
 public:
  // Runs work() on `threads` threads and returns true; false, and nothing is run, if they sleep or there is no OpenMP.
  template <class Work>
  bool run(int64_t threads, Work& work) {
    if (!parallel_ || (watched_ != kUnknown && !runs(watched_))) return false;
    struct Job {
      Work& work;
      pthread_t caller;
      std::atomic<Clock> clock;
    } job{work, pthread_self(), {kUnknown}};
    auto share = [](void* data) {
      Job& shared = *static_cast<Job*>(data);
      shared.work();
      clockid_t mine;
      if (!pthread_equal(pthread_self(), shared.caller) && !pthread_getcpuclockid(pthread_self(), &mine)) shared.clock = mine;
    };
    parallel_(share, &job, unsigned(threads), 0);  // always as many as torch has: a smaller team would end the others
    watched_ = job.clock;
    return true;
  }

  static Team found() { return Team(reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"))); }
  static Team none() { return Team(nullptr); }

 private:
  using Parallel = void (*)(void (*share)(void*), void* data, unsigned threads, unsigned flags);
  using Clock = int64_t;
  static constexpr Clock kUnknown = INT64_MIN;

  explicit Team(Parallel parallel) : parallel_(parallel) {}

  // Whether a thread, by the clock of its processor time, runs now. A thread that has ended counts as unknown.
  static bool runs(Clock& watched) {
    timespec before, after;
    if (clock_gettime(clockid_t(watched), &before) || clock_gettime(clockid_t(watched), &after)) return watched = kUnknown, true;
    return before.tv_nsec != after.tv_nsec;
  }

  Parallel parallel_;
  static inline thread_local Clock watched_ = kUnknown;  // of one thread of the calling thread's team
};
#else  // elsewhere torch's is LLVM's, which has another entry, not tried
class Team {
 public:
  template <class Work>
  bool run(int64_t, Work&) { return false; }
  static Team found() { return {}; }
  static Team none() { return {}; }
};
#endif

// Where a thread runs. Threads that it wakes are often put there too, though it goes on: they would wait for it, or it for them.
#if defined(__linux__)
struct Place {
  pthread_t thread;
  int processor;

  static Place mine() { return {pthread_self(), sched_getcpu()}; }

  // Moves the thread that calls, if it runs there too, to the other processors that `thread` may use, and keeps it on them.
  void leave() const {
    cpu_set_t others;
    if (processor < 0 || processor >= CPU_SETSIZE || sched_getcpu() != processor || pthread_getaffinity_np(thread, sizeof(others), &others)) return;
    CPU_CLR(processor, &others);
    if (CPU_COUNT(&others)) pthread_setaffinity_np(pthread_self(), sizeof(others), &others);
  }
};
#else
struct Place {
  static Place mine() { return {}; }
  void leave() const {}
};
#endif

class Pool {
 public:
  // Runs work() on the caller and on other threads; returns when all of them are done. `worth`: how many threads the work is worth, of `threads`.
  // work takes its share from a counter, so it is right for any number of threads, and for one. Throws bad_alloc if it does on any of them.
  template <class Work>
  void run(int64_t worth, int64_t threads, Work& work) {
    std::atomic<bool> failed{false};
    auto share = [&] {
      try {
        work();
      } catch (const std::bad_alloc&) {  // another thread's would end the process; the caller's would leave work that others still run
        failed = true;
      }
    };
    deal(worth, threads, share);
    if (failed) throw std::bad_alloc();
  }

  static Pool& instance() {
    static const bool watched = [] {
      pthread_atfork(nullptr, nullptr, [] { pool_ = new Pool(Team::none()); });
      return true;
    }();
    (void)watched;
    return *pool_;
  }

 private:
  explicit Pool(Team team) : team_(team) {}

  template <class Work>
  void deal(int64_t worth, int64_t threads, Work& work) {
    std::unique_lock<std::mutex> mine(calls_, std::try_to_lock);
    if (worth <= 1 || !mine.owns_lock()) return work();
    if (team_.run(threads, work)) return;
    int helpers = int(worth) - 1;
    {
      std::lock_guard<std::mutex> lock(state_);
      try {
        for (; threads_ < helpers; threads_++) std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        helpers = threads_;  // the system gives no more
      }
      call_ = [](void* w) { (*static_cast<Work*>(w))(); };
      work_ = &work;
      caller_ = Place::mine();
      open_ = helpers;
    }
    wake_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(state_);
    open_ = 0;  // who did not wake in time is not waited for
    done_.wait(lock, [this] { return active_ == 0; });
  }

  void serve() {
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      wake_.wait(lock, [this] { return open_ > 0; });
      open_--, active_++;
      auto call = call_;
      void* work = work_;
      const Place caller = caller_;
      lock.unlock();
      caller.leave();
      call(work);
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  Team team_;
  std::mutex calls_, state_;
  std::condition_variable wake_, done_;
  int threads_ = 0, open_ = 0, active_ = 0;
  void (*call_)(void*) = nullptr;
  void* work_ = nullptr;
  Place caller_{};
  static Pool* pool_;  // never freed: its threads sleep until the process ends
};

inline Pool* Pool::pool_ = new Pool(Team::found());

}  // namespace pa
