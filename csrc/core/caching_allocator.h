// torch's CUDA caching allocator: the rules of c10/cuda/CUDACachingAllocator.cpp, without memory.
//
// It can follow a recording: then segments lie where the recorded driver put them, and each block
// is compared with the recorded one.
#pragma once

#include "allocator_blocks.h"
#include "allocator_replay.h"
#include "segment_order.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace pytracer {

inline constexpr uint64_t kMinBlock = 512;
inline constexpr uint64_t kSmallSize = 1 << 20;
inline constexpr uint64_t kSmallSegment = 2 << 20;
inline constexpr uint64_t kMinLargeAlloc = 10 << 20;
inline constexpr uint64_t kRoundLarge = 2 << 20;
inline constexpr uint64_t kPhysicalPage = 2 << 20;

inline constexpr uint64_t kExpandableBase = uint64_t{1} << 58;
inline constexpr uint64_t kExpandableRoom = uint64_t{1} << 42;  // 4 TiB: more than any GPU has

inline uint64_t round_up(uint64_t size, uint64_t unit) {
  return (size + unit - 1) / unit * unit;
}

class CachingAllocator {
 public:
  // Calls `segments` for each segment, or piece of one, that comes or goes. With `orders` they
  // decide between equal blocks, instead of the rules' order.
  explicit CachingAllocator(const AllocatorRules& rules,
                            AllocatorModel::Segments segments = {},
                            AllOrders* orders = nullptr)
      : rules_(rules), segments_(std::move(segments)), orders_(orders), places_(rules.order) {}

  const ReplayResult& counted() const { return counted_; }

  void begin_step(int64_t step, bool is_from_before = false) {
    step_ = step;
    if (!is_from_before) {
      filled_ = nullptr;
    }
  }

  // False: out of memory.
  bool allocate(uint32_t number, uint64_t requested, const ReplayLane& lane);

  // For an allocation that has a block.
  uint64_t address_of(uint32_t number) const { return held_[number]->address; }

  bool holds(uint32_t number) const { return number < held_.size() && held_[number] != nullptr; }

  void request_free(uint32_t number) {
    Block* block = holds(number) ? held_[number] : nullptr;
    if (block != nullptr && block->allocated) {
      block->allocated = false;
      block->pending = true;
      counted_.allocated -= block->size;
      pending_.insert(number);
    }
  }

  // Does nothing if a retry has done this already.
  void complete_free(uint32_t number) {
    request_free(number);
    if (holds(number)) {
      complete_free(*held_[number]);
    }
  }

  // ---------------------------------------------------------------- the recording

  // From now on, what `given` says of the driver's answers is followed, while the model agrees.
  void follow() { follows_ = true; }

  // A segment that was there before the recording.
  void hold(uint64_t address, uint64_t amount, const ReplayLane& lane);

  // A block that was there before the recording, in the last such segment and above all others.
  void seed(uint32_t number, uint64_t address, uint64_t size);

  // The driver's next answer in the recording: a segment, or that it has none.
  void give(uint64_t address, uint64_t amount) { given_.push_back({address, amount}); }

  void refuse() { refuses_ = follows_; }

  // Compares with where the block lay in the recording.
  void compare(uint32_t number, uint64_t address) {
    if (follows_ && (!given_.empty() || refuses_ || held_[number]->address != address)) {
      depart();
    }
  }

  // The model does otherwise than the recording.
  void depart() {
    if (counted_.departed_step < 0) {
      counted_.departed_step = step_;
    }
    follows_ = refuses_ = false;
    given_.clear();
  }

  // ---------------------------------------------------------------- the end of blocks

  // Does the work of empty_cache(), or of the end of a private pool.
  void trim(uint32_t owner);

  uint64_t largest_free() const {
    uint64_t largest = 0;
    for (const auto& [key, shelf] : shelves_) {
      largest = std::max(largest, largest_of(shelf));
    }
    return largest;
  }

 private:
  using ShelfKey = std::pair<std::pair<uint32_t, bool>, uint64_t>;
  using Free = std::set<Block*, BySize>;

