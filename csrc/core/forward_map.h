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
// that made its node 7. A thread that ends leaves its nodes to EndedThreads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <sys/mman.h>
#include <unordered_map>
#include <vector>

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

  // Another recording has begun, or the thread has ended.
  void forget();

  // The numbers from first_number() on, as many as are known: the scopes that made them, 0 if not
  // known.
  std::vector<uint32_t> scopes() const;

  uint64_t first_number() const { return static_cast<uint64_t>(first_); }

  // Gives the ring back. Only when no other thread can read it.
  void shrink() { ring_.reset(); }

 private:
  // Numbers grow for ever, so this is a ring: 2^17 nodes may be alive at once.
  static constexpr uint64_t kRing = uint64_t{1} << 17;

  static constexpr size_t kRingBytes = kRing * sizeof(uint64_t);

  struct Unmap {
    void operator()(void* memory) const { munmap(memory, kRingBytes); }
  };

  using Ring = std::unique_ptr<std::atomic<uint64_t>[], Unmap>;

  // Pages that no node needs take no memory. Freed memory of malloc's would have to be cleared, and
  // freeing so much would change from which size on malloc maps memory in the program.
  static Ring new_ring();

  uint64_t entry_of(uint64_t number) const {
    return ring_[number % kRing].load(std::memory_order_relaxed);
  }

  std::atomic<uint64_t> torch_id_{0};  // as in forwardThreadId()
  int64_t claimed_ = 0;                // numbers below this have an operator
  int64_t first_ = 0;                  // the ring has none below this
  // Per entry the number's low half, then the scope. Set before torch_id_.
  Ring ring_;
};

// The nodes of threads that have ended. A backward pass on another thread may still need them, so
// they are kept, up to 8 MiB. Beyond that, the threads that ended first are forgotten.
class EndedThreads {
 public:
  static constexpr size_t kMostWords = size_t{1} << 21;

  void keep(const MadeNodes& made) noexcept;

  // The scope that made this node, 0 if not known.
  uint32_t made_by(uint64_t torch_id, uint64_t number) const;

  // Whether nodes of this thread were forgotten.
  bool has_forgotten(uint64_t torch_id) const {
    return torch_id < forgotten_.size() && forgotten_[torch_id];
  }

  void clear();

 private:
  struct Nodes {
    uint64_t first;
    std::vector<uint32_t> scopes;

    size_t words() const { return scopes.size() + 32; }  // with what the tables take
  };

  void forget_first();

  std::unordered_map<uint64_t, Nodes> nodes_;  // by torch's id of the thread
  std::deque<uint64_t> order_;                 // in which they ended
  size_t words_ = 0;
  std::vector<bool> forgotten_;  // by torch's id, which torch counts from 1 on
};

}  // namespace pytracer
