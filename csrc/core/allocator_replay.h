// Replays requests and frees in a model of torch's CUDA caching allocator. The result: how much it
// would reserve under other settings and limits, how often it would retry, and which request would
// fail.
//
// tests/allocator_reference.py has the allocator in slow Python, one function for each of torch's;
// a test keeps the two equal.
//
// Addresses matter only between free blocks of equal size. With the addresses of a recording, a
// replay under its own settings is exact, and each block proves it. Otherwise nobody knows where
// the driver puts a segment, and the answer is an interval over orders of segments.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace pytracer {

// A program's settings in PYTORCH_ALLOC_CONF, and the bounds of the allocator.
struct AllocatorRules {
  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

  uint64_t max_split_size = kNone;
  uint64_t max_non_split_rounding = 20 << 20;
  std::vector<uint64_t> roundup_divisions;  // by power of two from 1 MiB on; empty: none
  double gc_threshold = 0;                  // works only beside a limit, as in torch
  bool expandable_segments = false;
  uint64_t large_segment_size = 20 << 20;
  uint64_t limit = kNone;     // set_per_process_memory_fraction: checked before the driver is asked
  uint64_t capacity = kNone;  // the bytes that the driver has for this allocator
  uint64_t order = 0;         // of segments: see MadeUpPlaces
};

enum class ReplayStep : uint8_t {
  kAlloc = 0,
  kFreeRequested = 1,  // the program gave the block back, a stream may still use it
  kFreeCompleted = 2,  // the allocator may hand it out again
  kAttempt = 3,        // a request that failed in the recording: served and freed at once
  kTrim = 4,           // empty_cache(); of a private pool: its blocks may go from now on
  // Only with addresses, and in the order of addresses before all others:
  kHeld = 5,  // a segment that was there before the recording
  kSeed = 6,  // a block in it; its bytes are those of the block
  // Only with addresses, before the request that they answer:
  kGiven = 7,    // memory that the driver gave
  kRefused = 8,  // it had none, and the cache was given back
};
inline constexpr uint8_t kReplaySteps = 9;

// The blocks that can serve a request: one stream's blocks of one pool. Pool 0 is the default.
struct ReplayLane {
  uint64_t stream;
  uint32_t pool;
};

struct ReplaySteps {
  std::span<const uint8_t> kind;
  std::span<const uint32_t> block;  // the allocation's number; ignored if the step has none
  std::span<const uint64_t> bytes;
  std::span<const uint32_t> lane;
  std::span<const uint64_t> address = {};  // in the recording whose rules are given, or empty
};

struct ReplayResult {
  uint64_t peak_reserved = 0;
  uint64_t peak_allocated = 0;
  uint64_t peak_active = 0;
  int64_t peak_reserved_step = -1;
  uint64_t reserved = 0;  // at the end, or when a request failed
  uint64_t allocated = 0;
  uint64_t active = 0;
  uint64_t largest_free = 0;          // the largest block that is reserved and not in use
  uint64_t largest_free_of_lane = 0;  // the largest of those that could serve the failed request
  uint64_t retries = 0;
  uint64_t device_allocs = 0;
  uint64_t device_frees = 0;
  int64_t departed_step = -1;  // the first at which the model and the recording differ
  bool order_matters = false;  // with other addresses of segments the figures might differ
  int64_t failed_step = -1;
  uint64_t failed_bytes = 0;  // the block it needed

  // After each step, if asked for.
  std::vector<uint64_t> reserved_after;
  std::vector<uint64_t> active_after;
  std::vector<uint64_t> largest_free_after;
};

// Stops at the first request that fails. Skips steps that name a block or lane that does not exist.
ReplayResult replay_allocator(const ReplaySteps& steps,
                              std::span<const ReplayLane> lanes,
                              const AllocatorRules& rules,
                              bool curves);

// The figures in several orders of segments.
struct ReplayOrders {
  uint64_t lowest_peak = 0;  // of reserved bytes, in orders that run to the end
  uint64_t highest_peak = 0;
  uint64_t orders = 0;
  uint64_t failed = 0;   // orders in which a request fails
  ReplayResult failure;  // of the first of these
  bool are_all = false;  // no other order has another outcome
};

// Tries all orders if `most` replays are enough for that, and else so many, `rules.order` first.
// The recorded order is enough if the question is about the recorded run itself.
ReplayOrders replay_in_orders(const ReplaySteps& steps,
                              std::span<const ReplayLane> lanes,
                              const AllocatorRules& rules,
                              uint64_t most,
                              bool recorded_is_enough);

// The same model, for one request at a time. It may take any amount from the driver.
class AllocatorModel {
 public:
  // Calls back for each segment, or piece of one, that it takes from the driver or gives back.
  using Segments = std::function<void(bool taken, uint64_t address, uint64_t bytes)>;

  AllocatorModel(AllocatorRules rules, Segments segments);
  ~AllocatorModel();
  AllocatorModel(const AllocatorModel&) = delete;  // its blocks point into it
  AllocatorModel& operator=(const AllocatorModel&) = delete;

  // Returns the address of a new block for the allocation of this number, which has no block yet.
  // Each stream has blocks of its own.
  uint64_t allocate(uint32_t number, uint64_t bytes, uint64_t stream);
  void free(uint32_t number);
  // empty_cache().
  void trim();
  // So far.
  const ReplayResult& counted() const;

 private:
  class Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace pytracer
