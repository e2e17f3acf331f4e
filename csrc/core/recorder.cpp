#include "recorder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

namespace pytracer {

thread_local constinit ThreadState* this_thread_state = nullptr;

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

bool is_factory(const Frame& frame) {
  constexpr std::string_view kPrefix = "aten::empty";
  return frame.kind == ScopeKind::kOp &&
         std::strncmp(frame.name, kPrefix.data(), kPrefix.size()) == 0;
}

// How many of the innermost frames are operators of a plain node: none if one of them is more
// than torch's own arithmetic.
size_t operators_of_node(const std::vector<Frame>& frames) {
  size_t count = 0;
  for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame, ++count) {
    if (frame->kind == ScopeKind::kNode) {
      return count;
    }
    if (frame->kind != ScopeKind::kOp || frame->flags != 0 || frame->scope != 0 ||
        !is_arithmetic(frame->name)) {
      break;
    }
  }
  return 0;
}

// All operators that a block is made in, as far as not marked yet: not every one has a row, and
// it is the outermost that wants to know.
void mark_allocated(std::vector<Frame>& frames) {
  for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame) {
    if (frame->kind != ScopeKind::kOp || frame->allocated) {
      break;
    }
    frame->allocated = true;
  }
}

}  // namespace

// Marks the state of a thread that ends. The state itself stays: its frees may still come, and
// other threads read which ops it ran.
struct ThreadExit {
  ThreadState* state = nullptr;

  ~ThreadExit() {
    if (state != nullptr) {
      Recorder::get().retire_thread(*state);
    }
  }
};

