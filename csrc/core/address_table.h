// One number for each live block, by the block's address.
//
// Open addressing, linear probing. Erasing shifts the followers back instead of leaving tombstones,
// because a program frees as often as it allocates.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pytracer {

// Values are not negative.
template <typename Value>
class AddressTable {
 public:
  // A pointer to the block's value, or null.
  Value* find(uint64_t address) {
    for (size_t at = home(address); slots_[at].value != kNone; at = next(at)) {
      if (slots_[at].address == address) {
        return &slots_[at].value;
      }
    }
    return nullptr;
  }

  // The address must not be in the table.
  void insert(uint64_t address, Value value) {
    if ((size_ + 1) * 2 > slots_.size()) {
      grow();
    }
    place_slot({address, value});
    ++size_;
  }

  // Returns the value that the address had; a negative one if it had none.
  Value put(uint64_t address, Value value) {
    if ((size_ + 1) * 2 > slots_.size()) {
      grow();
    }
    size_t at = home(address);
    for (; slots_[at].value != kNone; at = next(at)) {
      if (slots_[at].address == address) {
        return std::exchange(slots_[at].value, value);
      }
    }
    slots_[at] = {address, value};
    ++size_;
    return kNone;
  }

  void erase(Value* found) {
    size_t hole = slot_of(found);
    for (size_t at = next(hole); slots_[at].value != kNone; at = next(at)) {
      // A slot may move back into the hole unless its home lies after the hole.
      size_t wanted = home(slots_[at].address);
      if (((at - wanted) & mask()) >= ((at - hole) & mask())) {
        slots_[hole] = slots_[at];
        hole = at;
      }
    }
    slots_[hole].value = kNone;
    --size_;
  }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Slot& slot : slots_) {
      if (slot.value != kNone) {
        visit(slot.address, slot.value);
      }
    }
  }

 private:
  static constexpr Value kNone = -1;

  struct Slot {
    uint64_t address = 0;
    Value value = kNone;
  };

  size_t mask() const { return slots_.size() - 1; }

  size_t next(size_t at) const { return (at + 1) & mask(); }

  // Addresses differ in their middle bits; multiplying carries these to the top.
  size_t home(uint64_t address) const {
    return static_cast<size_t>((address * 0x9E3779B97F4A7C15u) >> shift_);
  }

  size_t slot_of(const Value* value) const {
    auto offset =
        reinterpret_cast<const char*>(value) - reinterpret_cast<const char*>(slots_.data());
    return static_cast<size_t>(offset) / sizeof(Slot);
  }

  void place_slot(Slot slot) {
    size_t at = home(slot.address);
    while (slots_[at].value != kNone) {
      at = next(at);
    }
    slots_[at] = slot;
  }

  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    shift_ = 64 - std::countr_zero(slots_.size());
    for (const Slot& slot : old) {
      if (slot.value != kNone) {
        place_slot(slot);
      }
    }
  }

  std::vector<Slot> slots_ = std::vector<Slot>(16);
  int shift_ = 60;
  size_t size_ = 0;
};

}  // namespace pytracer
