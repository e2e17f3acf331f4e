#include "device_tracker.h"

#include "../core/device_totals.h"
#include "../core/recorder.h"
#include "devices.h"

#include <algorithm>
#include <array>
#include <dlfcn.h>

namespace pytracer {

namespace {

std::array<DeviceTracker*, devices::kKinds.size()> opened{};  // by device type

// After a fork there is another recorder, so each call asks for it.
const RecorderCalls recorder_calls{
    &recording,
    &counting,
    Recorder::generation_now(),
    [](const Place& place) { return Recorder::get().place(place); },
    [](Action action, uint16_t place, uint64_t address, uint64_t bytes) noexcept {
      Recorder::get().record(action, place, address, bytes);
    },
    [](Action action) noexcept { Recorder::get().lose(action); },
    [](Action action, DeviceType type, uint8_t index, uint64_t address, uint64_t bytes) noexcept {
      DeviceTotals::get().count(action, type, index, address, bytes);
    },
};

std::string loader_says() {
  const char* text = dlerror();
  return text != nullptr ? text : "the loader gives no reason";
}

// nullptr for the host, and for a name that no device has.
const devices::Kind* accelerator(std::string_view name) {
  const auto* kind = std::find_if(
      devices::kKinds.begin(), devices::kKinds.end(), [name](const devices::Kind& known) {
        return known.name == name;
      });
  bool is_one = kind != devices::kKinds.end() && kind->type != DeviceType::kCpu;
  return is_one ? kind : nullptr;
}

}  // namespace

std::string open_device_tracker(std::string_view device, const std::string& path) {
  const devices::Kind* kind = accelerator(device);
  if (kind == nullptr) {
    return "no accelerator has the name '" + std::string(device) + "'";
  }
  auto& tracker = opened[static_cast<size_t>(kind->type)];
  if (tracker != nullptr) {
    return {};
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    return loader_says();
  }
  auto open = reinterpret_cast<OpenTracker>(dlsym(library, kOpenTracker));
  if (open == nullptr) {
    return loader_says();
  }
  tracker = open(recorder_calls);
  return {};
}

DeviceTracker* device_tracker(DeviceType type) {
  return opened[static_cast<size_t>(type)];
}

DeviceTracker* device_tracker(std::string_view device) {
  const devices::Kind* kind = accelerator(device);
  return kind != nullptr ? device_tracker(kind->type) : nullptr;
}

}  // namespace pytracer
