#include "device_totals.h"

#include <algorithm>
#include <exception>

namespace pytracer {

DeviceTotals* DeviceTotals::instance =
    new DeviceTotals;  // leaked: allocators call it until the process ends

void DeviceTotals::start_afresh_after_fork() {
  counting.store(false);
  instance = new DeviceTotals;
}

// An event that cannot be counted for lack of memory is left out: the allocator must not fail.
void DeviceTotals::count(
    Action action, DeviceType type, uint8_t index, uint64_t address, uint64_t bytes) noexcept try {
  if (type == DeviceType::kCpu && action == Action::kAlloc) {
    count_host_alloc(address, bytes);
    return;
  }
  if (type == DeviceType::kCpu && action == Action::kFreeCompleted) {
    count_host_free(address);
    return;
  }
  Device& device = device_of(type, index);
  std::lock_guard locked(device.lock);
  StepTotals& totals = device.totals;
  device.is_used = true;
  totals.type = type;
  totals.index = index;
  auto size = static_cast<int64_t>(std::min<uint64_t>(bytes, kMostBytes));
  switch (action) {
    case Action::kAlloc:
      totals.now += size;
      totals.peak = std::max(totals.peak, totals.now);
      totals.largest = std::max(totals.largest, bytes);
      ++totals.requests;
      break;
    case Action::kFreeCompleted:
      totals.now -= size;
      break;
    case Action::kSegmentAlloc:
    case Action::kSegmentMap:
      totals.reserved += size;
      totals.reserved_peak = std::max(totals.reserved_peak, totals.reserved);
      break;
    case Action::kSegmentFree:
    case Action::kSegmentUnmap:
      totals.reserved -= size;
      break;
    case Action::kOom:
      ++totals.failed;
      break;
    case Action::kSnapshot:
      if (seeding_.load(std::memory_order_relaxed)) {
        totals = {type, index};
      }
      break;
    case Action::kSeed:
      if (seeding_.load(std::memory_order_relaxed) && type != DeviceType::kCpu) {
        totals.now += size;
        totals.peak += size;
      }
      break;
    case Action::kSeedSegment:
      if (seeding_.load(std::memory_order_relaxed)) {
        totals.reserved += size;
        totals.reserved_peak += size;
      }
      break;
    case Action::kFreeRequested:
    case Action::kLabel:
    case Action::kSaved:
      break;
  }
} catch (const std::exception&) {
}

void DeviceTotals::count_host_alloc(uint64_t address, uint64_t bytes) noexcept try {
  auto size = static_cast<int64_t>(std::min<uint64_t>(bytes, kMostBytes));
  std::lock_guard locked(devices_[0].lock);
  devices_[0].is_used = true;
  StepTotals& host = devices_[0].totals;
  int64_t ended_unseen = sizes_.put(address, size);
  host.now += size - std::max<int64_t>(ended_unseen, 0);
  host.peak = std::max(host.peak, host.now);
  host.largest = std::max(host.largest, bytes);
  ++host.requests;
} catch (const std::exception&) {
}

void DeviceTotals::count_host_free(uint64_t address) noexcept {
  std::lock_guard locked(devices_[0].lock);
  if (int64_t* known = sizes_.find(address)) {
    devices_[0].totals.now -= *known;
    sizes_.erase(known);
  }
}

void DeviceTotals::begin() {
  for (Device& device : devices_) {
    std::lock_guard locked(device.lock);
    device.is_used = false;
    device.totals = {};
    if (&device == &devices_[0]) {
      sizes_ = {};
    }
  }
  counting.store(true);
}

std::vector<StepTotals> DeviceTotals::end_step() {
  std::vector<StepTotals> ended;
  for (Device& device : devices_) {
    std::lock_guard locked(device.lock);
    if (device.is_used) {
      StepTotals& totals = device.totals;
      ended.push_back(totals);
      totals.peak = totals.now;
      totals.reserved_peak = totals.reserved;
      totals.largest = totals.requests = totals.failed = 0;
    }
  }
  return ended;
}

}  // namespace pytracer
