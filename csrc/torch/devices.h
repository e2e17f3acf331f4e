// The kinds of devices that a recording knows, and their names in torch and in schema.DEVICE_TYPES.
//
// Another accelerator needs one row here, one number in event.h, and a tracker of its own
// (core/tracker.h). Labels, phase times and sessions ask this table and name no device.
// docs/architecture.md lists the other files.
#pragma once

#include "../core/event.h"

#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace pytracer::devices {

struct Kind {
  DeviceType type;
  c10::DeviceType torchs;
  const char* name;           // as torch.device and schema.DEVICE_TYPES have it
  c10::DispatchKey autocast;  // excluded while autocast is off
};

// In the order of DeviceType. The first row is the host, which has no tracker.
inline constexpr std::array kKinds{
    Kind{DeviceType::kCpu, c10::DeviceType::CPU, "cpu", c10::DispatchKey::AutocastCPU},
    Kind{DeviceType::kCuda, c10::DeviceType::CUDA, "cuda", c10::DispatchKey::AutocastCUDA},
};

inline constexpr bool kIsInOrder = [] {
  for (size_t i = 0; i < kKinds.size(); ++i) {
    if (static_cast<size_t>(kKinds[i].type) != i) {
      return false;
    }
  }
  return true;
}();
static_assert(kIsInOrder, "a DeviceType is the number of its row");

inline constexpr const Kind& kind_of(DeviceType type) {
  return kKinds[static_cast<size_t>(type)];
}

inline constexpr uint8_t kNoRow = UINT8_MAX;

inline constexpr auto kRowOfTorchs = [] {
  std::array<uint8_t, c10::COMPILE_TIME_MAX_DEVICE_TYPES> rows{};
  rows.fill(kNoRow);
  for (const Kind& kind : kKinds) {
    rows[static_cast<size_t>(kind.torchs)] = static_cast<uint8_t>(kind.type);
  }
  return rows;
}();

// nullptr for a device that a recording does not know.
inline const Kind* find(c10::DeviceType type) {
  uint8_t row = kRowOfTorchs[static_cast<size_t>(type)];
  return row == kNoRow ? nullptr : &kKinds[row];
}

// Autocast is off on every known device while all of these keys are excluded.
inline constexpr c10::DispatchKeySet kAutocastKeys = [] {
  c10::DispatchKeySet keys;
  for (const Kind& kind : kKinds) {
    keys = keys | c10::DispatchKeySet(kind.autocast);
  }
  return keys;
}();

// Torch's name of a device: the host has no index.
inline c10::Device torchs_device(DeviceType type, uint8_t index) {
  return {kind_of(type).torchs,
          static_cast<c10::DeviceIndex>(type == DeviceType::kCpu ? -1 : index)};
}

}  // namespace pytracer::devices
