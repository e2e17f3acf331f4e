// Which of two segments lies lower. The allocator asks it between free blocks of equal size.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

namespace pytracer {

// Where a segment lies. `rank` orders segments; it is the address where that is known.
struct SegmentPlace {
  uint64_t address;
  uint64_t rank;
};

// Puts segments somewhere, because the model has no driver.
//
// In order 0 those of a recording lie where it shows them, and the others where the driver of an
// H200 would put them. In order 1 each segment lies above all earlier ones, in order 2 below. Any
// other number is the seed of a shuffled order.
class MadeUpPlaces {
 public:
  explicit MadeUpPlaces(uint64_t order) : order_(order) {}

  SegmentPlace next(uint64_t amount) {
    const uint64_t address = from_the_top(amount);
    return {address, order_ == 0 ? address : rank()};
  }

  // A segment that the recording shows there.
  SegmentPlace recorded(uint64_t address) {
    return {address, order_ == 0 ? kMiddle + (address & (kMiddle - 1)) : rank()};
  }

 private:
  static constexpr uint64_t kPage = 2 << 20;
  static constexpr uint64_t kChunkPages = 16;  // 32 MiB
  static constexpr uint64_t kTop = uint64_t{1} << 57;
  static constexpr uint64_t kMiddle = uint64_t{1} << 60;

  uint64_t rank() {
    ++ranked_;
    if (order_ <= 2) {
      return order_ == 1 ? kMiddle + ranked_ : kMiddle - ranked_;
    }
    return mixed(order_ * 0x9E3779B97F4A7C15 + ranked_);
  }

  // The driver takes room in chunks from the top of the address space down. The rest of a chunk
  // serves later segments, the lowest first.
  uint64_t from_the_top(uint64_t amount) {
    const uint64_t pages = (amount + kPage - 1) / kPage;
    std::set<uint64_t>* lowest = nullptr;
    uint64_t found = 0;
    for (uint64_t size = pages; size < kChunkPages; ++size) {
      auto& holes = holes_[size];
      if (!holes.empty() && (lowest == nullptr || *holes.begin() < *lowest->begin())) {
        lowest = &holes;
        found = size;
      }
    }
    uint64_t address = 0;
    if (lowest != nullptr) {
      address = *lowest->begin();
      lowest->erase(lowest->begin());
    } else {
      found = (pages + kChunkPages - 1) / kChunkPages * kChunkPages;
      next_chunk_ -= found * kPage;
      address = next_chunk_;
    }
    if (found > pages) {
      holes_[found - pages].insert(address + pages * kPage);
    }
    return address;
  }

  // The last rounds of splitmix64.
  static uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

  uint64_t order_;
  uint64_t ranked_ = 0;
  uint64_t next_chunk_ = kTop;
  std::array<std::set<uint64_t>, kChunkPages> holes_;  // of the address space, by pages
};

// All orders of segments, one run for each outcome. A run decides which of two segments lies lower
// only when the allocator asks; the next run decides the last question otherwise.
class AllOrders {
 public:
  struct Candidate {
    uint32_t segment;
    bool is_whole;  // one free block, so equal to any other whole one
  };

  // Begins a run.
  void begin() {
    asked_ = 0;
    below_.clear();
  }

  // The index of the candidate that lies lowest in this run.
  size_t lowest(const std::vector<Candidate>& candidates) {
    const std::vector<size_t> possible = possible_lowest(candidates);
    size_t choice = 0;
    if (possible.size() > 1) {
      if (asked_ == path_.size()) {
        path_.push_back({0, possible.size()});
      }
      choice = path_[asked_++].taken;
    }
    const size_t chosen = possible[choice];
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (i != chosen) {
        put_below(candidates[chosen].segment, candidates[i].segment);
      }
    }
    return chosen;
  }

  size_t questions() const { return path_.size(); }

  // False: all orders have had a run.
  bool advance() {
    while (!path_.empty() && path_.back().taken + 1 == path_.back().choices) {
      path_.pop_back();
    }
    if (path_.empty()) {
      return false;
    }
    ++path_.back().taken;
    return true;
  }

 private:
  struct Question {
    size_t taken;
    size_t choices;
  };

  // Those below which none is known to lie. Of whole segments that nothing is known of, one stands
  // for all.
  std::vector<size_t> possible_lowest(const std::vector<Candidate>& candidates) const {
    std::vector<size_t> possible;
    bool has_whole = false;
    for (size_t i = 0; i < candidates.size(); ++i) {
      const Candidate& one = candidates[i];
      const bool is_any = one.is_whole && is_unknown(one.segment);
      const bool is_higher = std::ranges::any_of(
          candidates, [&](const Candidate& other) { return is_below(other.segment, one.segment); });
      if (!is_higher && !(is_any && has_whole)) {
        possible.push_back(i);
        has_whole |= is_any;
      }
    }
    return possible;
  }

  bool is_below(uint32_t lower, uint32_t higher) const {
    return lower < below_.size() && higher < below_[lower].size() && below_[lower][higher];
  }

  bool is_unknown(uint32_t segment) const {
    for (uint32_t other = 0; other < below_.size(); ++other) {
      if (is_below(other, segment) || is_below(segment, other)) {
        return false;
      }
    }
    return true;
  }

  void put_below(uint32_t lower, uint32_t higher) {
    if (is_below(lower, higher)) {
      return;
    }
    const size_t count = std::max<size_t>({below_.size(), size_t{lower} + 1, size_t{higher} + 1});
    below_.resize(count);
    for (auto& row : below_) {
      row.resize(count);
    }
    for (uint32_t a = 0; a < count; ++a) {
      for (uint32_t b = 0; b < count; ++b) {
        if ((a == lower || below_[a][lower]) && (b == higher || below_[higher][b])) {
          below_[a][b] = true;
        }
      }
    }
  }

  std::vector<Question> path_;
  size_t asked_ = 0;
  std::vector<std::vector<bool>> below_;  // below_[a][b]: a is known to lie below b
};

}  // namespace pytracer
