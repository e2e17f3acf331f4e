// Exact totals of each device, by steps, from the allocators' events alone.
//
// A recorder that is always on looks at few steps. Between its looks nothing else runs: no log, no
// scope, no label. Each event costs a lock that nobody else wants, and a few additions.
#pragma once

#include "address_table.h"
#include "event.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

namespace pytracer {

// The gates in front of it: of all devices, and of the host.
inline constinit std::atomic<bool> counting{false};
inline constinit std::atomic<bool> counting_host{false};

// What one device did in one step. Bytes are the requested ones, and those reserved from the
// driver.
struct StepTotals {
  DeviceType type{};
  uint8_t index = 0;
  int64_t now = 0;  // as the step ends
  int64_t peak = 0;
  int64_t reserved = 0;
  int64_t reserved_peak = 0;
  uint64_t largest = 0;   // request of the step
  uint64_t requests = 0;  // in the step
  uint64_t failed = 0;    // requests in the step
};

// A lock that is held for a few additions, and that almost nobody else wants: a fifth of the
// instructions of a mutex.
class BriefLock {
 public:
  void lock() noexcept {
    if (is_held_.test_and_set(std::memory_order_acquire)) [[unlikely]] {
      wait();
    }
  }

  void unlock() noexcept { is_held_.clear(std::memory_order_release); }

 private:
  [[gnu::cold, gnu::noinline]] void wait() noexcept {
    while (is_held_.test_and_set(std::memory_order_acquire)) {
      std::this_thread::yield();
    }
  }

  std::atomic_flag is_held_;
};

class DeviceTotals {
 public:
  static constexpr size_t kDevices = 65;  // the host, and 64 of an accelerator

  static DeviceTotals& get() { return *instance; }

  static size_t slot_of(DeviceType type, uint8_t index) {
    return type == DeviceType::kCpu ? 0 : 1 + index % (kDevices - 1);
  }

  // Begins anew, and opens the gates; that of the host if it is counted.
  void begin(bool host = true);

  static void end() {
    counting.store(false);
    counting_host.store(false);
  }

  // An event of an allocator.
  void count(
      Action action, DeviceType type, uint8_t index, uint64_t address, uint64_t bytes) noexcept;

  // The same of the host, in fewer instructions. Its allocator says no size as it frees a block: it
  // is known from the request. Blocks of the host from before the counting are not counted, and one
  // for which there is no memory: the allocator must not fail.
  void count_host_alloc(uint64_t address, uint64_t bytes) noexcept {
    std::lock_guard locked(devices_[0].lock);
    if (!sizes_.has_room() && !sizes_.try_to_grow()) [[unlikely]] {
      return;
    }
    auto size = static_cast<int64_t>(bytes);  // is there, so it is no absurd one
    StepTotals& host = devices_[0].totals;
    int64_t ended_unseen = sizes_.put(address, size);
    host.now += size;
    if (ended_unseen > 0) [[unlikely]] {
      host.now -= ended_unseen;
    }
    host.peak = std::max(host.peak, host.now);
    host.largest = std::max(host.largest, bytes);
    ++host.requests;
  }

  void count_host_free(uint64_t address) noexcept {
    std::lock_guard locked(devices_[0].lock);
    if (int64_t known = sizes_.take(address); known > 0) {
      devices_[0].totals.now -= known;
    }
  }

  // Between these two, the seeds of a device say what it held before: its snapshot is the instant.
  void begin_seeding() { seeding_.store(true); }

  void end_seeding() { seeding_.store(false); }

  // Ends the step, and begins the next one. Visits the slots and totals of the devices that have
  // been used, the host first.
  template <typename Visit>
  void end_step(Visit visit);

  // In a forked child: another thread of the parent may have held a lock.
  static void start_afresh_after_fork();

 private:
  struct Device {
    BriefLock lock;
    bool is_used = false;
    StepTotals totals{};
  };

  static DeviceTotals* instance;

  std::array<Device, kDevices> devices_;
  std::atomic<size_t> used_{1};  // no later slot has been used
  AddressTable<int64_t> sizes_;  // of the host's blocks; its lock guards them
  std::atomic<bool> seeding_{false};
};

template <typename Visit>
void DeviceTotals::end_step(Visit visit) {
  for (size_t slot = 0; slot < used_.load(std::memory_order_relaxed); ++slot) {
    Device& device = devices_[slot];
    StepTotals ended;
    {
      std::lock_guard locked(device.lock);
      device.is_used |= device.totals.requests != 0;  // of the host, only this says so
      if (!device.is_used) {
        continue;
      }
      ended = device.totals;
      StepTotals& totals = device.totals;
      totals.peak = totals.now;
      totals.reserved_peak = totals.reserved;
      totals.largest = totals.requests = totals.failed = 0;
    }
    visit(slot, ended);
  }
}

}  // namespace pytracer
