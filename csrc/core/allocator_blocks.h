// Free and used blocks of the allocator's model, and the shelves of the free ones.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <set>

namespace pytracer {

inline constexpr uint32_t kNobody = std::numeric_limits<uint32_t>::max();

struct Shelf;

struct Block {
  uint64_t size = 0;
  uint64_t address = 0;
  uint64_t rank = 0;  // of its segment: the lower one serves first
  Shelf* shelf = nullptr;
  Block* prev = nullptr;  // in the same segment
  Block* next = nullptr;
  uint64_t segment = 0;         // an expandable segment's base, or 0
  uint32_t segment_number = 0;  // of another segment: how many came before it
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
    if (a->rank != b->rank) {
      return a->rank < b->rank;
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

}  // namespace pytracer
