#include "recorder.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <utility>

namespace pytracer {

namespace {

// membarrier(2): makes every thread of the process pass a full barrier, so that the hooks
// themselves need none. The numbers are the kernel's; old headers lack the names.
constexpr int kMembarrierPrivateExpedited = 1 << 3;
constexpr int kMembarrierRegisterPrivateExpedited = 1 << 4;

bool barrier_on_all_threads() {
#ifdef SYS_membarrier
  static const bool registered =
      syscall(SYS_membarrier, kMembarrierRegisterPrivateExpedited, 0, 0) == 0;
  return registered && syscall(SYS_membarrier, kMembarrierPrivateExpedited, 0, 0) == 0;
#else
  return false;
#endif
}

}  // namespace

// Gives the state of a thread back when the thread has ended. Tensors are still freed while torch's
// thread-locals are destroyed. A key's destructor runs after those, and again as long as it sets a
// value, in four rounds at most.
class ThreadEnd {
 public:
  ThreadEnd() { has_key_ = pthread_key_create(&key_, &one_round) == 0; }

  // Without a key a state is never given back.
  void watch() const {
    if (has_key_) {
      set_rounds(kRounds);
    }
  }

  static const ThreadEnd& get() {
    static const ThreadEnd instance;
    return instance;
  }

 private:
  static constexpr uintptr_t kRounds = 3;  // the sanitizers' own keys use the fourth

  void set_rounds(uintptr_t left) const {
    (void)pthread_setspecific(key_, reinterpret_cast<void*>(left));
  }

  static void one_round(void* value) {
    auto left = reinterpret_cast<uintptr_t>(value) - 1;
    if (left > 0) {
      get().set_rounds(left);
    } else if (ThreadState* state = std::exchange(this_thread_state, nullptr)) {
      Recorder::get().retire_thread(*state);
    }
  }

