// Between the recorder and an accelerator's allocator.
//
// A tracker is a library of its own (csrc/cuda). It links to nothing of ours, and is opened only
// beside a torch that has its device. It gets the functions below and gives back its tracker:
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

  // True once the device's allocator exists; attaching earlier would do nothing.
  virtual bool ready() const = 0;
  // Attaches to the allocator, once per process: there is no way to detach. Returns an empty
  // string, or why it cannot be done.
  virtual std::string attach() = 0;
  // Writes down every block and segment that is there now, each device at one instant.
  virtual void seed() = 0;
};

// What a tracker may ask of the recorder; see recorder.h.
struct RecorderCalls {
  const std::atomic<bool>* recording;
  uint32_t (*generation)() noexcept;
  uint16_t (*place)(const Place& place);  // throws where there is no memory for another place
  void (*record)(Action action, uint16_t place, uint64_t address, uint64_t bytes) noexcept;
  void (*lose)(Action action) noexcept;
};

using OpenTracker = DeviceTracker* (*)(const RecorderCalls& calls);
inline constexpr const char* kOpenTracker = "pytracer_open_tracker";

}  // namespace pytracer
