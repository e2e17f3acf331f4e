// The CUDA caching allocator's events. This is a library of its own: it gets the recorder's
// functions as a table (core/tracker.h), and of torch it needs one symbol, the allocator.
//
// on_event runs with the device's allocator lock held: it appends one record and does nothing else.
// It may not take the GIL, call CUDA or torch, or throw.
#include "../core/tracker.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <array>
#include <exception>
#include <string>

namespace pytracer {

namespace {

using c10::cuda::CUDACachingAllocator::TraceEntry;

constexpr size_t kMaxDevices = 64;

const RecorderCalls* recorder = nullptr;  // set before anything is attached

// The places at which a device was met last, the newest first; written under its lock only.
// Where collectives have a stream of their own, places take turns.
struct LastPlace {
  uint32_t generation = 0;
  uint16_t number = 0;
  Place place{};
};

std::array<std::array<LastPlace, 4>, kMaxDevices> last_places;

uint16_t place_of(int device, void* stream, c10::MempoolId_t pool) {
  Place place{reinterpret_cast<uint64_t>(stream),
              pool.first,
              pool.second,
              DeviceType::kCuda,
              static_cast<uint8_t>(device)};
  auto& known = last_places[static_cast<size_t>(device) % kMaxDevices];
  uint32_t generation = recorder->generation->load(std::memory_order_relaxed);
  for (const LastPlace& last : known) {
    if (last.generation == generation && last.place == place) {
      return last.number;
    }
  }
  std::move_backward(known.begin(), known.end() - 1, known.end());
  known.front() = {generation, recorder->place(place), place};
  return known.front().number;
}

void count(Action action, int device, uint64_t address, uint64_t bytes) {
  recorder->count(action, DeviceType::kCuda, static_cast<uint8_t>(device), address, bytes);
}

void on_event(const TraceEntry& entry) {
  bool counts = recorder->counting->load(std::memory_order_relaxed);
  if (!recorder->recording->load(std::memory_order_relaxed) && !counts) {
    return;
  }
  Action action;
  switch (entry.action_) {
    case TraceEntry::ALLOC:
      action = Action::kAlloc;
      break;
    case TraceEntry::FREE_REQUESTED:
      action = Action::kFreeRequested;
      break;
    case TraceEntry::FREE_COMPLETED:
      action = Action::kFreeCompleted;
      break;
    case TraceEntry::SEGMENT_ALLOC:
      action = Action::kSegmentAlloc;
      break;
    case TraceEntry::SEGMENT_FREE:
      action = Action::kSegmentFree;
      break;
    case TraceEntry::SEGMENT_MAP:
      action = Action::kSegmentMap;
      break;
    case TraceEntry::SEGMENT_UNMAP:
      action = Action::kSegmentUnmap;
      break;
    case TraceEntry::SNAPSHOT:
      action = Action::kSnapshot;
      break;
    case TraceEntry::OOM:
      action = Action::kOom;
      break;
    default:
      return;  // newer torch: annotations and the like, which are no allocations
  }
  if (counts) {
    count(action, entry.device_, static_cast<uint64_t>(entry.addr_), entry.size_);
  }
  if (!recorder->recording->load(std::memory_order_relaxed)) {
    return;
  }
  try {
    uint16_t place = place_of(entry.device_, entry.stream_, entry.mempool_);
    recorder->record(action, place, static_cast<uint64_t>(entry.addr_), entry.size_);
  } catch (const std::exception&) {  // no memory for another place
    recorder->lose(action);
  }
}

class CudaTracker final : public DeviceTracker {
 public:
  bool ready() const override {
    auto* allocator = c10::cuda::CUDACachingAllocator::allocator.load();
    return allocator != nullptr && allocator->initialized();
  }

  std::string attach() override {
    if (attached_) {
      return {};
    }
    try {
      c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&on_event);
      attached_ = true;
      return {};
    } catch (const std::exception& error) {
      std::string text = error.what();
      return text.substr(0, text.find('\n'));
    }
  }

  // The allocator reports a snapshot to its trackers with the lock held: that event marks the
  // instant, and the rows written afterwards describe it.
  void seed() override {
    auto snapshot = c10::cuda::CUDACachingAllocator::get()->snapshot({0, 0}, false);
    for (const auto& segment : snapshot.segments) {
      auto address = static_cast<uint64_t>(segment.address);
      uint16_t place = place_of_seed(segment.device, segment.stream, segment.owner_private_pool_id);
      recorder->record(Action::kSeedSegment, place, address, segment.total_size);
      count(Action::kSeedSegment, segment.device, address, segment.total_size);
      for (const auto& block : segment.blocks) {
        if (block.active) {
          recorder->record(Action::kSeed, place, address, block.requested_size);
          count(Action::kSeed, segment.device, address, block.requested_size);
        }
        if (block.active && !block.allocated) {
          recorder->record(Action::kFreeRequested, place, address, block.requested_size);
        }
        address += block.size;
      }
    }
  }

 private:
  // Runs without the device's lock, so without the cache that the lock guards.
  static uint16_t place_of_seed(int device, void* stream, c10::MempoolId_t pool) {
    return recorder->place({reinterpret_cast<uint64_t>(stream),
                            pool.first,
                            pool.second,
                            DeviceType::kCuda,
                            static_cast<uint8_t>(device)});
  }

  bool attached_ = false;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) DeviceTracker* pytracer_open_tracker(
    const RecorderCalls& calls) {
  recorder = &calls;
  return new CudaTracker;  // leaked: the allocator keeps calling
}

}  // namespace pytracer
