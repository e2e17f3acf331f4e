// Requests and frees through a model of torch's CUDA caching allocator: what it would reserve under
// other settings and limits, how often it would retry, and which request would fail.
//
// The rules are those of c10/cuda/CUDACachingAllocator.cpp. tests/allocator_reference.py says the
// same in slow Python, one function per function of torch's; both are held equal.
//
// What the model does not know: where the driver puts a segment. It does what an H200's driver was
// seen to do. Addresses matter only between free blocks of equal size.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace pytracer {

// What a program can set by PYTORCH_ALLOC_CONF, and what bounds the allocator.
struct AllocatorRules {
  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

  uint64_t max_split_size = kNone;
  uint64_t max_non_split_rounding = 20 << 20;
  std::vector<uint64_t> roundup_divisions;  // by power of two from 1 MiB on; empty: none
  double gc_threshold = 0;                  // works only beside a limit, as in torch
  bool expandable_segments = false;
  uint64_t large_segment_size = 20 << 20;
  uint64_t limit = kNone;     // set_per_process_memory_fraction: asked before the driver is
  uint64_t capacity = kNone;  // what the driver has for this allocator
};

enum class ReplayStep : uint8_t {
  kAlloc = 0,
  kFreeRequested = 1,  // the program gave the block back, a stream may still use it
  kFreeCompleted = 2,  // the allocator may hand it out again
  kAttempt = 3,        // a request that failed in the recording: served and given back at once
  kTrim = 4,           // empty_cache(); of a private pool: its blocks may go from now on
};
inline constexpr uint8_t kReplaySteps = 5;

// Where a request is served from: a stream's blocks of one pool. Pool 0 is the default one.
struct ReplayLane {
  uint64_t stream;
  uint32_t pool;
};

struct ReplaySteps {
  std::span<const uint8_t> kind;
  std::span<const uint32_t> block;  // the allocation's number; any, where there is none
  std::span<const uint64_t> bytes;
  std::span<const uint32_t> lane;
};

struct ReplayResult {
  uint64_t peak_reserved = 0;
  uint64_t peak_allocated = 0;
  uint64_t peak_active = 0;
  int64_t peak_reserved_step = -1;
  uint64_t reserved = 0;  // at the end, or where a request failed
  uint64_t allocated = 0;
  uint64_t active = 0;
  uint64_t largest_free = 0;          // the largest block that the allocator holds and nobody has
  uint64_t largest_free_of_lane = 0;  // of those that the failed request could be served from
  uint64_t retries = 0;
  uint64_t device_allocs = 0;
  uint64_t device_frees = 0;
  int64_t failed_step = -1;
  uint64_t failed_bytes = 0;  // the block it needed

  // After each step, if asked for.
  std::vector<uint64_t> reserved_after;
  std::vector<uint64_t> active_after;
  std::vector<uint64_t> largest_free_after;
};

// Stops at the first request that fails. Steps that name a block or lane that does not exist are
// passed over.
ReplayResult replay_allocator(const ReplaySteps& steps,
                              std::span<const ReplayLane> lanes,
                              const AllocatorRules& rules,
                              bool curves);

// The same model, asked one request at a time. Nothing bounds what it takes from the driver.
class AllocatorModel {
 public:
  // Called with each segment, or piece of one, that is taken from the driver or given back.
  using Segments = std::function<void(bool taken, uint64_t address, uint64_t bytes)>;

  AllocatorModel(AllocatorRules rules, Segments segments);
  ~AllocatorModel();
  AllocatorModel(const AllocatorModel&) = delete;  // its blocks point into it
  AllocatorModel& operator=(const AllocatorModel&) = delete;

  // The address of a block for the allocation of this number, which has none yet.
  uint64_t allocate(uint32_t number, uint64_t bytes);
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
