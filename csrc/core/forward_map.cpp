#include "forward_map.h"

#include "recorder.h"

#include <algorithm>
#include <new>

namespace pytracer {

bool MadeNodes::identify(uint64_t (*ask)()) {
  if (!ring_) {
    void* ring = std::calloc(kRing, sizeof(std::atomic<uint64_t>));
    if (ring == nullptr) {
      throw std::bad_alloc();
    }
    ring_.reset(static_cast<std::atomic<uint64_t>*>(ring));
  }
  if (torch_id_ != 0) {
    return false;
  }
  torch_id_ = ask != nullptr ? ask() : 1;
  return true;
}

void MadeNodes::claim(int64_t first, int64_t next, uint32_t scope) {
  for (int64_t number = std::max(first, claimed_); number < next; ++number) {
    auto n = static_cast<uint64_t>(number);
    ring_[n % kRing].store((n & UINT32_MAX) << 32 | scope, std::memory_order_relaxed);
  }
  claimed_ = next;
}

void MadeNodes::forget() {
  claimed_ = 0;
  torch_id_.store(0, std::memory_order_relaxed);
  if (ring_) {
    for (uint64_t i = 0; i < kRing; ++i) {
      ring_[i].store(0, std::memory_order_relaxed);
    }
  }
}

// The scope of the op that made a node, 0 if not known.
uint32_t Recorder::forward_of(const Frame& node) const {
  const ThreadState* maker = forward_thread_.load(std::memory_order_acquire);
  if (maker == nullptr || node.sequence < 0) {
    return 0;  // -1: an AccumulateGrad, which no op made
  }
  if (node.forward_thread != maker->made_.torch_id()) {  // numbers count per thread
    maker = thread_called(node.forward_thread);
    if (maker == nullptr) {
      return 0;
    }
  }
  return maker->made_.made_by(static_cast<uint64_t>(node.sequence));
}

const ThreadState* Recorder::thread_called(uint64_t torch_id) const {
  std::lock_guard lock(threads_mutex_);
  // The newest first: DataParallel starts new ones in each forward.
  auto found = std::find_if(threads_.rbegin(), threads_.rend(), [torch_id](const auto& state) {
    return state->made_.torch_id() == torch_id;
  });
  return found != threads_.rend() ? found->get() : nullptr;
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
}

}  // namespace pytracer
