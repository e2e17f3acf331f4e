// Which steps a recorder that is always on looks at. pytracer/recording/looks.py has the reasons.
#pragma once

#include "device_totals.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace pytracer {

enum class Why : uint8_t { kNothing, kFirst, kDeparts, kGrows, kDue };

// Decides for the next step. It gets each device's totals of each step.
class Looks {
 public:
  static constexpr std::array<uint64_t, 5> kSteps{0, 2, 1, 6, 1};  // of a look, by its reason

  Why wanted() const { return wanted_; }

  // Takes what a device did in a step. Returns kDeparts or kGrows if it did.
  Why saw(uint64_t step, size_t device, int64_t peak, int64_t now) {
    Seen& seen = devices_[device];
    Why found = Why::kNothing;
    int64_t higher = peak - seen.highest;
    bool is_settled = step >= kSteps[static_cast<size_t>(Why::kFirst)];  // by then states are made
    if (is_settled && seen.any && higher > kHigherBytes && higher > seen.highest / kHigherPart) {
      found = Why::kDeparts;
    }
    seen.highest = seen.any ? std::max(seen.highest, peak) : peak;
    seen.any = true;
    bool rises = false;
    for (Growth& growth : seen.growth) {
      rises |= growth.saw(now);
    }
    if (rises && wanted_ != Why::kGrows) {
      found = Why::kGrows;
    }
    if (found != Why::kNothing) {
      wanted_ = found;
    } else if (wanted_ == Why::kNothing && step + 1 >= due_) {
      wanted_ = Why::kDue;
    }
    return found;
  }

  // A look for this reason has ended with this step.
  void looked(Why reason, uint64_t step) {
    wanted_ = Why::kNothing;
    for (Seen& seen : devices_) {
      for (Growth& growth : seen.growth) {
        if (reason == Why::kGrows && growth.has_risen()) {
          growth.wait_longer();
        }
      }
    }
    if (reason == Why::kDue) {
      gap_ = std::min(2 * gap_, kLongestGap);
    }
    due_ = step + 1 + gap_;
  }

 private:
  // A departure is above the highest peak before by more than both.
  static constexpr int64_t kHigherPart = 50;
  static constexpr int64_t kHigherBytes = 1 << 20;
  static constexpr uint64_t kFirstGap = 8;
  static constexpr uint64_t kLongestGap = 4096;

  // Whether what is alive as steps end rises, window by window.
  struct Growth {
    uint32_t window;  // steps; the least bytes at the end of each window are compared
    uint32_t seen = 0;
    uint32_t rises = 0;   // windows in a row that are above the one before
    uint32_t needed = 4;  // of them
    int64_t least = INT64_MAX;
    int64_t before = INT64_MAX;  // the least of the window before; the first has none

    bool has_risen() const { return rises >= needed; }

    // Returns whether a window has ended now, and it has risen long enough.
    bool saw(int64_t now) {
      least = std::min(least, now);
      if (++seen < window) {
        return false;
      }
      rises = least > before ? rises + 1 : 0;
      before = least;
      least = INT64_MAX;
      seen = 0;
      return has_risen();
    }

    // The reason may be a harmless one.
    void wait_longer() {
      rises = 0;
      needed *= 2;
    }
  };

  struct Seen {
    bool any = false;
    int64_t highest = 0;
    std::array<Growth, 2> growth{{{16}, {256}}};
  };

  std::array<Seen, DeviceTotals::kDevices> devices_{};
  uint64_t gap_ = kFirstGap;
  uint64_t due_ = kFirstGap;
  Why wanted_ = Why::kFirst;
};

}  // namespace pytracer
