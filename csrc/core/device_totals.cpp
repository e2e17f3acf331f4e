#include "device_totals.h"

#include <algorithm>

namespace pytracer {

namespace {

void raise_to(std::atomic<size_t>& value, size_t least) {
  size_t known = value.load();
  while (known < least && !value.compare_exchange_weak(known, least)) {
  }
}

}  // namespace

DeviceTotals* DeviceTotals::instance =
    new DeviceTotals;  // leaked: allocators call it until the process ends

void DeviceTotals::start_afresh_after_fork() {
  end();
  instance = new DeviceTotals;
}

void DeviceTotals::count(
    Action action, DeviceType type, uint8_t index, uint64_t address, uint64_t bytes) noexcept {
  if (type == DeviceType::kCpu && action == Action::kAlloc) {
    count_host_alloc(address, std::min<uint64_t>(bytes, kMostBytes));
    return;
  }
  if (type == DeviceType::kCpu && action == Action::kFreeCompleted) {
    count_host_free(address);
    return;
  }
  size_t slot = slot_of(type, index);
  Device& device = devices_[slot];
  std::lock_guard locked(device.lock);
  if (!device.is_used && slot >= used_.load(std::memory_order_relaxed)) [[unlikely]] {
    raise_to(used_, slot + 1);
  }
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
}

void DeviceTotals::begin(bool host) {
  used_.store(1);
  for (Device& device : devices_) {
    std::lock_guard locked(device.lock);
    device.is_used = false;
    device.totals = {};
    if (&device == &devices_[0]) {
      sizes_ = {};
    }
  }
  counting.store(true);
  counting_host.store(host);
}

}  // namespace pytracer