  void occupy(Block& block, uint32_t number) {
    block.allocated = true;
    block.number = number;
    if (number >= held_.size()) {
      held_.resize(number + 1);
    }
    held_[number] = &block;
    counted_.allocated += block.size;
    counted_.active += block.size;
    counted_.peak_allocated = std::max(counted_.peak_allocated, counted_.allocated);
    counted_.peak_active = std::max(counted_.peak_active, counted_.active);
  }

  // ---------------------------------------------------------------- sizes

  uint64_t round_size(uint64_t size) const;

  uint64_t divisions_of(uint64_t size) const {
    const auto& divisions = rules_.roundup_divisions;
    if (divisions.empty()) {
      return 0;
    }
    const int power = static_cast<int>(std::bit_width(size)) - 1 - 20;
    return divisions[std::clamp<int>(power, 0, static_cast<int>(divisions.size()) - 1)];
  }

  uint64_t segment_size(uint64_t size) const {
    if (size <= kSmallSize) {
      return kSmallSegment;
    }
    return size < kMinLargeAlloc ? rules_.large_segment_size : round_up(size, kRoundLarge);
  }

  uint64_t page_of(const Pool& pool) const {
    return pool.small ? kSmallSegment : rules_.large_segment_size;
  }

  bool should_split(const Block& block, uint64_t size) const {
    const uint64_t rest = block.size - size;
    if (block.shelf->pool->small || rules_.expandable_segments) {
      return rest >= kMinBlock;
    }
    return size < rules_.max_split_size && rest > kSmallSize;
  }

  bool collects() const { return rules_.gc_threshold > 0 && rules_.limit != AllocatorRules::kNone; }

  // ---------------------------------------------------------------- shelves

  Shelf& shelf_of(const ReplayLane& lane, bool small) {
    const std::pair<uint32_t, bool> key{lane.pool, small};
    auto found = shelves_.find({key, lane.stream});
    if (found == shelves_.end()) {
      Pool& pool = pools_.try_emplace(key, Pool{lane.pool, small}).first->second;
      found = shelves_.try_emplace({key, lane.stream}, Shelf{&pool, {}, {}}).first;
    }
    return found->second;
  }

  template <class Visit>
  void each_shelf(const Pool& pool, Visit visit) {
    const std::pair<uint32_t, bool> key{pool.owner, pool.small};
    for (auto at = shelves_.lower_bound({key, 0}); at != shelves_.end() && at->first.first == key;
         ++at) {
      visit(at->second);
    }
  }

  static uint64_t largest_of(const Shelf& shelf) {
    return shelf.free.empty() ? 0 : (*shelf.free.rbegin())->size;
  }

  void shelve(Block& block) {
    block.shelved_at = block.shelf->pool->searches;
    block.shelf->free.insert(&block);
  }

  static auto at_least(Shelf& shelf, uint64_t size) {
    Block key;
    key.size = size;
    return shelf.free.lower_bound(&key);
  }

  // The size that a block could grow to, if its segment grows into the unmapped range behind it.
  static uint64_t size_to_be(const Block& block) {
    const bool grows = block.next != nullptr && !block.next->mapped;
    return block.size + (grows ? block.next->size : 0);
  }

  Block* from_shelf(Shelf& shelf, uint64_t size);

  // Of equal blocks the lowest. Notes if it matters which segment lies lower: whole segments are
  // alike, unless their ages count.
  Free::iterator lowest_of_equals(Shelf& shelf, Free::iterator at);

  // Hands out the front of the block; the rest goes back to the shelf.
  Block* split(Block& rest, uint64_t size) {
    Block* front = make_beside(rest, size, rest.address);
    put_between(*front, rest.prev, &rest);
    rest.address += size;
    rest.size -= size;
    shelve(rest);
    return front;
  }

  void merge(Block& block, Block* neighbour);

  static void put_between(Block& block, Block* before, Block* after) {
    block.prev = before;
    block.next = after;
    if (before != nullptr) {
      before->next = &block;
    }
    if (after != nullptr) {
      after->prev = &block;
    }
  }

