// Exact totals of each device, by steps, from the allocators' events alone.
//
// A recorder that is always on looks at few steps. Between its looks nothing else runs: no log, no
// scope, no label. Each event costs a lock that nobody else wants, and a few additions.
#pragma once

#include "address_table.h"
#include "event.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pytracer {

// The gate in front of it.
inline constinit std::atomic<bool> counting{false};

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
    while (is_held_.test_and_set(std::memory_order_acquire)) {
      std::this_thread::yield();
    }
  }

  void unlock() noexcept { is_held_.clear(std::memory_order_release); }

 private:
  std::atomic_flag is_held_;
};

class DeviceTotals {
 public:
  static DeviceTotals& get() { return *instance; }

  // Begins anew, and opens the gate.
  void begin();

  static void end() { counting.store(false); }

  // An event of an allocator.
  void count(
      Action action, DeviceType type, uint8_t index, uint64_t address, uint64_t bytes) noexcept;

  // The same of the host, in fewer instructions. Its allocator says no size as it frees a block: it
  // is known from the request. Blocks of the host from before the counting are not counted.
  void count_host_alloc(uint64_t address, uint64_t bytes) noexcept;
  void count_host_free(uint64_t address) noexcept;

  // Between these two, the seeds of a device say what it held before: its snapshot is the instant.
  void begin_seeding() { seeding_.store(true); }

  void end_seeding() { seeding_.store(false); }

  // Ends the step, and begins the next one. Returns the devices that have been used.
  std::vector<StepTotals> end_step();

  // In a forked child: another thread of the parent may have held a lock.
  static void start_afresh_after_fork();

 private:
  struct Device {
    BriefLock lock;
    bool is_used = false;
    StepTotals totals{};
  };

  static constexpr size_t kMostDevices = 64;  // of an accelerator

  Device& device_of(DeviceType type, uint8_t index) {
    return type == DeviceType::kCpu ? devices_[0] : devices_[1 + index % kMostDevices];
  }

  static DeviceTotals* instance;

  std::array<Device, 1 + kMostDevices> devices_;
  AddressTable<int64_t> sizes_;  // of the host's blocks; its lock guards them
  std::atomic<bool> seeding_{false};
};

}  // namespace pytracer
