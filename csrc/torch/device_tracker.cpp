#include "device_tracker.h"

#include "../core/recorder.h"

#include <dlfcn.h>

namespace pytracer {

namespace {

DeviceTracker* opened = nullptr;

// The recorder is another one after a fork, so each call asks for it.
const RecorderCalls recorder_calls{
    &recording,
    []() noexcept { return Recorder::get().generation(); },
    [](const Place& place) { return Recorder::get().place(place); },
    [](Action action, uint16_t place, uint64_t address, uint64_t bytes) noexcept {
      Recorder::get().record(action, place, address, bytes);
    },
    [](Action action) noexcept { Recorder::get().lose(action); },
};

std::string loader_says() {
  const char* text = dlerror();
  return text != nullptr ? text : "the loader gives no reason";
}

}  // namespace

std::string open_device_tracker(const std::string& path) {
  if (opened != nullptr) {
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
  opened = open(recorder_calls);
  return {};
}

DeviceTracker* device_tracker() {
  return opened;
}

}  // namespace pytracer
