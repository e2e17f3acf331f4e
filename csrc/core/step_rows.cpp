#include "step_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace pytracer {

bool StepRows::end_step(int64_t unix_ns) {
  auto took = static_cast<uint64_t>(std::max<int64_t>(unix_ns - ended_ns_, 0));
  ended_ns_ = unix_ns;
  last_.clear();
  bool tells = is_looking || is_awaited;
  DeviceTotals::get().end_step([&](size_t slot, const StepTotals& totals) {
    StepRow row{step_,
                unix_ns,
                took,
                totals.peak,
                totals.peak,
                totals.peak,
                totals.now,
                totals.reserved_peak,
                totals.largest,
                totals.requests,
                static_cast<uint32_t>(std::min<uint64_t>(totals.failed, UINT32_MAX)),
                static_cast<uint8_t>(totals.type),
                totals.index,
                0,
                is_looking ? 1u : 0u,
                1};
    Why found = looks.saw(step_, slot, totals.peak, totals.now);
    tells |= found != Why::kNothing || totals.failed != 0 || totals.peak > limits_[slot];
    last_.push_back({row, found});
  });
  ++step_;
  are_written_ = false;
  tells |= !write_last();
  tells |= every != 0 && step_ % every == 0;
  tells |= looks.wanted() != Why::kNothing && unix_ns >= asks_from;
  return tells;
}

bool StepRows::write_last() {
  if (are_written_) {
    return true;
  }
  if (room_.size() < (written_ + last_.size()) * sizeof(StepRow)) {
    return false;
  }
  for (const Ended& ended : last_) {
    std::byte* at = room_.data() + written_++ * sizeof(StepRow);
    std::memcpy(at, &ended.row, offsetof(StepRow, steps));
    auto* steps = reinterpret_cast<decltype(StepRow::steps)*>(at + offsetof(StepRow, steps));
    std::atomic_ref(*steps).store(ended.row.steps, std::memory_order_release);
  }
  are_written_ = true;
  return true;
}

}  // namespace pytracer
