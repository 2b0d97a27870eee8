// The threads of a call: sleepers that are woken for one job at a time and never spin.
// A second caller at the same time works alone; after fork the child starts with none and makes its own.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace pa {

class Pool {
 public:
  // Runs work() on the caller and on up to `helpers` other threads; returns when all of them are done.
  // work takes its share from a counter, so it is right for any number of threads, and for one.
  template <class Work>
  void run(int helpers, Work& work) {
    std::unique_lock<std::mutex> mine(calls_, std::try_to_lock);
    if (helpers <= 0 || !mine.owns_lock()) return work();
    {
      std::lock_guard<std::mutex> lock(state_);
      try {
        for (; threads_ < helpers; threads_++) std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        helpers = threads_;  // the system gives no more
      }
      call_ = [](void* w) { (*static_cast<Work*>(w))(); };
      work_ = &work;
      open_ = helpers;
    }
    wake_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(state_);
    open_ = 0;  // who did not wake in time is not waited for
    done_.wait(lock, [this] { return active_ == 0; });
  }

  static Pool& instance() {
    static const bool watched = [] {
      pthread_atfork(nullptr, nullptr, [] { pool_ = new Pool; });  // the parent's threads do not exist in the child
      return true;
    }();
    (void)watched;
    return *pool_;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      wake_.wait(lock, [this] { return open_ > 0; });
      open_--, active_++;
      auto call = call_;
      void* work = work_;
      lock.unlock();
      call(work);
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex calls_, state_;
  std::condition_variable wake_, done_;
  int threads_ = 0, open_ = 0, active_ = 0;
  void (*call_)(void*) = nullptr;
  void* work_ = nullptr;
  static Pool* pool_;  // never freed: its threads sleep until the process ends
};

inline Pool* Pool::pool_ = new Pool;

}  // namespace pa
