// The trackers of the accelerators, by device type. Each is a library of its own (csrc/cuda), so
// nothing here mentions an accelerator.
#pragma once

#include "../core/tracker.h"

#include <string>
#include <string_view>

namespace pytracer {

// Opens the library at this path as the tracker of the device with this name ("cuda"). The library
// stays: the allocator keeps calling it. Opening a second one for a device does nothing. Returns an
// empty string, or why it cannot be opened.
std::string open_device_tracker(std::string_view device, const std::string& path);

// nullptr when none is open.
DeviceTracker* device_tracker(DeviceType type);

// The same by the device's name; nullptr also for a name that no device has.
DeviceTracker* device_tracker(std::string_view device);

}  // namespace pytracer
