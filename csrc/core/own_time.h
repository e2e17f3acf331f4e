// How long tracing itself computes.
#pragma once

#include "clock.h"
#include "scope_stack.h"

#include <atomic>
#include <cstdint>

namespace pytracer {

// Counts the time in which tracing computes, without the time in which its threads wait. One short
// call in 61 is timed and stands for the others. (61 is a prime, so that it is not always the same
// call of a program's loop.) Ticks go on while another program has the core, so a call that took
// too long is left out. Calls that are long by themselves are timed by the thread's clock: see
// quietly::Timed.
class OwnTime {
 public:
  struct Reading {
    uint64_t at;     // when this was read, in ticks
    uint64_t ticks;  // of short calls
    uint64_t ns;     // of the others
  };

  explicit OwnTime(ThreadState& thread)
      : begin_(++thread.calls_ % kOneIn == 0 && !in_longer_call ? ticks_now() : 0) {}

  OwnTime(const OwnTime&) = delete;
  OwnTime& operator=(const OwnTime&) = delete;

  ~OwnTime() {
    if (begin_ != 0) {
      uint64_t took = ticks_now() - begin_;
      add_ticks(took < interrupted_ticks() ? kOneIn * took : 0);
    }
  }

  static void add_ticks(uint64_t ticks) { ticks_.fetch_add(ticks, std::memory_order_relaxed); }

  static void add_ns(uint64_t ns) { ns_.fetch_add(ns, std::memory_order_relaxed); }

  static Reading read() {
    return {
        ticks_now(), ticks_.load(std::memory_order_relaxed), ns_.load(std::memory_order_relaxed)};
  }

  // This thread is inside a longer call, whose time includes the short calls in it.
  PYTRACER_STATIC_TLS static inline thread_local constinit bool in_longer_call = false;

 private:
  static constexpr uint32_t kOneIn = 61;
  static inline std::atomic<uint64_t> ticks_{0};
  static inline std::atomic<uint64_t> ns_{0};

  uint64_t begin_;
};

}  // namespace pytracer
