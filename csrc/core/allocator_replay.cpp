#include "allocator_replay.h"

#include "caching_allocator.h"
#include "segment_order.h"

#include <algorithm>
#include <utility>

namespace pytracer {

namespace {

constexpr size_t kMostQuestions = 16;  // in one replay; each doubles the number of outcomes

// One step. Skips what names a block or lane that does not exist.
void take_step(CachingAllocator& allocator,
               const ReplaySteps& steps,
               std::span<const ReplayLane> lanes,
               size_t i) {
  const uint32_t number = steps.block[i];
  const bool has_lane = steps.lane[i] < lanes.size();
  const ReplayLane lane = has_lane ? lanes[steps.lane[i]] : ReplayLane{};
  const bool is_new = has_lane && !allocator.holds(number);
  const bool has_address = !steps.address.empty();
  switch (static_cast<ReplayStep>(steps.kind[i])) {
    case ReplayStep::kAlloc:
      if (is_new && allocator.allocate(number, steps.bytes[i], lane) && has_address) {
        allocator.compare(number, steps.address[i]);
      }
      break;
    case ReplayStep::kFreeRequested:
      allocator.request_free(number);
      break;
    case ReplayStep::kFreeCompleted:
      allocator.complete_free(number);
      break;
    case ReplayStep::kAttempt:
      if (has_address) {
        allocator.depart();
      }
      if (is_new && allocator.allocate(number, steps.bytes[i], lane)) {
        allocator.complete_free(number);
      }
      break;
    case ReplayStep::kTrim:
      if (has_lane) {
        allocator.trim(lane.pool);
      }
      break;
    case ReplayStep::kHeld:
      if (has_lane && has_address) {
        allocator.hold(steps.address[i], steps.bytes[i], lane);
      }
      break;
    case ReplayStep::kSeed:
      if (is_new && has_address) {
        allocator.seed(number, steps.address[i], steps.bytes[i]);
      }
      break;
    case ReplayStep::kGiven:
      if (has_address) {
        allocator.give(steps.address[i], steps.bytes[i]);
      }
      break;
    case ReplayStep::kRefused:
      if (has_address) {
        allocator.refuse();
      }
      break;
  }
}

ReplayResult replay(const ReplaySteps& steps,
                    std::span<const ReplayLane> lanes,
                    const AllocatorRules& rules,
                    bool curves,
                    AllOrders* orders) {
  CachingAllocator allocator(rules, {}, orders);
  if (!steps.address.empty()) {
    allocator.follow();
  }
  ReplayResult curve;
  for (size_t i = 0; i < steps.kind.size() && allocator.counted().failed_step < 0; ++i) {
    const auto kind = static_cast<ReplayStep>(steps.kind[i]);
    const bool is_from_before = kind == ReplayStep::kHeld || kind == ReplayStep::kSeed;
    allocator.begin_step(static_cast<int64_t>(i), is_from_before);
    take_step(allocator, steps, lanes, i);
    if (curves) {
      curve.reserved_after.push_back(allocator.counted().reserved);
      curve.active_after.push_back(allocator.counted().active);
      curve.largest_free_after.push_back(allocator.largest_free());
    }
  }
  ReplayResult result = allocator.counted();
  result.largest_free = allocator.largest_free();
  result.reserved_after = std::move(curve.reserved_after);
  result.active_after = std::move(curve.active_after);
  result.largest_free_after = std::move(curve.largest_free_after);
  return result;
}

void add(ReplayOrders& found, const ReplayResult& one) {
  ++found.orders;
  if (one.failed_step >= 0) {
    if (++found.failed == 1) {
      found.failure = one;
    }
    return;
  }
  const bool is_first = found.orders == found.failed + 1;
  found.lowest_peak = is_first ? one.peak_reserved : std::min(found.lowest_peak, one.peak_reserved);
  found.highest_peak = std::max(found.highest_peak, one.peak_reserved);
}

// Whether so many replays were enough for all orders.
bool tries_all(ReplayOrders& found,
               const ReplaySteps& steps,
               std::span<const ReplayLane> lanes,
               const AllocatorRules& rules,
               uint64_t most) {
  AllOrders orders;
  for (uint64_t i = 0; i < most && orders.questions() <= kMostQuestions; ++i) {
    orders.begin();
    add(found, replay(steps, lanes, rules, false, &orders));
    if (!orders.advance()) {
      return true;
    }
  }
  return false;
}

}  // namespace

ReplayResult replay_allocator(const ReplaySteps& steps,
                              std::span<const ReplayLane> lanes,
                              const AllocatorRules& rules,
                              bool curves) {
  return replay(steps, lanes, rules, curves, nullptr);
}

ReplayOrders replay_in_orders(const ReplaySteps& steps,
                              std::span<const ReplayLane> lanes,
                              const AllocatorRules& rules,
                              uint64_t most,
                              bool recorded_is_enough) {
  ReplayOrders found;
  const ReplayResult first = replay(steps, lanes, rules, false, nullptr);
  add(found, first);
  const bool is_recorded = !steps.address.empty() && first.departed_step < 0;
  if (!first.order_matters || (is_recorded && recorded_is_enough)) {
    found.are_all = true;
    return found;
  }
  found.are_all = steps.address.empty() && tries_all(found, steps, lanes, rules, most);
  AllocatorRules other = rules;
  for (uint64_t i = 1; !found.are_all && i < most; ++i) {
    other.order = rules.order + i;
    add(found, replay(steps, lanes, other, false, nullptr));
  }
  return found;
}

class AllocatorModel::Parts {
 public:
  Parts(AllocatorRules rules, Segments segments)
      : rules_(std::move(rules)), allocator_(rules_, std::move(segments)) {}

  CachingAllocator& allocator() { return allocator_; }

 private:
  AllocatorRules rules_;
  CachingAllocator allocator_;
};

AllocatorModel::AllocatorModel(AllocatorRules rules, Segments segments)
    : parts_(std::make_unique<Parts>(std::move(rules), std::move(segments))) {}

AllocatorModel::~AllocatorModel() = default;

uint64_t AllocatorModel::allocate(uint32_t number, uint64_t bytes, uint64_t stream) {
  parts_->allocator().allocate(number, bytes, {stream, 0});
  return parts_->allocator().address_of(number);
}

void AllocatorModel::free(uint32_t number) {
  parts_->allocator().complete_free(number);
}

void AllocatorModel::trim() {
  parts_->allocator().trim(0);
}

const ReplayResult& AllocatorModel::counted() const {
  return parts_->allocator().counted();
}

}  // namespace pytracer
