#include "recorder.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

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

// Marks the state of a thread that ends. The state itself stays: the thread's frees may still come,
// and other threads read which ops it ran.
struct ThreadExit {
  ThreadState* state = nullptr;

  ~ThreadExit() {
    if (state != nullptr) {
      Recorder::get().retire_thread(*state);
    }
  }
};

// Leaked: blocks are freed after our static destructors would have run.
Recorder* Recorder::instance = new Recorder;

ThreadState& Recorder::new_thread_state() {
  static thread_local ThreadExit at_exit;
  ThreadState& state = get().adopt_thread();
  this_thread_state = &state;
  at_exit.state = &state;
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
  // Nobody uses a state that was retired in an earlier recording.
  for (auto& state : threads_) {
    if (state->retired_ && state->generation_ != generation_.load()) {
      state->retired_ = false;
      state->name_ = std::move(name);
      return *state;
    }
  }
  // Numbers are 16 bits wide. In a program with more threads, the rest share the last number.
  auto number = static_cast<uint16_t>(std::min<size_t>(threads_.size(), UINT16_MAX));
  threads_.push_back(std::make_unique<ThreadState>(number, std::move(name)));
  return *threads_.back();
}

void Recorder::retire_thread(ThreadState& state) {
  std::lock_guard lock(threads_mutex_);
  state.retired_ = true;
  // A program may start a thread for each step. The state stays, but
  // only its nodes are still needed.
  std::vector<Frame>().swap(state.frames_);
  std::vector<std::shared_ptr<Annotation>>().swap(state.annotations_);
  std::vector<ThreadState::CachedName>().swap(state.names_);
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
    thread.mark_allocated();
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
  return lost;
}

uint32_t Recorder::sessions() const {
  std::lock_guard lock(mutex_);
  return open_sessions();
}

void Recorder::clear() {
  generation_.fetch_add(1);
  released_ = {};
  forward_thread_.store(nullptr);
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
  std::vector<ThreadName> names;
  for (size_t i = first; i < std::min<size_t>(threads_.size(), UINT16_MAX + 1); ++i) {
    names.push_back(threads_[i]->name_);
  }
  return names;
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
  torch_thread_id.store(parents.torch_thread_id.load());
  generation_.fetch_add(1);
  next_session_ = parents.next_session_;
}

}  // namespace pytracer
