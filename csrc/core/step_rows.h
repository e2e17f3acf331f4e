// What a recorder that is always on does as a step ends: a row for each device, and whether anybody
// must be told. Python is called for those steps alone.
#pragma once

#include "device_totals.h"
#include "looks.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pytracer {

// A row of the file that pytracer/data/step_totals.py reads.
struct StepRow {
  uint64_t step;
  int64_t unix_ns;
  uint64_t duration_ns;
  int64_t peak;
  int64_t least_peak;
  int64_t highest_peak;
  int64_t now;
  int64_t reserved_peak;
  uint64_t largest;
  uint64_t requests;
  uint32_t failed;
  uint8_t device_type;
  uint8_t device_index;
  uint16_t padding;
  uint32_t looked_at;
  uint32_t steps;  // written last: then the row is there
};

static_assert(sizeof(StepRow) == 96);

// Guarded by whatever keeps steps from ending at once: the GIL.
class StepRows {
 public:
  struct Ended {
    StepRow row;
    Why found;  // a departure, or growth
  };

  explicit StepRows(int64_t unix_ns) : ended_ns_(unix_ns) { limits_.fill(kToTell); }

  Looks looks;
  bool is_looking = false;  // at each of these steps
  bool is_awaited = false;  // every step is told
  uint64_t every = 0;       // after how many steps one is told; never if 0
  int64_t asks_from = 0;    // from when on a step is told because a look is wanted

  // A peak above it is told. Until a device has a limit, each of its steps is told.
  void set_limit(DeviceType type, uint8_t index, int64_t bytes) {
    limits_[DeviceTotals::slot_of(type, index)] = bytes;
  }

  // Where rows go from now on. The memory stays until this is called again.
  void write_to(std::span<std::byte> room) {
    room_ = room;
    written_ = 0;
  }

  // How many rows are in the present room.
  uint64_t written() const { return written_; }

  // A step is over. Returns whether somebody must be told.
  bool end_step(int64_t unix_ns);

  // Writes the last step's rows, unless they are there. Returns false if the room is too small.
  bool write_last();

  const std::vector<Ended>& last() const { return last_; }

  uint64_t steps() const { return step_; }  // that are over

 private:
  static constexpr int64_t kToTell = -1;

  std::span<std::byte> room_;
  uint64_t written_ = 0;
  uint64_t step_ = 0;
  int64_t ended_ns_;
  bool are_written_ = true;
  std::vector<Ended> last_;
  std::array<int64_t, DeviceTotals::kDevices> limits_{};
};

}  // namespace pytracer
