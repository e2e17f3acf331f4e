#include "caching_allocator.h"

#include <algorithm>

namespace pytracer {

bool CachingAllocator::allocate(uint32_t number, uint64_t requested, const ReplayLane& lane) {
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
  occupy(should_split(*block, size) ? *split(*block, size) : *block, number);
  return true;
}

void CachingAllocator::hold(uint64_t address, uint64_t amount, const ReplayLane& lane) {
  if (!follows_ || rules_.expandable_segments) {
    depart();
    return;
  }
  take(amount);
  Shelf& shelf = shelf_of(lane, amount == kSmallSegment);
  filled_ = make_segment(amount, places_.recorded(address), shelf);
  shelve(*filled_);
}

void CachingAllocator::seed(uint32_t number, uint64_t address, uint64_t size) {
  Block* rest = filled_;
  const uint64_t gap = rest == nullptr ? 0 : address - rest->address;
  if (rest == nullptr || gap > rest->size || size > rest->size - gap) {
    depart();
    return;
  }
  rest->shelf->free.erase(rest);
  if (gap > 0) {
    shelve(*split(*rest, gap));
    rest->shelf->free.erase(rest);
  }
  filled_ = rest->size > size ? rest : nullptr;
  occupy(filled_ == nullptr ? *rest : *split(*rest, size), number);
}

void CachingAllocator::trim(uint32_t owner) {
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

uint64_t CachingAllocator::round_size(uint64_t size) const {
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

Block* CachingAllocator::from_shelf(Shelf& shelf, uint64_t size) {
  shelf.pool->searches += collects() ? 1 : 0;
  auto at = at_least(shelf, size);
  if (at == shelf.free.end()) {
    return nullptr;
  }
  if (!(*at)->is_expandable()) {
    at = lowest_of_equals(shelf, at);
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

CachingAllocator::Free::iterator CachingAllocator::lowest_of_equals(Shelf& shelf,
                                                                    Free::iterator at) {
  if (orders_ == nullptr && counted_.order_matters) {
    return at;
  }
  std::vector<Free::iterator> firsts;  // of each segment
  std::vector<AllOrders::Candidate> candidates;
  for (auto next = at; next != shelf.free.end() && (*next)->size == (*at)->size; ++next) {
    if (firsts.empty() || (*next)->segment_number != candidates.back().segment) {
      firsts.push_back(next);
      candidates.push_back({(*next)->segment_number, !(*next)->is_split() && !collects()});
    }
  }
  const bool is_alike = std::ranges::all_of(candidates, &AllOrders::Candidate::is_whole);
  counted_.order_matters |= candidates.size() > 1 && !is_alike;
  return orders_ == nullptr ? at : firsts[orders_->lowest(candidates)];
}

void CachingAllocator::merge(Block& block, Block* neighbour) {
  if (neighbour == nullptr || !neighbour->is_free() || block.mapped != neighbour->mapped) {
    return;
  }
  Block& other = *neighbour;
  if (other.mapped) {
    other.shelf->free.erase(&other);
  } else {
    other.shelf->unmapped.erase(&other);
  }
  if (block.prev == &other) {
    block.address = other.address;
    block.prev = other.prev;
    if (block.prev != nullptr) {
      block.prev->next = &block;
    }
  } else {
    block.next = other.next;
    if (block.next != nullptr) {
      block.next->prev = &block;
    }
  }
  block.size += other.size;
  forget(other);
}

Block* CachingAllocator::from_device(Shelf& shelf, uint64_t size) {
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

Block* CachingAllocator::grow(Shelf& shelf, uint64_t size) {
  const uint64_t amount = segment_size(size);
  if (rules_.limit != AllocatorRules::kNone && counted_.reserved + amount > rules_.limit) {
    return nullptr;
  }
  if (std::exchange(refuses_, false)) {
    return nullptr;
  }
  if (rules_.expandable_segments) {
    return grow_expandable(shelf, size);
  }
  if (!reserve(amount)) {
    return nullptr;
  }
  const uint64_t given = next_given(amount);
  Block* block =
      make_segment(amount, follows_ ? places_.recorded(given) : places_.next(amount), shelf);
  tell(true, block->address, amount);
  return block;
}

uint64_t CachingAllocator::next_given(uint64_t amount) {
  if (!follows_ || given_.empty() || given_.front().amount != amount) {
    if (follows_) {
      depart();
    }
    return 0;
  }
  const uint64_t address = given_.front().address;
  given_.pop_front();
  return address;
}

void CachingAllocator::release(Block& block) {
  block.shelf->free.erase(&block);
  give_back(block.size);
  tell(false, block.address, block.size);
  forget(block);
}

void CachingAllocator::release(Pool& pool) {
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

void CachingAllocator::release_cached() {
  const std::vector<uint32_t> waiting(pending_.begin(), pending_.end());
  for (uint32_t number : waiting) {
    complete_free(*held_[number]);
  }
  for (auto& [key, pool] : pools_) {
    if (key.first == 0 || ended_pools_.contains(key.first)) {
      release(pool);
    }
  }
}

bool CachingAllocator::release_oversize(Shelf& shelf, uint64_t size) {
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

void CachingAllocator::collect_garbage() {
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

}  // namespace pytracer
