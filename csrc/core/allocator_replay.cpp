#include "allocator_replay.h"

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <limits>
#include <map>
#include <set>

namespace pytracer {

namespace {

constexpr uint64_t kMinBlock = 512;
constexpr uint64_t kSmallSize = 1 << 20;
constexpr uint64_t kSmallSegment = 2 << 20;
constexpr uint64_t kMinLargeAlloc = 10 << 20;
constexpr uint64_t kRoundLarge = 2 << 20;
constexpr uint64_t kPhysicalPage = 2 << 20;

// Addresses are made up. They decide between free blocks of equal size.
constexpr uint64_t kAddresses = uint64_t{1} << 57;
constexpr uint64_t kChunkPages = 16;  // 32 MiB
constexpr uint64_t kExpandableBase = uint64_t{1} << 58;
constexpr uint64_t kExpandableRoom = uint64_t{1} << 42;  // 4 TiB: more than any GPU has

uint64_t round_up(uint64_t size, uint64_t unit) {
  return (size + unit - 1) / unit * unit;
}

constexpr uint32_t kNobody = std::numeric_limits<uint32_t>::max();

struct Shelf;

struct Block {
  uint64_t size = 0;
  uint64_t address = 0;
  Shelf* shelf = nullptr;
  Block* prev = nullptr;  // in the same segment
  Block* next = nullptr;
  uint64_t segment = 0;  // an expandable segment's base, or 0
  uint64_t shelved_at = 0;
  uint32_t number = kNobody;  // the allocation that uses it
  bool allocated = false;
  bool pending = false;  // freed by the program, and a stream may still use it
  bool mapped = true;

  bool is_split() const { return prev != nullptr || next != nullptr; }

  bool is_free() const { return !allocated && !pending; }

  bool is_expandable() const { return segment != 0; }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->size != b->size) {
      return a->size < b->size;
    }
    return a->address != b->address ? a->address < b->address : std::less<>()(a, b);
  }
};

struct ByAddress {
  bool operator()(const Block* a, const Block* b) const { return a->address < b->address; }
};

// The small or the large blocks of a pool, for all streams.
struct Pool {
  uint32_t owner;
  bool small;
  uint64_t searches = 0;
};

// The free blocks of one pool and stream.
struct Shelf {
  Pool* pool;
  std::set<Block*, BySize> free;
  std::set<Block*, ByAddress> unmapped;
};

class Allocator {
 public:
  explicit Allocator(const AllocatorRules& rules, AllocatorModel::Segments segments = {})
      : rules_(rules), segments_(std::move(segments)) {}

  const ReplayResult& counted() const { return counted_; }

  void begin_step(int64_t step) { step_ = step; }

  // False: out of memory.
  bool allocate(uint32_t number, uint64_t requested, const ReplayLane& lane) {
    const uint64_t size = round_size(requested);
    Shelf& shelf = shelf_of(lane, size <= kSmallSize);
    Block* block = from_shelf(shelf, size);
    if (block == nullptr) {
      block = from_device(shelf, size);
    }
    if (block == nullptr) {
      counted_.failed_bytes = size;
      counted_.failed_step = step_;
      counted_.largest_free_of_lane = largest_of(shelf);
      return false;
    }
    if (should_split(*block, size)) {
      block = split(*block, size);
    }
    block->allocated = true;
    block->number = number;
    if (number >= held_.size()) {
      held_.resize(number + 1);
    }
    held_[number] = block;
    counted_.allocated += block->size;
    counted_.active += block->size;
    counted_.peak_allocated = std::max(counted_.peak_allocated, counted_.allocated);
    counted_.peak_active = std::max(counted_.peak_active, counted_.active);
    return true;
  }

  // For an allocation that has a block.
  uint64_t address_of(uint32_t number) const { return held_[number]->address; }

  bool holds(uint32_t number) const { return number < held_.size() && held_[number] != nullptr; }

  void request_free(uint32_t number) {
    Block* block = holds(number) ? held_[number] : nullptr;
    if (block != nullptr && block->allocated) {
      block->allocated = false;
      block->pending = true;
      counted_.allocated -= block->size;
      pending_.insert(block);
    }
  }

  // Does nothing if a retry has done this already.
  void complete_free(uint32_t number) {
    request_free(number);
    if (holds(number)) {
      complete_free(*held_[number]);
    }
  }

  // Does the work of empty_cache(), or of the end of a private pool.
  void trim(uint32_t owner) {
    if (owner == 0) {
      release_cached();
      return;
    }
    ended_pools_.insert(owner);
    for (bool small : {true, false}) {
      if (auto pool = pools_.find({owner, small}); pool != pools_.end()) {
        release(pool->second);
      }
    }
  }