  Block* make(uint64_t size, uint64_t address, Shelf& shelf) {
    Block* block = nullptr;
    if (spare_.empty()) {
      block = &blocks_.emplace_back();
    } else {
      block = spare_.back();
      spare_.pop_back();
      *block = Block{};
    }
    block->size = size;
    block->address = address;
    block->shelf = &shelf;
    return block;
  }

  // Another block of the same segment.
  Block* make_beside(const Block& other, uint64_t size, uint64_t address) {
    Block* block = make(size, address, *other.shelf);
    block->segment = other.segment;
    block->segment_number = other.segment_number;
    block->rank = other.rank;
    return block;
  }

  Block* make_segment(uint64_t size, SegmentPlace place, Shelf& shelf) {
    Block* block = make(size, place.address, shelf);
    block->rank = place.rank;
    block->segment_number = segments_made_++;
    return block;
  }

  void forget(Block& block) { spare_.push_back(&block); }

  // ---------------------------------------------------------------- the device

  Block* from_device(Shelf& shelf, uint64_t size);

  Block* grow(Shelf& shelf, uint64_t size);

  // The recorded address of so much memory. Departs if the recording has no such answer.
  uint64_t next_given(uint64_t amount);

  void tell(bool taken, uint64_t address, uint64_t amount) const {
    if (segments_) {
      segments_(taken, address, amount);
    }
  }

  bool reserve(uint64_t amount) {
    const uint64_t physical = round_up(amount, kPhysicalPage);
    if (rules_.capacity != AllocatorRules::kNone && physical_ + physical > rules_.capacity) {
      return false;
    }
    take(amount);
    return true;
  }

  void take(uint64_t amount) {
    physical_ += round_up(amount, kPhysicalPage);
    counted_.reserved += amount;
    ++counted_.device_allocs;
    if (counted_.reserved > counted_.peak_reserved) {
      counted_.peak_reserved = counted_.reserved;
      counted_.peak_reserved_step = step_;
    }
  }

  void give_back(uint64_t amount) {
    physical_ -= round_up(amount, kPhysicalPage);
    counted_.reserved -= amount;
    ++counted_.device_frees;
  }

  // ---------------------------------------------------------------- expandable segments

  Block* grow_expandable(Shelf& shelf, uint64_t size);

  // The lowest range with enough room, free or not mapped.
  Block* find_expandable(Shelf& shelf, uint64_t size);

  bool map(Block& block, uint64_t size);

  // Gives the block's whole pages back.
  void unmap(Block& block);

  // ---------------------------------------------------------------- giving back

  void complete_free(Block& block) {
    pending_.erase(block.number);
    held_[block.number] = nullptr;
    block.number = kNobody;
    block.pending = false;
    counted_.active -= block.size;
    merge(block, block.prev);
    merge(block, block.next);
    shelve(block);
  }

  void release(Block& block);

  void release(Pool& pool);

  void release_cached();

  // One block that is large enough; otherwise the largest ones, until their sum is.
  bool release_oversize(Shelf& shelf, uint64_t size);

  void collect_garbage();

  struct Given {
    uint64_t address;
    uint64_t amount;
  };

  const AllocatorRules& rules_;
  AllocatorModel::Segments segments_;
  AllOrders* orders_;
  MadeUpPlaces places_;
  uint32_t segments_made_ = 0;
  bool follows_ = false;     // the recording's driver
  bool refuses_ = false;     // as it did for this request in the recording
  std::deque<Given> given_;  // what it gave for this request in the recording
  Block* filled_ = nullptr;  // the free end of the segment that seeds fill
  std::map<std::pair<uint32_t, bool>, Pool> pools_;
  std::map<ShelfKey, Shelf> shelves_;
  std::set<uint32_t> ended_pools_;
  std::set<uint32_t> pending_;  // numbers of allocations
  std::vector<Block*> held_;    // by the allocation's number
  std::deque<Block> blocks_;
  std::vector<Block*> spare_;
  uint64_t physical_ = 0;
  uint64_t next_expandable_ = kExpandableBase;
  int64_t step_ = -1;
  ReplayResult counted_;
};

}  // namespace pytracer
