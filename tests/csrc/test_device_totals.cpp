#include "check.h"
#include "device_totals.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

namespace pytracer {
namespace {

// The plain reference: all blocks in a map, and all sums made anew at each event.
struct Reference {
  std::map<uint64_t, int64_t> blocks;
  int64_t peak = 0;
  uint64_t largest = 0;
  uint64_t requests = 0;

  int64_t now() const {
    int64_t sum = 0;
    for (const auto& [address, size] : blocks) {
      sum += size;
    }
    return sum;
  }

  void alloc(uint64_t address, uint64_t size) {
    blocks[address] = static_cast<int64_t>(size);
    peak = std::max(peak, now());
    largest = std::max(largest, size);
    ++requests;
  }

  void end_step() {
    peak = now();
    largest = requests = 0;
  }
};

// Ends the step, in which one device was used.
StepTotals only() {
  std::vector<StepTotals> rows;
  DeviceTotals::get().end_step([&](size_t, const StepTotals& totals) { rows.push_back(totals); });
  CHECK_EQ(rows.size(), size_t{1});
  return rows.at(0);
}

TEST(totals_of_any_events_equal_a_plain_reference) {
  std::minstd_rand random(11);
  for (DeviceType type : {DeviceType::kCpu, DeviceType::kCuda}) {
    bool says_size = type != DeviceType::kCpu;
    DeviceTotals::get().begin();
    Reference reference;
    for (int step = 0; step < 50; ++step) {
      for (int event = 0; event < 40; ++event) {
        uint64_t address = 64 * (1 + random() % 20);
        auto known = reference.blocks.find(address);
        if (known == reference.blocks.end()) {
          uint64_t size = random() % 1000;
          DeviceTotals::get().count(Action::kAlloc, type, 0, address, size);
          reference.alloc(address, size);
        } else {
          auto size = says_size ? static_cast<uint64_t>(known->second) : 0;
          DeviceTotals::get().count(Action::kFreeCompleted, type, 0, address, size);
          reference.blocks.erase(known);
        }
      }
      StepTotals row = only();
      CHECK_EQ(row.now, reference.now());
      CHECK_EQ(row.peak, reference.peak);
      CHECK_EQ(row.largest, reference.largest);
      CHECK_EQ(row.requests, reference.requests);
      reference.end_step();
    }
    DeviceTotals::end();
  }
}

TEST(totals_leave_out_blocks_of_the_host_from_before) {
  DeviceTotals::get().begin();
  DeviceTotals::get().count(Action::kFreeCompleted, DeviceType::kCpu, 0, 64, 0);
  DeviceTotals::get().count(Action::kSeed, DeviceType::kCpu, 0, 128, 1000);
  CHECK_EQ(only().now, int64_t{0});
  DeviceTotals::end();
}

TEST(totals_know_what_a_device_held_at_its_snapshot) {
  constexpr DeviceType kCuda = DeviceType::kCuda;
  DeviceTotals::get().begin();
  DeviceTotals::get().count(Action::kAlloc, kCuda, 3, 64, 500);  // is in the snapshot, too
  DeviceTotals::get().begin_seeding();
  DeviceTotals::get().count(Action::kSnapshot, kCuda, 3, 0, 0);
  DeviceTotals::get().count(Action::kAlloc, kCuda, 3, 128, 70);  // by another thread meanwhile
  DeviceTotals::get().count(Action::kFreeCompleted, kCuda, 3, 128, 70);
  DeviceTotals::get().count(Action::kSeedSegment, kCuda, 3, 0, 2048);
  DeviceTotals::get().count(Action::kSeed, kCuda, 3, 64, 500);
  DeviceTotals::get().end_seeding();
  DeviceTotals::get().count(Action::kSeed, kCuda, 3, 64, 500);  // of a look
  StepTotals row = only();
  CHECK_EQ(row.now, int64_t{500});
  CHECK_EQ(row.peak, int64_t{570});
  CHECK_EQ(row.reserved, int64_t{2048});
  CHECK_EQ(row.reserved_peak, int64_t{2048});
  CHECK_EQ(int{row.index}, 3);
  DeviceTotals::end();
}

TEST(a_failed_request_is_counted_in_its_step_only) {
  DeviceTotals::get().begin();
  DeviceTotals::get().count(Action::kOom, DeviceType::kCuda, 0, 0, 1 << 20);
  CHECK_EQ(only().failed, uint64_t{1});
  CHECK_EQ(only().failed, uint64_t{0});
  DeviceTotals::end();
}

}  // namespace
}  // namespace pytracer