  uint64_t largest_free() const {
    uint64_t largest = 0;
    for (const auto& [key, shelf] : shelves_) {
      largest = std::max(largest, largest_of(shelf));
    }
    return largest;
  }

 private:
  using ShelfKey = std::pair<std::pair<uint32_t, bool>, uint64_t>;

  // ---------------------------------------------------------------- sizes

  uint64_t round_size(uint64_t size) const {
    if (size < kMinBlock) {
      return kMinBlock;
    }
    const uint64_t divisions = divisions_of(size);
    if (divisions <= 1 || size <= kMinBlock * divisions) {
      return round_up(size, kMinBlock);
    }
    // The number of sizes between two powers of two.
    const uint64_t power = std::bit_floor(size);
    return round_up(size, std::max<uint64_t>(power / divisions, 1));
  }

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

  Block* from_shelf(Shelf& shelf, uint64_t size) {
    shelf.pool->searches += collects() ? 1 : 0;
    auto at = at_least(shelf, size);
    if (at == shelf.free.end()) {
      return nullptr;
    }
    for (auto next = std::next(at); (*at)->is_expandable() && next != shelf.free.end() &&
                                    size_to_be(**next) < size_to_be(**at);) {
      at = next++;
    }
    Block* block = *at;
    const bool oversize = size >= rules_.max_split_size;
    if (!oversize && block->size >= rules_.max_split_size) {
      return nullptr;
    }
    if (oversize && block->size >= size + rules_.max_non_split_rounding) {
      return nullptr;
    }
    shelf.free.erase(at);
    return block;
  }

  // Hands out the front of the block; the rest goes back to the shelf.
  Block* split(Block& rest, uint64_t size) {
    Block* front = make(size, rest.address, *rest.shelf, rest.segment);
    put_between(*front, rest.prev, &rest);
    rest.address += size;
    rest.size -= size;
    shelve(rest);
    return front;
  }

  void merge(Block& block, Block* other) {
    if (other == nullptr || !other->is_free() || block.mapped != other->mapped) {
      return;
    }
    if (other->mapped) {
      other->shelf->free.erase(other);
    } else {
      other->shelf->unmapped.erase(other);
    }
    if (block.prev == other) {
      block.address = other->address;
      block.prev = other->prev;
      if (block.prev != nullptr) {
        block.prev->next = &block;
      }
    } else {
      block.next = other->next;
      if (block.next != nullptr) {
        block.next->prev = &block;
      }
    }
    block.size += other->size;
    forget(*other);
  }

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

  Block* make(uint64_t size, uint64_t address, Shelf& shelf, uint64_t segment) {
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
    block->segment = segment;
    return block;
  }

  void forget(Block& block) { spare_.push_back(&block); }

  // ---------------------------------------------------------------- the device

  Block* from_device(Shelf& shelf, uint64_t size) {
    if (collects()) {
      collect_garbage();
    }
    Block* block = grow(shelf, size);
    if (block == nullptr && release_oversize(shelf, size)) {
      block = grow(shelf, size);
    }
    // While a graph is captured, or a pool of the program's is in use, nothing else is freed.
    if (block == nullptr && shelf.pool->owner == 0) {
      release_cached();
      ++counted_.retries;
      block = grow(shelf, size);
    }
    return block;
  }

