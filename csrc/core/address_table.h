// One number for each live block, by the block's address.
//
// Open addressing, linear probing. Erasing shifts the followers back instead of leaving tombstones,
// because a program frees as often as it allocates.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

namespace pytracer {

// Values are not negative.
template <typename Value>
class AddressTable {
 public:
  // A pointer to the block's value, or null.
  Value* find(uint64_t address) {
    for (size_t at = home(address);; at = next(at)) {
      Slot& slot = slot_at(at);
      if (slot.value == kNone) {
        return nullptr;
      }
      if (slot.address == address) {
        return &slot.value;
      }
    }
  }

  // The address must not be in the table.
  void insert(uint64_t address, Value value) {
    if (!has_room()) {
      grow();
    }
    place_slot({address, value});
    ++size_;
  }

  // Whether one more address fits. Only then call `put`.
  bool has_room() const { return size_ < room_; }

  // Returns false if there is no memory.
  [[gnu::cold, gnu::noinline]] bool try_to_grow() noexcept {
    try {
      grow();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  // Returns the value that the address had; a negative one if it had none.
  Value put(uint64_t address, Value value) {
    size_t at = home(address);
    for (; slot_at(at).value != kNone; at = next(at)) {
      if (slot_at(at).address == address) {
        return std::exchange(slot_at(at).value, value);
      }
    }
    slot_at(at) = {address, value};
    ++size_;
    return kNone;
  }

  // Erases the address. Returns the value that it had; a negative one if it had none.
  Value take(uint64_t address) {
    for (size_t at = home(address);; at = next(at)) {
      Slot& slot = slot_at(at);
      Value value = slot.value;
      if (value == kNone || slot.address == address) {
        if (value != kNone) {
          empty(at);
        }
        return value;
      }
    }
  }

  void erase(Value* found) {
    auto place = reinterpret_cast<const char*>(found) - reinterpret_cast<const char*>(first_);
    empty(static_cast<size_t>(place) / sizeof(Slot) * sizeof(Slot));
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

  static constexpr size_t kSlot = sizeof(Slot);
  static_assert(std::has_single_bit(kSlot));

  // Places are offsets in bytes: a hash becomes one by a shift and a mask.
  Slot& slot_at(size_t place) const {
    return *reinterpret_cast<Slot*>(reinterpret_cast<char*>(first_) + place);
  }

  size_t next(size_t place) const { return (place + kSlot) & mask_; }

  // Addresses differ in their middle bits; multiplying carries these to the top.
  size_t home(uint64_t address) const {
    return static_cast<size_t>((address * 0x9E3779B97F4A7C15u) >> shift_) & mask_;
  }

  void empty(size_t hole) {
    for (size_t at = next(hole); slot_at(at).value != kNone; at = next(at)) {
      // A slot may move back into the hole unless its home lies after the hole.
      size_t wanted = home(slot_at(at).address);
      if (((at - wanted) & mask_) >= ((at - hole) & mask_)) {
        slot_at(hole) = slot_at(at);
        hole = at;
      }
    }
    slot_at(hole).value = kNone;
    --size_;
  }

  void place_slot(Slot slot) {
    size_t at = home(slot.address);
    while (slot_at(at).value != kNone) {
      at = next(at);
    }
    slot_at(at) = slot;
  }

  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    first_ = slots_.data();
    mask_ = (slots_.size() - 1) * kSlot;
    // A small table is sparse: there, most addresses are found at once.
    room_ = slots_.size() <= kSmall ? slots_.size() / 4 : slots_.size() / 2;
    shift_ = 64 - std::countr_zero(slots_.size() * kSlot);
    for (const Slot& slot : old) {
      if (slot.value != kNone) {
        place_slot(slot);
      }
    }
  }

  static constexpr size_t kFirst = 16;
  static constexpr size_t kSmall = size_t{1} << 16;

  std::vector<Slot> slots_ = std::vector<Slot>(kFirst);
  Slot* first_ = slots_.data();
  size_t mask_ = (kFirst - 1) * kSlot;
  size_t room_ = kFirst / 4;
  int shift_ = 64 - std::countr_zero(kFirst * kSlot);
  size_t size_ = 0;
};

}  // namespace pytracer
