// What an accelerator's allocator offers. CUDA's implementation registers itself when it is
// compiled in (csrc/cuda); without it there is none, and nothing here mentions CUDA.
#pragma once

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

// nullptr when this build has none.
DeviceTracker* device_tracker();
void set_device_tracker(DeviceTracker* tracker);

}  // namespace pytracer