// A hook's stay in the recorder: raises the thread's flag, and only then looks whether anything
// records (see Recorder::quiesce); true while it does. What the thread remembers is this
// recording's from then on.
class Recorder::Stay {
 public:
  Stay(Recorder& recorder, ThreadState& thread) : thread_(thread) {
    thread.busy_.store(true, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    records_ = recording.load(std::memory_order_relaxed);
    if (records_ && thread.generation_ != recorder.generation()) {
      recorder.refresh(thread);
    }
  }

  ~Stay() { thread_.busy_.store(false, std::memory_order_release); }

  Stay(const Stay&) = delete;  // the flag is lowered once
  Stay& operator=(const Stay&) = delete;

  explicit operator bool() const { return records_; }

 private:
  ThreadState& thread_;
  bool records_;
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

// Other names are the program's.
static ThreadName name_of_this_thread() {
  char name[16] = {};
  prctl(PR_GET_NAME, name);
  bool of_torch = std::string_view(name).starts_with("pt_");
  return {static_cast<uint64_t>(syscall(SYS_gettid)), of_torch ? name : ""};
}

ThreadState& Recorder::adopt_thread() {
  ThreadName name = name_of_this_thread();
  std::lock_guard lock(threads_mutex_);
  // A state retired in an earlier recording belongs to nobody any more.
  for (auto& state : threads_) {
    if (state->retired_ && state->generation_ != generation_.load()) {
      state->retired_ = false;
      state->name_ = std::move(name);
      return *state;
    }
  }
  // Numbers are 16 bits wide; a program with more threads than that shares the last one.
  auto number = static_cast<uint16_t>(std::min<size_t>(threads_.size(), UINT16_MAX));
  threads_.push_back(std::make_unique<ThreadState>(number, std::move(name)));
  return *threads_.back();
}

void Recorder::retire_thread(ThreadState& state) {
  std::lock_guard lock(threads_mutex_);
  state.retired_ = true;
  // Programs may start a thread for each step: of a state that stays only the nodes are needed.
  std::vector<Frame>().swap(state.frames_);
  std::vector<std::shared_ptr<Annotation>>().swap(state.annotations_);
  std::vector<ThreadState::CachedName>().swap(state.names_);
}

// Frames are kept while callbacks are installed, whether or not something records; what they
// remember of an earlier recording (scope numbers, interned names) must not leak into this one.
void Recorder::refresh(ThreadState& thread) {
  thread.generation_ = generation();
  std::fill(thread.names_.begin(), thread.names_.end(), ThreadState::CachedName{});
  thread.asked_node_ = nullptr;
  thread.asked_scope_.store(0, std::memory_order_relaxed);
  thread.claimed_ = 0;
  thread.torch_id_.store(0, std::memory_order_relaxed);
  if (thread.made_by_) {
    for (uint64_t i = 0; i < ThreadState::kRing; ++i) {
      thread.made_by_[i].store(0, std::memory_order_relaxed);
    }
  }
  for (Frame& frame : thread.frames_) {
    frame.scope = 0;
    frame.name_id = 0;
  }
}

void Recorder::push_node(ThreadState& thread,
                         const void* key,
                         const char* name,
                         int64_t sequence,
                         uint64_t forward_thread,
                         NodeKind node) {
  thread.frames_.push_back(
      {key, name, ticks_now(), sequence, forward_thread, 0, 0, ScopeKind::kNode, 0, false, node});
  thread.node_ = node;
}

void Recorder::push_annotation(ThreadState& thread,
                               ScopeKind kind,
                               std::shared_ptr<Annotation> annotation) {
  drop_ended(thread);
  push(thread, kind, annotation.get(), annotation->name.c_str());
  thread.annotations_.push_back(std::move(annotation));
}

void Recorder::end_annotation(ThreadState& thread, ThreadState& owner, Annotation& annotation) {
  if (&thread == &owner) {
    pop(thread, &annotation);
    return;
  }
  annotation.ended_elsewhere.store(true, std::memory_order_release);
  owner.some_ended_elsewhere_.store(true, std::memory_order_release);
}

// Whatever happens next on this thread is not inside of annotations that another thread has ended.
void Recorder::drop_ended(ThreadState& thread) {
  if (!thread.some_ended_elsewhere_.load(std::memory_order_relaxed) ||
      !thread.some_ended_elsewhere_.exchange(false)) {
    return;
  }
  for (size_t i = thread.annotations_.size(); i > 0; --i) {
    std::shared_ptr<Annotation> annotation = thread.annotations_[i - 1];
    if (annotation->ended_elsewhere.load(std::memory_order_acquire)) {
      pop(thread, annotation.get());
    }
  }
}

// Frames above stay: generators and tasks that take turns on a thread leave in any order.
void Recorder::pop(ThreadState& thread, const void* key, int64_t next_sequence) {
  auto& frames = thread.frames_;
  auto found = std::find_if(
      frames.rbegin(), frames.rend(), [key](const Frame& frame) { return frame.key == key; });
  if (found != frames.rend()) {  // else it was entered before we looked, or on another thread
    erase(thread, static_cast<size_t>(frames.rend() - found) - 1, next_sequence);
  }
}

void Recorder::erase(ThreadState& thread, size_t depth, int64_t next_sequence) {
  auto& frames = thread.frames_;
  Frame& frame = frames[depth];
  if (frame.kind == ScopeKind::kOp && frame.sequence >= 0) {
    claim(thread, frame, next_sequence);
  }
  if (frame.scope != 0) {
    close(thread, depth);
  }
  const void* key = frame.key;
  ScopeKind kind = frame.kind;
  frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(depth));
  if (kind == ScopeKind::kNode) {
    auto node = std::find_if(frames.rbegin(), frames.rend(), [](const Frame& outer) {
      return outer.kind == ScopeKind::kNode;
    });
    thread.node_ = node != frames.rend() ? node->node : NodeKind::kNone;
  } else if (kind == ScopeKind::kUser || kind == ScopeKind::kOptimizer) {
    std::erase_if(thread.annotations_, [key](const auto& known) { return known.get() == key; });
  }
}

uint32_t Recorder::name_of(ThreadState& thread, Frame& frame) {
  if (frame.name_id == 0) {
    frame.name_id = name_of(thread, std::string_view(frame.name));
  }
  return frame.name_id;
}

// By the text and not by its address: torch writes a node's name anew each time it runs.
uint32_t Recorder::name_of(ThreadState& thread, std::string_view name) {
  thread.names_.resize(ThreadState::kNames);
  auto slot = std::hash<std::string_view>{}(name) % ThreadState::kNames;
  ThreadState::CachedName& cached = thread.names_[slot];
  if (cached.text != name) {
    uint32_t id = strings.intern(name);
    cached = {strings.at(id), id};
  }
  return cached.id;
}

// Gives the open frames their rows, outermost first, and returns the innermost one's number. Of
// nested operators the outermost and the innermost get one: the first is what the program called,
// the second is what allocated, and those in between tell nobody anything. Nor does a factory
// (aten::empty and its kind) inside another operator: what it allocates is that operator's. And
// what a plain node computes is the node's, heard or not (see scope_of_node).
uint32_t Recorder::open_scope(ThreadState& thread) {
  auto& frames = thread.frames_;
  if (frames.empty()) {
    return 0;
  }
  size_t innermost = frames.size() - 1;
  if (thread.node_ == NodeKind::kPlain) {
    innermost -= operators_of_node(frames);
  }
  while (innermost > 0 && frames[innermost].scope == 0 && is_factory(frames[innermost]) &&
         frames[innermost - 1].kind == ScopeKind::kOp) {
    --innermost;
  }
  if (frames[innermost].scope != 0) {
    return frames[innermost].scope;
  }
  size_t first = innermost;
  while (first > 0 && frames[first - 1].scope == 0) {
    --first;
  }
  uint32_t parent = first > 0 ? frames[first - 1].scope : 0;
  for (size_t i = first; i <= innermost; ++i) {
    Frame& frame = frames[i];
    bool inside_op = i > 0 && frames[i - 1].kind == ScopeKind::kOp;
    if (frame.kind == ScopeKind::kOp && inside_op && i != innermost) {
      continue;
    }
    uint64_t position = scopes.append({frame.ticks != 0 ? frame.ticks : ticks_now(),
                                       parent,
                                       frame.kind == ScopeKind::kOp ? 0 : forward_of(frame),
                                       name_of(thread, frame),
                                       thread.number_,
                                       frame.kind,
                                       static_cast<uint8_t>(frame.flags | kScopeReady)});
    if (position == AppendLog<ScopeBegin>::kRefused) {
      lost_scopes.fetch_add(1, std::memory_order_relaxed);
      return parent;
    }
    frame.scope = static_cast<uint32_t>(position + 1);
    parent = frame.scope;
  }
  return parent;
}

uint32_t Recorder::forward_of(const Frame& node) const {
  const ThreadState* maker = forward_thread_.load(std::memory_order_acquire);
  if (maker == nullptr || node.sequence < 0) {
    return 0;  // -1: an AccumulateGrad, made by no op
  }
  if (node.forward_thread != maker->torch_id_) {  // numbers count per thread
    maker = thread_called(node.forward_thread);
    if (maker == nullptr) {
      return 0;
    }
  }
  auto number = static_cast<uint64_t>(node.sequence);
  uint64_t entry = maker->made_by_[number % ThreadState::kRing].load(std::memory_order_relaxed);
  return entry >> 32 == (number & UINT32_MAX) ? static_cast<uint32_t>(entry) : 0;
}

const ThreadState* Recorder::thread_called(uint64_t torch_id) const {
  std::lock_guard lock(threads_mutex_);
  // The newest first: DataParallel starts new ones in each forward.
  auto found = std::find_if(threads_.rbegin(), threads_.rend(), [torch_id](const auto& state) {
    return state->torch_id_ == torch_id;
  });
  return found != threads_.rend() ? found->get() : nullptr;
}

// Every node number in [op.sequence, next_sequence) that no inner op has taken is this op's.
void Recorder::claim(ThreadState& thread, Frame& op, int64_t next_sequence) {
  if (next_sequence <= std::max(op.sequence, thread.claimed_) ||
      !recording.load(std::memory_order_relaxed)) {
    return;
  }
  Stay stay(*this, thread);
  if (!stay) {
    return;
  }
  if (!thread.made_by_) {
    void* ring = std::calloc(ThreadState::kRing, sizeof(std::atomic<uint64_t>));
    if (ring == nullptr) {
      throw std::bad_alloc();
    }
    thread.made_by_.reset(static_cast<std::atomic<uint64_t>*>(ring));
  }
  if (thread.torch_id_ == 0) {
    auto ask = torch_thread_id.load(std::memory_order_relaxed);
    thread.torch_id_ = ask != nullptr ? ask() : 1;
    ThreadState* none = nullptr;
    forward_thread_.compare_exchange_strong(none, &thread);
  }
  uint32_t scope = open_scope(thread);
  for (int64_t number = std::max(op.sequence, thread.claimed_); number < next_sequence; ++number) {
    auto n = static_cast<uint64_t>(number);
    thread.made_by_[n % ThreadState::kRing].store((n & UINT32_MAX) << 32 | scope,
                                                  std::memory_order_relaxed);
  }
  thread.claimed_ = next_sequence;
}

void Recorder::close(ThreadState& thread, size_t depth) {
  Frame& frame = thread.frames_[depth];
  bool inside_op = depth > 0 && thread.frames_[depth - 1].kind == ScopeKind::kOp;
  if (thread.generation_ != generation() || !recording.load(std::memory_order_relaxed)) {
    return;
  }
  if (frame.kind == ScopeKind::kOp && inside_op) {
    return;  // an inner operator's extent is not kept: a third of the log for nothing
  }
  uint64_t left = ticks_now();
  uint32_t stack = 0;
  // The outermost op was called from Python: its line is the line. Under a node the line would
  // be that of backward(), which says nothing, unless the forward is being run again.
  bool inside_node = depth > 0 && thread.frames_[depth - 1].kind == ScopeKind::kNode;
  if (frame.kind == ScopeKind::kOp && frame.allocated && !inside_op &&
      (!inside_node || (frame.flags & kScopeRecompute) != 0)) {
    auto take = take_stack.load(std::memory_order_relaxed);
    stack = take != nullptr ? take() : 0;  // may wait for the GIL: not while we stay
  }
  Stay stay(*this, thread);
  if (!stay || frame.scope == 0) {
    return;  // another recording has begun while we waited
  }
  if (scope_ends.append({left, frame.scope, stack}) == AppendLog<ScopeEnd>::kRefused) {
    lost_scopes.fetch_add(1, std::memory_order_relaxed);
  }
}

// The row of the node that the thread evaluates, 0 if none; what is known of it is asked for once.
uint32_t Recorder::scope_of_node(ThreadState& thread, const NodeSource& source) {
  const void* node = source.current();
  uint32_t scope = thread.asked_scope_.load(std::memory_order_relaxed);
  if (node == nullptr || node != thread.asked_node_ || scope == 0) {
    close_node(thread);
    if (node == nullptr) {
      return 0;
    }
    Node facts = source.describe();
    Frame frame{};
    frame.sequence = facts.sequence;
    frame.forward_thread = facts.forward_thread;
    uint32_t parent = open_scope(thread);
    uint64_t position = scopes.append({ticks_now(),
                                       parent,
                                       forward_of(frame),
                                       name_of(thread, std::string_view(facts.name)),
                                       thread.number_,
                                       ScopeKind::kNode,
                                       kScopeReady});
    if (position == AppendLog<ScopeBegin>::kRefused) {
      lost_scopes.fetch_add(1, std::memory_order_relaxed);
      return parent;
    }
    scope = static_cast<uint32_t>(position + 1);
    thread.asked_node_ = node;
    thread.asked_scope_.store(scope, std::memory_order_relaxed);
  }
  return scope;
}

void Recorder::close_node(ThreadState& thread) {
  uint32_t scope = thread.asked_scope_.exchange(0, std::memory_order_relaxed);
  if (scope == 0) {
    return;
  }
  uint64_t left = thread.asked_until_.load(std::memory_order_relaxed);
  if (scope_ends.append({left, scope, 0}) == AppendLog<ScopeEnd>::kRefused) {
    lost_scopes.fetch_add(1, std::memory_order_relaxed);
  }
}

// The engine's threads may still be giving back what their last node held: theirs are atomics.
void Recorder::ask_for_no_nodes() {
  node_source_.store(nullptr);
  Stay stay(*this, this_thread());
  if (!stay) {
    return;
  }
  std::lock_guard lock(threads_mutex_);
  for (const auto& state : threads_) {
    close_node(*state);
  }
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
    mark_allocated(frames);
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
  }
  return position;
} catch (const std::exception&) {  // no memory for a name or a thread's state

  lose(action);
  return AppendLog<Event>::kRefused;
}

void Recorder::open_current(ThreadState& thread) {
  drop_ended(thread);
  Stay stay(*this, thread);
  if (stay) {
    open_scope(thread);
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
  // Scopes from as far back as there are any: the new session may lie inside an open one.
  Positions start{events.size(), released_.scopes, released_.scope_ends};
  uint64_t room = std::min(max_events, AppendLog<Event>::kMostRows);
  Positions limit{events.size() + room, scopes.size() + room, scope_ends.size() + room};
  sessions_[id] = {start, start, limit, losses(), false, {}};
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
// `recording` again; with a barrier on every thread after `recording` fell, whoever has not
// raised the flag by now will see that it fell.
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

// In the order in which rows refer to each other: what an event refers to is there before it.
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

// Numbers go on, so that nothing that belongs to the parent's recording passes for the child's.
void Recorder::continue_after(const Recorder& parents) {
  take_stack.store(parents.take_stack.load());
  torch_thread_id.store(parents.torch_thread_id.load());
  generation_.store(parents.generation_.load() + 1);
  next_session_ = parents.next_session_;
}

}  // namespace pytracer