  pthread_key_t key_{};
  bool has_key_ = false;
};

// Leaked: blocks are freed after our static destructors would have run.
Recorder* Recorder::instance = new Recorder;

ThreadState& Recorder::new_thread_state() {
  ThreadState& state = get().adopt_thread();
  this_thread_state = &state;
  ThreadEnd::get().watch();
  void (*meet)() = on_new_thread.load(std::memory_order_acquire);
  if (meet != nullptr && state.name_.text.empty()) {
    meet();
  }
  return state;
}

// The program may have set any other name.
static ThreadName name_of_this_thread() {
  char name[16] = {};
  prctl(PR_GET_NAME, name);
  bool of_torch = std::string_view(name).starts_with("pt_");
  return {static_cast<uint64_t>(syscall(SYS_gettid)), of_torch ? name : ""};
}

ThreadState& Recorder::adopt_thread() {
  ThreadName name = name_of_this_thread();
  std::lock_guard lock(threads_mutex_);
  if (unused_.empty()) {
    if (unused_.capacity() <= threads_.size()) {
      unused_.reserve(2 * threads_.size() + 16);  // giving it back then needs no memory
    }
    threads_.push_back(std::make_unique<ThreadState>(std::move(name)));
    return *threads_.back();
  }
  ThreadState& state = *unused_.back();
  unused_.pop_back();
  state.name_ = std::move(name);
  return state;
}

// Numbers are 16 bits wide. In a recording of more threads, the rest share the last number.
void Recorder::number(ThreadState& thread) {
  std::lock_guard lock(threads_mutex_);
  if (names_.size() < kMostThreads) {
    thread.number_ = static_cast<uint16_t>(names_.size());
    names_.push_back(thread.name_);
    return;
  }
  if (names_.size() == kMostThreads) {
    names_.push_back({0, "all other threads"});
  }
  thread.number_ = kMostThreads;
  merged_threads.fetch_add(1, std::memory_order_relaxed);
}

// A program may start a thread for each step. Only the thread's nodes may still be needed.
void Recorder::retire_thread(ThreadState& state) {
  if (state.asked_scope_.load(std::memory_order_relaxed) != 0) {
    if (Stay stay(*this, state); stay) {
      close_node(state);
    }
  }
  std::lock_guard lock(threads_mutex_);
  bool has_nodes = state.generation_ == generation() && state.made_.torch_id() != 0;
  if (has_nodes && &state == forward_thread_.load(std::memory_order_relaxed)) {
    state.has_ended_ = true;  // others read its nodes without the lock, until the recording ends
    return;
  }
  if (has_nodes) {
    ended_threads_.keep(state.made_);
  }
  reuse(state);
}

void Recorder::reuse(ThreadState& state) {
  constexpr size_t kMostWithMemory = 64;
  state.generation_ = 0;
  state.has_ended_ = false;
  state.node_ = NodeKind::kNone;
  state.read_count_ = 0;
  state.made_.forget();
  state.frames_.clear();
  state.annotations_.clear();
  if (unused_.size() >= kMostWithMemory) {
    state.made_.shrink();
    std::vector<Frame>().swap(state.frames_);
    std::vector<ThreadState::CachedName>().swap(state.names_);
  }
  unused_.push_back(&state);
}

void Recorder::record_reads(ThreadState& thread, uint64_t ticks, uint32_t scope) noexcept {
  if (!thread.frames_.empty() && thread.frames_.back().kind == ScopeKind::kOp) {
    for (size_t i = 0; i < thread.read_count_; ++i) {
      const ThreadState::Read& read = thread.reads_[i];
      auto action = static_cast<uint64_t>(Action::kLabel);
      if (events.append(
              {ticks, read.address, read.label, action, 1, scope, read.place, thread.number_}) ==
          AppendLog<Event>::kRefused) {
        lose(Action::kLabel);
      }
    }
  }
  thread.read_count_ = 0;
}

uint64_t Recorder::record(Action action, uint16_t place, uint64_t address, uint64_t bytes) noexcept
    try {
  if (!recording.load(std::memory_order_relaxed)) {
    return AppendLog<Event>::kRefused;
  }
  ThreadState& thread = this_thread();
  drop_ended(thread);
  Stay stay(*this, thread);
  if (!stay) {
    return AppendLog<Event>::kRefused;
  }
  OwnTime own(thread);
  auto& frames = thread.frames_;
  const NodeSource* source = node_source_.load(std::memory_order_acquire);
  uint32_t scope = source != nullptr ? scope_of_node(thread, *source) : 0;
  if (scope == 0) {
    scope = frames.empty() ? 0 : frames.back().scope;
  }
  if (scope == 0) {
    scope = open_scope(thread);
  }
  if (action == Action::kAlloc || action == Action::kOom) {
    thread.want_line();
    scope = scope_of_line(thread, scope);
  }
  uint64_t ticks = ticks_now();  // not before the scope begins, nor after a node is left
  if (source != nullptr) {
    thread.asked_until_.store(ticks, std::memory_order_relaxed);
  }
  if (action == Action::kAlloc && thread.read_count_ != 0) {
    record_reads(thread, ticks, scope);
  }
  uint64_t position = events.append({ticks,
                                     address,
                                     std::min<uint64_t>(bytes, kMostBytes),
                                     static_cast<uint64_t>(action),
                                     1,
                                     scope,
                                     place,
                                     thread.number_});
  if (position == AppendLog<Event>::kRefused) {
    lose(action);
  } else if (action < Action::kLabel) {
    changes_.note(address);
    if (action == Action::kSnapshot) {
      labels_from_.store(position, std::memory_order_relaxed);
    }
  }
  return position;
} catch (const std::exception&) {  // no memory for a name or a thread's state

  lose(action);
  return AppendLog<Event>::kRefused;
}

// The count is read first: a change that happens meanwhile makes the next call record the label
// again.
void Recorder::record_label(uint16_t place,
                            uint64_t address,
                            uint32_t label,
                            Labelled& before) noexcept {
  uint32_t changes = changes_.watch(address);
  if (before.address != address || before.changes != changes ||
      before.position == AppendLog<Event>::kRefused ||
      before.position < labels_from_.load(std::memory_order_relaxed)) {
    before = {record(Action::kLabel, place, address, label), address, changes};
  }
}

uint16_t Recorder::place(const Place& place) {
  uint32_t number = places.intern(place, kMostPlaces);
  if (number >= kMostPlaces) {
    lost_places.fetch_add(1, std::memory_order_relaxed);
    constexpr uint64_t kUnknown = UINT64_MAX;
    Place shared{kUnknown, kUnknown, kUnknown, place.device_type, place.device_index};
    number = places.intern(shared, kMostPlaces + kPlacesKept);
  }
  return static_cast<uint16_t>(number);
}

void Recorder::mark_step(std::string_view name) {
  ThreadState& thread = this_thread();
  Stay stay(*this, thread);
  if (!stay) {
    return;
  }
  uint64_t position = scopes.append(
      {ticks_now(), 0, 0, strings.intern(name), thread.number_, ScopeKind::kStep, kScopeReady});
  if (position == AppendLog<ScopeBegin>::kRefused) {
    lost_scopes.fetch_add(1, std::memory_order_relaxed);
  }
}

uint32_t Recorder::begin_session(uint64_t max_events) {
  std::lock_guard lock(mutex_);
  uint32_t id = next_session_++;
  // From the first scope that is still there: the new session may lie inside an open scope.
  Positions start{events.size(), released_.scopes, released_.scope_ends};
  uint64_t room = std::min(max_events, AppendLog<Event>::kMostRows);
  Positions limit{events.size() + room, scopes.size() + room, scope_ends.size() + room};
  sessions_[id] = {start, start, limit, losses(), false, {}};
  labels_from_.store(start.events, std::memory_order_relaxed);
  set_limits();
  recording.store(true, std::memory_order_seq_cst);
  return id;
}

void Recorder::set_limits() {
  Positions limit;
  for (const auto& [id, session] : sessions_) {
    if (session.ended) {
      continue;
    }
    limit.events = std::max(limit.events, session.limit.events);
    limit.scopes = std::max(limit.scopes, session.limit.scopes);
    limit.scope_ends = std::max(limit.scope_ends, session.limit.scope_ends);
  }
  events.set_limit(limit.events);
  scopes.set_limit(limit.scopes);
  scope_ends.set_limit(limit.scope_ends);
}

void Recorder::end_session(uint32_t id) {
  std::lock_guard lock(mutex_);
  auto it = sessions_.find(id);
  if (it == sessions_.end() || it->second.ended) {
    return;
  }
  it->second.ended = true;
  if (open_sessions() == 0) {
    recording.store(false, std::memory_order_seq_cst);
    quiesce();
  } else {
    set_limits();
  }
  it->second.end = reached();
}

void Recorder::forget_session(uint32_t id) {
  std::lock_guard lock(mutex_);
  if (sessions_.erase(id) > 0 && sessions_.empty() && quiesce()) {
    clear();
  }
}

uint32_t Recorder::open_sessions() const {
  return static_cast<uint32_t>(std::count_if(
      sessions_.begin(), sessions_.end(), [](const auto& entry) { return !entry.second.ended; }));
}

// Waits until no thread is inside the recorder. A hook raises its busy flag and then looks at
// `recording` again. A barrier on every thread follows the fall of `recording`: a thread that has
// not raised its flag by then will see that `recording` fell.
bool Recorder::quiesce() {
  if (!barrier_on_all_threads()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::vector<const ThreadState*> states;
  {
    std::lock_guard lock(threads_mutex_);
    for (const auto& state : threads_) {
      states.push_back(state.get());
    }
  }
  auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (const ThreadState* state : states) {
    while (state->busy_.load(std::memory_order_acquire)) {
      if (std::chrono::steady_clock::now() > deadline) {
        return false;
      }
      std::this_thread::yield();
    }
  }
  return true;
}

Recorder::Positions Recorder::start_of(uint32_t id) const {
  std::lock_guard lock(mutex_);
  auto it = sessions_.find(id);
  return it != sessions_.end() ? it->second.start : Positions{};
}

Recorder::Positions Recorder::end_of(uint32_t id) const {
  std::lock_guard lock(mutex_);
  auto it = sessions_.find(id);
  return it != sessions_.end() && it->second.ended ? it->second.end : reached();
}

// In the order of references between rows: the rows that an event refers to are there before it.
Recorder::Positions Recorder::reached() const {
  Positions now;
  now.events = events.size();
  now.scope_ends = scope_ends.size();
  now.scopes = scopes.size();
  return now;
}

Recorder::Losses Recorder::losses_before(uint32_t id) const {
  std::lock_guard lock(mutex_);
  auto it = sessions_.find(id);
  return it != sessions_.end() ? it->second.lost_before : Losses{};
}

Recorder::Losses Recorder::losses() const {
  Losses lost;
  std::copy(lost_events.begin(), lost_events.end(), lost.begin());
  lost[kActions] = lost_scopes.load();
  lost[kActions + 1] = lost_places.load();
  lost[kActions + 2] = merged_threads.load();
  lost[kActions + 3] = forgotten_nodes.load();
  return lost;
}

uint32_t Recorder::sessions() const {
  std::lock_guard lock(mutex_);
  return open_sessions();
}

void Recorder::clear() {
  generation_.fetch_add(1);
  released_ = {};
  forget_threads();
  events.clear();
  scopes.clear();
  scope_ends.clear();
  strings.clear();
  stacks.clear();
  places.clear();
  labels.clear();
  for (auto& count : lost_events) {
    count.store(0);
  }
  lost_scopes.store(0);
  lost_places.store(0);
  merged_threads.store(0);
  forgotten_nodes.store(0);
}

void Recorder::forget_threads() {
  std::lock_guard lock(threads_mutex_);
  ThreadState* first = forward_thread_.exchange(nullptr);
  if (first != nullptr && first->has_ended_) {
    reuse(*first);
  }
  names_.clear();
  ended_threads_.clear();
}

void Recorder::release_below(uint32_t id, const Positions& positions) {
  std::lock_guard lock(mutex_);
  auto it = sessions_.find(id);
  if (it == sessions_.end()) {
    return;
  }
  it->second.unread = positions;
  released_ = positions;
  for (const auto& [other, session] : sessions_) {
    released_.events = std::min(released_.events, session.unread.events);
    released_.scopes = std::min(released_.scopes, session.unread.scopes);
    released_.scope_ends = std::min(released_.scope_ends, session.unread.scope_ends);
  }
  events.release_below(released_.events);
  scopes.release_below(released_.scopes);
  scope_ends.release_below(released_.scope_ends);
}

std::vector<ThreadName> Recorder::threads_from(size_t first) const {
  std::lock_guard lock(threads_mutex_);
  first = std::min(first, names_.size());
  return {names_.begin() + static_cast<std::ptrdiff_t>(first), names_.end()};
}

void Recorder::start_afresh_after_fork() {
  Recorder& parents = get();
  recording.store(false);
  instance = new Recorder;
  instance->continue_after(parents);
  this_thread_state = nullptr;
}

// The generation goes on, so that no number of the parent's recording is valid in the child.
void Recorder::continue_after(const Recorder& parents) {
  take_stack.store(parents.take_stack.load());
  take_generated.store(parents.take_generated.load());
  torch_thread_id.store(parents.torch_thread_id.load());
  generation_.fetch_add(1);
  next_session_ = parents.next_session_;
}

}  // namespace pytracer
