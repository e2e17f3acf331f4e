// Ticks are cheap and raw; nanoseconds come later, from two readings of both clocks.
#pragma once

#include "event.h"

#include <chrono>
#include <cstdint>
#include <ctime>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace pytracer {

inline uint64_t ticks_now() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  uint64_t value;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

// About 50 us. None of our short calls computes for so long, and another program that gets the core
// keeps it for longer. On x86 the counter runs at 2 to 4 GHz and does not say how fast.
inline uint64_t interrupted_ticks() {
#if defined(__x86_64__)
  return uint64_t{1} << 17;
#elif defined(__aarch64__)
  uint64_t per_second;
  asm volatile("mrs %0, cntfrq_el0" : "=r"(per_second));
  return per_second / 20'000;
#else
  using Period = std::chrono::steady_clock::period;
  return static_cast<uint64_t>(Period::den / Period::num) / 20'000;
#endif
}

// The calling thread's processor time: it stands still while the thread waits, and while others
// have the core. Reading it is a system call of 200 to 500 ns; reading ticks takes 10.
inline uint64_t thread_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

inline int64_t unix_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Reads both clocks as one: the tightest of a few tries, so that being descheduled between the
// two reads does not skew the pair.
inline ClockReading read_clock() {
  ClockReading best{};
  uint64_t narrowest = UINT64_MAX;
  for (int attempt = 0; attempt < 8; ++attempt) {
    uint64_t before = ticks_now();
    int64_t unix_ns = unix_now_ns();
    uint64_t after = ticks_now();
    if (after - before < narrowest) {
      narrowest = after - before;
      best = {before + (after - before) / 2, unix_ns};
    }
  }
  return best;
}

}  // namespace pytracer
