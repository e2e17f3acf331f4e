#include "caching_allocator.h"

#include <algorithm>

namespace pytracer {

Block* CachingAllocator::grow_expandable(Shelf& shelf, uint64_t size) {
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

Block* CachingAllocator::find_expandable(Shelf& shelf, uint64_t size) {
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
  const bool is_recorded = !given_.empty() && shelf.unmapped.empty();
  const uint64_t base = is_recorded ? given_.front().address : next_expandable_;
  next_expandable_ += kExpandableRoom;
  Block* all = make(kExpandableRoom / page * page, base, shelf);
  all->segment = base;
  all->mapped = false;
  shelf.unmapped.insert(all);
  return all;
}

bool CachingAllocator::map(Block& block, uint64_t size) {
  const uint64_t page = page_of(*block.shelf->pool);
  const uint64_t from = (block.address - block.segment) / page * page;
  const uint64_t to = round_up(block.address - block.segment + size, page);
  const uint64_t amount = to - from;
  if (!reserve(amount)) {
    return false;
  }
  if (follows_ && next_given(amount) != block.segment + from) {
    depart();
  }
  tell(true, block.segment + from, amount);
  block.shelf->unmapped.erase(&block);
  block.mapped = true;
  if (amount < block.size) {
    Block* rest = make_beside(block, block.size - amount, block.address + amount);
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

void CachingAllocator::unmap(Block& block) {
  const uint64_t page = page_of(*block.shelf->pool);
  const uint64_t from = block.segment + round_up(block.address - block.segment, page);
  const uint64_t end = block.address + block.size;
  const uint64_t to = block.segment + (end - block.segment) / page * page;
  if (from >= to) {
    return;
  }
  block.shelf->free.erase(&block);
  if (from > block.address) {
    Block* before = make_beside(block, from - block.address, block.address);
    put_between(*before, block.prev, &block);
    shelve(*before);
  }
  if (end > to) {
    Block* after = make_beside(block, end - to, to);
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

}  // namespace pytracer