  Block* grow(Shelf& shelf, uint64_t size) {
    const uint64_t amount = segment_size(size);
    if (rules_.limit != AllocatorRules::kNone && counted_.reserved + amount > rules_.limit) {
      return nullptr;
    }
    if (rules_.expandable_segments) {
      return grow_expandable(shelf, size);
    }
    if (!reserve(amount)) {
      return nullptr;
    }
    Block* block = make(amount, segment_address(amount), shelf, 0);
    tell(true, block->address, amount);
    return block;
  }

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
    physical_ += physical;
    counted_.reserved += amount;
    ++counted_.device_allocs;
    if (counted_.reserved > counted_.peak_reserved) {
      counted_.peak_reserved = counted_.reserved;
      counted_.peak_reserved_step = step_;
    }
    return true;
  }

  void give_back(uint64_t amount) {
    physical_ -= round_up(amount, kPhysicalPage);
    counted_.reserved -= amount;
    ++counted_.device_frees;
  }

  // Imitates the observed driver: it takes room in chunks from the top of the address space down.
  // The rest of a chunk serves later segments, the lowest first.
  uint64_t segment_address(uint64_t amount) {
    const uint64_t pages = round_up(amount, kPhysicalPage) / kPhysicalPage;
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
      found = round_up(pages, kChunkPages);
      next_chunk_ -= found * kPhysicalPage;
      address = next_chunk_;
    }
    if (found > pages) {
      holes_[found - pages].insert(address + pages * kPhysicalPage);
    }
    return address;
  }

  // ---------------------------------------------------------------- expandable segments

  Block* grow_expandable(Shelf& shelf, uint64_t size) {
    Block* block = find_expandable(shelf, size);
    if (!block->mapped && !map(*block, std::min(block->size, size))) {
      return nullptr;
    }
    while (block->size < size) {
      Block* next = block->next;
      if (!map(*next, std::min(size - block->size, next->size))) {
        return nullptr;
      }
      block = next;
    }
    shelf.free.erase(block);
    return block;
  }

  // The lowest range with enough room, free or not mapped.
  Block* find_expandable(Shelf& shelf, uint64_t size) {
    for (Block* block : shelf.unmapped) {
      if (block->prev != nullptr && block->prev->is_free()) {
        block = block->prev;
      }
      uint64_t room = 0;
      for (const Block* at = block; room < size && at != nullptr && at->is_free(); at = at->next) {
        room += at->size;
      }
      if (room >= size) {
        return block;
      }
    }
    const uint64_t page = page_of(*shelf.pool);
    Block* all = make(kExpandableRoom / page * page, next_expandable_, shelf, next_expandable_);
    next_expandable_ += kExpandableRoom;
    all->mapped = false;
    shelf.unmapped.insert(all);
    return all;
  }

  bool map(Block& block, uint64_t size) {
    const uint64_t page = page_of(*block.shelf->pool);
    const uint64_t from = (block.address - block.segment) / page * page;
    const uint64_t to = round_up(block.address - block.segment + size, page);
    const uint64_t amount = to - from;
    if (!reserve(amount)) {
      return false;
    }
    tell(true, block.segment + from, amount);
    block.shelf->unmapped.erase(&block);
    block.mapped = true;
    if (amount < block.size) {
      Block* rest = make(block.size - amount, block.address + amount, *block.shelf, block.segment);
      rest->mapped = false;
      put_between(*rest, &block, block.next);
      block.size = amount;
      block.shelf->unmapped.insert(rest);
    }
    merge(block, block.prev);
    merge(block, block.next);
    shelve(block);
    return true;
  }

  // Gives the block's whole pages back.
  void unmap(Block& block) {
    const uint64_t page = page_of(*block.shelf->pool);
    const uint64_t from = block.segment + round_up(block.address - block.segment, page);
    const uint64_t end = block.address + block.size;
    const uint64_t to = block.segment + (end - block.segment) / page * page;
    if (from >= to) {
      return;
    }
    block.shelf->free.erase(&block);
    if (from > block.address) {
      Block* before = make(from - block.address, block.address, *block.shelf, block.segment);
      put_between(*before, block.prev, &block);
      shelve(*before);
    }
    if (end > to) {
      Block* after = make(end - to, to, *block.shelf, block.segment);
      put_between(*after, &block, block.next);
      shelve(*after);
    }
    block.address = from;
    block.size = to - from;
    block.mapped = false;
    merge(block, block.prev);
    merge(block, block.next);
    block.shelf->unmapped.insert(&block);
    give_back(to - from);
    tell(false, from, to - from);
  }

  // ---------------------------------------------------------------- giving back

  void complete_free(Block& block) {
    pending_.erase(&block);
    held_[block.number] = nullptr;
    block.number = kNobody;
    block.pending = false;
    counted_.active -= block.size;
    merge(block, block.prev);
    merge(block, block.next);
    shelve(block);
  }

  void release(Block& block) {
    block.shelf->free.erase(&block);
    give_back(block.size);
    tell(false, block.address, block.size);
    forget(block);
  }

  void release(Pool& pool) {
    each_shelf(pool, [&](Shelf& shelf) {
      const std::vector<Block*> all(shelf.free.begin(), shelf.free.end());
      for (Block* block : all) {
        if (block->is_expandable()) {
          unmap(*block);
          if (!block->mapped && !block->is_split()) {
            shelf.unmapped.erase(block);
            forget(*block);
          }
        } else if (!block->is_split()) {
          release(*block);
        }
      }
    });
  }

  void release_cached() {
    const std::vector<Block*> waiting(pending_.begin(), pending_.end());
    for (Block* block : waiting) {
      complete_free(*block);
    }
    for (auto& [key, pool] : pools_) {
      if (key.first == 0 || ended_pools_.contains(key.first)) {
        release(pool);
      }
    }
  }

  // One block that is large enough; otherwise the largest ones, until their sum is.
  bool release_oversize(Shelf& shelf, uint64_t size) {
    if (rules_.max_split_size == AllocatorRules::kNone) {
      return false;
    }
    const uint64_t wanted = std::max(size, rules_.max_split_size);
    auto at = at_least(shelf, wanted);
    if (at != shelf.free.end() && !(*at)->is_expandable()) {
      release(**at);
      return true;
    }
    uint64_t released = 0;
    while (at != shelf.free.begin() && released < wanted) {
      Block* block = *--at;
      if (block->size < rules_.max_split_size) {
        break;
      }
      if (!block->is_expandable()) {
        at = std::next(at);
        released += block->size;
        release(*block);
      }
    }
    return released >= wanted;
  }

  void collect_garbage() {
    const auto threshold =
        static_cast<uint64_t>(rules_.gc_threshold * static_cast<double>(rules_.limit));
    auto large = pools_.find({0, false});
    if (counted_.reserved <= threshold || large == pools_.end()) {
      return;
    }
    Pool& pool = large->second;
    auto age = [&](const Block& block) { return pool.searches - block.shelved_at; };
    const uint64_t target = counted_.reserved - threshold;
    uint64_t total_age = 0;
    int64_t count = 0;
    each_shelf(pool, [&](Shelf& shelf) {
      for (const Block* block : shelf.free) {
        if (!block->is_split()) {
          total_age += age(*block);
          ++count;
        }
      }
    });
    uint64_t reclaimed = 0;
    bool freed = true;
    while (reclaimed < target && freed && count > 0) {
      const double mean = static_cast<double>(total_age) / static_cast<double>(count);
      freed = false;
      each_shelf(pool, [&](Shelf& shelf) {
        const std::vector<Block*> all(shelf.free.begin(), shelf.free.end());
        for (Block* block : all) {
          if (block->is_split() || block->is_expandable() ||
              static_cast<double>(age(*block)) < mean) {
            continue;
          }
          freed = true;
          reclaimed += block->size;
          total_age -= age(*block);
          --count;
          release(*block);
        }
      });
    }
  }

  const AllocatorRules& rules_;
  AllocatorModel::Segments segments_;
  std::map<std::pair<uint32_t, bool>, Pool> pools_;
  std::map<ShelfKey, Shelf> shelves_;
  std::set<uint32_t> ended_pools_;
  std::set<Block*, ByAddress> pending_;
  std::vector<Block*> held_;  // by the allocation's number
  std::deque<Block> blocks_;
  std::vector<Block*> spare_;
  uint64_t physical_ = 0;
  std::array<std::set<uint64_t>, kChunkPages> holes_;  // of the address space, by pages
  uint64_t next_chunk_ = kAddresses;
  uint64_t next_expandable_ = kExpandableBase;
  int64_t step_ = -1;
  ReplayResult counted_;
};

}  // namespace

