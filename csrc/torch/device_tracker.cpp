#include "device_tracker.h"

namespace pytracer {

namespace {

DeviceTracker* registered = nullptr;

}  // namespace

DeviceTracker* device_tracker() {
  return registered;
}

void set_device_tracker(DeviceTracker* tracker) {
  registered = tracker;
}

}  // namespace pytracer
