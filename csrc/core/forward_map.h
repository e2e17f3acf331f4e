// The map from backward to forward: which operator made an autograd node.
//
// Autograd numbers its nodes per thread, in the order they are made. So an operator has made the
// nodes from the number that was next when it began up to the one that was next when it ended:
//
//   aten::linear begins    next node: 7
//     aten::addmm begins   next node: 7
//     aten::addmm ends     next node: 8    it claims 7 (AddmmBackward0)
//   aten::linear ends      next node: 8    nothing is left to claim
//
// In the backward pass, AddmmBackward0 has number 7 and thread 1. Thread 1's ring holds the scope
// that made its node 7.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace pytracer {

// The nodes that one thread has made. Only that thread writes; other threads read.
class MadeNodes {
 public:
  // Whether an operator that began at number `first` has nodes to claim now that `next` is the next
  // number. Inner operators may have claimed all of them.
  bool has_unclaimed(int64_t first, int64_t next) const { return next > std::max(first, claimed_); }

  // Says that the scope made the nodes in [first, next), except those that an inner operator has
  // claimed.
  void claim(int64_t first, int64_t next, uint32_t scope);

  // The scope that made this node, 0 if not known.
  uint32_t made_by(uint64_t number) const {
    uint64_t entry = entry_of(number);
    return entry >> 32 == (number & UINT32_MAX) ? static_cast<uint32_t>(entry) : 0;
  }

  // Whether the scope that made this node is known.
  bool has(uint64_t number) const {
    return ring_ != nullptr && entry_of(number) >> 32 == (number & UINT32_MAX);
  }

  // Asks torch once for its id of this thread. Returns true the first time. From then on other
  // threads may read: the ring is there.
  bool identify(uint64_t (*ask)());

  // Torch's id of this thread; 0 while it has made no node.
  uint64_t torch_id() const { return torch_id_; }

  // Another recording has begun.
  void forget();

 private:
  // Numbers grow for ever, so this is a ring: 2^17 nodes may be alive at once.
  static constexpr uint64_t kRing = uint64_t{1} << 17;

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  uint64_t entry_of(uint64_t number) const {
    return ring_[number % kRing].load(std::memory_order_relaxed);
  }

  std::atomic<uint64_t> torch_id_{0};  // as in forwardThreadId()
  int64_t claimed_ = 0;                // numbers below this have an operator
  // Per entry the number's low half, then the scope. Set once, before torch_id_. From calloc: if a
  // thread makes few nodes, the ring takes one page.
  std::unique_ptr<std::atomic<uint64_t>[], Free> ring_;
};

}  // namespace pytracer
