// The accelerator's tracker, if one is open. CUDA's is a library of its own (csrc/cuda), so nothing
// here mentions CUDA.
#pragma once

#include "../core/tracker.h"

#include <string>

namespace pytracer {

// Opens the library at this path, which then stays: the allocator keeps calling it. Returns an
// empty string, or why it cannot be opened.
std::string open_device_tracker(const std::string& path);

// nullptr when none is open.
DeviceTracker* device_tracker();

}  // namespace pytracer
