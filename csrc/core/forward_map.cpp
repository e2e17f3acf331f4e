#include "forward_map.h"

#include "recorder.h"

#include <algorithm>
#include <exception>
#include <new>

namespace pytracer {

MadeNodes::Ring MadeNodes::new_ring() {
  void* ring =
      mmap(nullptr, kRingBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (ring == MAP_FAILED) {
    throw std::bad_alloc();
  }
  return Ring(static_cast<std::atomic<uint64_t>*>(ring));
}

bool MadeNodes::identify(uint64_t (*ask)()) {
  if (!ring_) {
    ring_ = new_ring();
  }
  if (torch_id_ != 0) {
    return false;
  }
  torch_id_ = ask != nullptr ? ask() : 1;
  return true;
}

void MadeNodes::claim(int64_t first, int64_t next, uint32_t scope) {
  int64_t begin = std::max(first, claimed_);
  if (claimed_ == 0) {
    first_ = begin;
  }
  for (int64_t number = begin; number < next; ++number) {
    auto n = static_cast<uint64_t>(number);
    ring_[n % kRing].store((n & UINT32_MAX) << 32 | scope, std::memory_order_relaxed);
  }
  claimed_ = next;
  first_ = std::max(first_, claimed_ - static_cast<int64_t>(kRing));
}

void MadeNodes::forget() {
  torch_id_.store(0, std::memory_order_relaxed);
  for (int64_t number = first_; number < claimed_; ++number) {
    ring_[static_cast<uint64_t>(number) % kRing].store(0, std::memory_order_relaxed);
  }
  first_ = claimed_ = 0;
}

std::vector<uint32_t> MadeNodes::scopes() const {
  std::vector<uint32_t> result;
  result.reserve(static_cast<size_t>(claimed_ - first_));
  for (int64_t number = first_; number < claimed_; ++number) {
    result.push_back(made_by(static_cast<uint64_t>(number)));
  }
  return result;
}

void EndedThreads::keep(const MadeNodes& made) noexcept try {
  uint64_t torch_id = made.torch_id();
  if (torch_id >= forgotten_.size()) {
    forgotten_.resize(torch_id + 1);
  }
  forgotten_[torch_id] = true;  // until they are kept
  order_.push_back(torch_id);
  auto [kept, is_new] = nodes_.try_emplace(torch_id, Nodes{made.first_number(), made.scopes()});
  forgotten_[torch_id] = false;
  words_ += is_new ? kept->second.words() : 0;
  while (words_ > kMostWords) {
    forget_first();
  }
} catch (const std::exception&) {  // no memory for them
}

uint32_t EndedThreads::made_by(uint64_t torch_id, uint64_t number) const {
  auto thread = nodes_.find(torch_id);
  if (thread == nodes_.end() || number < thread->second.first ||
      number - thread->second.first >= thread->second.scopes.size()) {
    return 0;
  }
  return thread->second.scopes[number - thread->second.first];
}

void EndedThreads::forget_first() {
  uint64_t torch_id = order_.front();
  order_.pop_front();
  if (auto thread = nodes_.find(torch_id); thread != nodes_.end()) {
    words_ -= thread->second.words();
    nodes_.erase(thread);
    forgotten_[torch_id] = true;
  }
}

void EndedThreads::clear() {
  nodes_.clear();
  order_.clear();
  words_ = 0;
  forgotten_.clear();
}

// The scope of the op that made a node, 0 if not known.
uint32_t Recorder::forward_of(const Frame& node) {
  const ThreadState* maker = forward_thread_.load(std::memory_order_acquire);
  if (maker == nullptr || node.sequence < 0) {
    return 0;  // -1: an AccumulateGrad, which no op made
  }
  auto number = static_cast<uint64_t>(node.sequence);
  if (node.forward_thread == maker->made_.torch_id()) {  // numbers count per thread
    return maker->made_.made_by(number);
  }
  return made_by_another(node.forward_thread, number);
}

uint32_t Recorder::made_by_another(uint64_t torch_id, uint64_t number) {
  if (torch_id == 0) {
    return 0;
  }
  std::lock_guard lock(threads_mutex_);
  // The newest first: DataParallel starts new ones in each forward.
  auto found = std::find_if(threads_.rbegin(), threads_.rend(), [torch_id](const auto& state) {
    return state->made_.torch_id() == torch_id;
  });
  if (found != threads_.rend()) {
    return (*found)->made_.made_by(number);
  }
  if (ended_threads_.has_forgotten(torch_id)) {
    forgotten_nodes.fetch_add(1, std::memory_order_relaxed);
  }
  return ended_threads_.made_by(torch_id, number);
}

// Says that the op made the nodes in [op.sequence, next_sequence) that no inner op has claimed.
void Recorder::claim(ThreadState& thread, Frame& op, int64_t next_sequence) {
  if (!thread.made_.has_unclaimed(op.sequence, next_sequence) ||
      !recording.load(std::memory_order_relaxed)) {
    return;
  }
  Stay stay(*this, thread);
  if (!stay) {
    return;
  }
  if (thread.made_.identify(torch_thread_id.load(std::memory_order_relaxed))) {
    ThreadState* none = nullptr;
    forward_thread_.compare_exchange_strong(none, &thread);
  }
  thread.made_.claim(op.sequence, next_sequence, open_scope(thread));
  thread.want_line();
}

}  // namespace pytracer
