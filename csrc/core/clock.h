// Ticks are cheap and raw; nanoseconds come later, from two readings of both clocks.
#pragma once

#include "event.h"

#include <chrono>
#include <cstdint>

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

// Reads both clocks as one: the tightest of a few tries, so that being descheduled between the
// two reads does not skew the pair.
inline ClockReading read_clock() {
  ClockReading best{};
  uint64_t narrowest = UINT64_MAX;
  for (int attempt = 0; attempt < 8; ++attempt) {
    uint64_t before = ticks_now();
    int64_t unix_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
    uint64_t after = ticks_now();
    if (after - before < narrowest) {
      narrowest = after - before;
      best = {before + (after - before) / 2, unix_ns};
    }
  }
  return best;
}

}  // namespace pytracer
