// Between the recorder and an accelerator's allocator.
//
// A tracker is a library of its own (csrc/cuda for CUDA). It links to nothing of ours, and opens
// only beside a torch that has its device. It gets the functions below and returns its tracker:
//
//   extern "C" DeviceTracker* pytracer_open_tracker(const RecorderCalls& calls);
#pragma once

#include "event.h"

#include <atomic>
#include <cstdint>
#include <string>

namespace pytracer {

class DeviceTracker {
 public:
  virtual ~DeviceTracker() = default;

  // True once the device's allocator exists; attaching earlier has no effect.
  virtual bool ready() const = 0;
  // Attaches to the allocator, once per process: there is no way to detach. Returns an empty
  // string, or why it cannot be done.
  virtual std::string attach() = 0;
  // Writes down every block and segment that is there now, each device at one instant.
  virtual void seed() = 0;
};

// The functions of the recorder that a tracker may call; see recorder.h.
struct RecorderCalls {
  const std::atomic<bool>* recording;
  const std::atomic<bool>* counting;
  const std::atomic<uint32_t>* generation;
  uint16_t (*place)(const Place& place);  // throws if there is no memory for another place
  void (*record)(Action action, uint16_t place, uint64_t address, uint64_t bytes) noexcept;
  void (*lose)(Action action) noexcept;
  void (*count)(Action action,
                DeviceType type,
                uint8_t index,
                uint64_t address,
                uint64_t bytes) noexcept;  // for totals; see device_totals.h
};

using OpenTracker = DeviceTracker* (*)(const RecorderCalls& calls);
inline constexpr const char* kOpenTracker = "pytracer_open_tracker";

}  // namespace pytracer