ReplayResult replay_allocator(const ReplaySteps& steps,
                              std::span<const ReplayLane> lanes,
                              const AllocatorRules& rules,
                              bool curves) {
  Allocator allocator(rules);
  ReplayResult curve;
  for (size_t i = 0; i < steps.kind.size() && allocator.counted().failed_step < 0; ++i) {
    allocator.begin_step(static_cast<int64_t>(i));
    const uint32_t number = steps.block[i];
    const ReplayLane* lane = steps.lane[i] < lanes.size() ? &lanes[steps.lane[i]] : nullptr;
    switch (static_cast<ReplayStep>(steps.kind[i])) {
      case ReplayStep::kAlloc:
        if (lane != nullptr && !allocator.holds(number)) {
          allocator.allocate(number, steps.bytes[i], *lane);
        }
        break;
      case ReplayStep::kFreeRequested:
        allocator.request_free(number);
        break;
      case ReplayStep::kFreeCompleted:
        allocator.complete_free(number);
        break;
      case ReplayStep::kAttempt:
        if (lane != nullptr && !allocator.holds(number) &&
            allocator.allocate(number, steps.bytes[i], *lane)) {
          allocator.complete_free(number);
        }
        break;
      case ReplayStep::kTrim:
        if (lane != nullptr) {
          allocator.trim(lane->pool);
        }
        break;
    }
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

class AllocatorModel::Parts {
 public:
  Parts(AllocatorRules rules, Segments segments)
      : rules_(std::move(rules)), allocator_(rules_, std::move(segments)) {}

  Allocator& allocator() { return allocator_; }

 private:
  AllocatorRules rules_;
  Allocator allocator_;
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
