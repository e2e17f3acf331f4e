// The recorder's work on a thread's frames: push, pop, and making rows of them.
#include "scope_stack.h"

#include "recorder.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <utility>

namespace pytracer {

thread_local constinit ThreadState* this_thread_state = nullptr;

namespace {

// Compares letter by letter: most names differ at the seventh, before a call would have begun.
bool is_factory(const Frame& frame) {
  constexpr std::string_view kPrefix = "aten::empty";
  size_t same = 0;
  while (same < kPrefix.size() && frame.name[same] == kPrefix[same]) {
    ++same;
  }
  return same == kPrefix.size() && frame.kind == ScopeKind::kOp;
}

// Whether generated code calls what the frame at this depth is: the frame is directly inside a
// compiled graph, its Function or its node. The graph itself may be a module.
bool in_compiled(const std::vector<Frame>& frames, size_t depth) {
  while (depth > 0 && frames[depth - 1].kind == ScopeKind::kModule) {
    --depth;
  }
  if (depth == 0) {
    return false;
  }
  const Frame& outer = frames[depth - 1];
  return (outer.kind == ScopeKind::kOp || outer.kind == ScopeKind::kNode) &&
         std::any_of(std::begin(kCompiled), std::end(kCompiled), [&outer](const char* prefix) {
           return std::strncmp(outer.name, prefix, std::strlen(prefix)) == 0;
         });
}

// How many of the innermost frames are operators of a plain node. 0 if one of them is not torch's
// own arithmetic.
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

}  // namespace

// Frames stay while callbacks are installed, whether or not something records. Scope numbers and
// interned names of an earlier recording must not leak into this one.
void Recorder::refresh(ThreadState& thread) {
  thread.generation_ = generation();
  if (std::exchange(thread.names_generation_, generation()) != generation()) {
    std::fill(thread.names_.begin(), thread.names_.end(), ThreadState::CachedName{});
  }
  number(thread);
  thread.asked_node_ = nullptr;
  thread.asked_scope_.store(0, std::memory_order_relaxed);
  thread.made_.forget();
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

void Recorder::pop_ended(ThreadState& thread) {
  for (size_t i = thread.annotations_.size(); i > 0; --i) {
    std::shared_ptr<Annotation> annotation = thread.annotations_[i - 1];
    if (annotation->ended_elsewhere.load(std::memory_order_acquire)) {
      pop(thread, annotation.get());
    }
  }
}

// Frames above it stay: generators and tasks that take turns on a thread leave in any order.
void Recorder::pop(ThreadState& thread, const void* key, int64_t next_sequence) {
  auto& frames = thread.frames_;
  auto found = std::find_if(
      frames.rbegin(), frames.rend(), [key](const Frame& frame) { return frame.key == key; });
  if (found != frames.rend()) {  // else it was entered before the recording, or on another thread
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
    // An operator's name mostly stays in its place, and torch writes a node's anew each time.
    size_t slot = frame.kind == ScopeKind::kOp ? reinterpret_cast<uintptr_t>(frame.name) / 8
                                               : std::hash<std::string_view>{}(frame.name);
    frame.name_id = name_of(thread, frame.name, slot);
  }
  return frame.name_id;
}

// Compares texts and not addresses: another name may have come to the same place.
uint32_t Recorder::name_of(ThreadState& thread, std::string_view name, size_t slot) {
  if (thread.names_.empty()) {
    thread.names_.resize(ThreadState::kNames);
  }
  ThreadState::CachedName& cached = thread.names_[slot % ThreadState::kNames];
  if (cached.text != name) {
    uint32_t id = strings.intern(name);
    cached = {strings.at(id), id};
  }
  return cached.id;
}

// Gives the open frames their rows, outermost first, and returns the innermost one's number.
//
// Of nested operators, the outermost and the innermost get a row: the program called the first, and
// the second allocated. So does the outermost that compiled code calls. One in between that is not
// torch's own gets one, too: a collective says what its blocks are for. A factory (aten::empty and
// its kind) inside another operator gets no row: it allocates for that operator. The operators of a
// plain node get no rows either: they allocate for the node, whether RecordFunction reports them or
// not (see scope_of_node).
uint32_t Recorder::open_scope(ThreadState& thread) {
  auto& frames = thread.frames_;
  if (frames.empty()) {
    return 0;
  }
  size_t innermost = frames.size() - 1;
  if (thread.node_ >= NodeKind::kPlain) {
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
    bool inside_op = i > 0 && frames[i - 1].kind == ScopeKind::kOp && !in_compiled(frames, i);
    if (frame.kind == ScopeKind::kOp && inside_op && i != innermost && is_arithmetic(frame.name)) {
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

// A line of generated code that allocates without an operator is a scope of its own: an operator
// inside the present scope, over at once, whose end names the line.
uint32_t Recorder::scope_of_line(ThreadState& thread, uint32_t around) {
  auto take = take_generated.load(std::memory_order_relaxed);
  uint32_t line = take != nullptr ? take(Caller::kAllocator) : 0;
  if (line == 0) {
    return around;
  }
  uint64_t now = ticks_now();
  uint64_t position = scopes.append({now,
                                     around,
                                     0,
                                     name_of(thread, kGeneratedLine, 0),
                                     thread.number_,
                                     ScopeKind::kOp,
                                     kScopeReady});
  if (position == AppendLog<ScopeBegin>::kRefused) {
    lost_scopes.fetch_add(1, std::memory_order_relaxed);
    return around;
  }
  auto scope = static_cast<uint32_t>(position + 1);
  if (scope_ends.append({now, scope, line}) == AppendLog<ScopeEnd>::kRefused) {
    lost_scopes.fetch_add(1, std::memory_order_relaxed);
  }
  return scope;
}

void Recorder::close(ThreadState& thread, size_t depth) {
  Frame& frame = thread.frames_[depth];
  bool inside_op = depth > 0 && thread.frames_[depth - 1].kind == ScopeKind::kOp;
  if (thread.generation_ != generation() || !recording.load(std::memory_order_relaxed)) {
    return;
  }
  uint32_t generated = 0;
  if (frame.kind == ScopeKind::kOp && frame.wants_line && in_compiled(thread.frames_, depth)) {
    auto take = take_generated.load(std::memory_order_relaxed);
    generated = take != nullptr ? take(Caller::kOperator) : 0;  // may wait for the GIL
  }
  if (frame.kind == ScopeKind::kOp && inside_op && generated == 0) {
    return;  // an inner operator gets no end: nothing needs it, and it would be a third of the log
  }
  uint64_t left = ticks_now();
  uint32_t stack = generated;
  // Python called the outermost op, so its line is the one to keep. Under a node that line would be
  // the call of backward(), which says nothing, unless the forward runs again there.
  bool inside_node = depth > 0 && thread.frames_[depth - 1].kind == ScopeKind::kNode;
  if (frame.kind == ScopeKind::kOp && frame.wants_line && !inside_op &&
      (!inside_node || (frame.flags & kScopeRecompute) != 0)) {
    auto take = take_stack.load(std::memory_order_relaxed);
    stack = take != nullptr ? take() : stack;  // may wait for the GIL, so not during a Stay
  }
  Stay stay(*this, thread);
  if (!stay || frame.scope == 0) {
    return;  // another recording has begun while we waited
  }
  if (scope_ends.append({left, frame.scope, stack}) == AppendLog<ScopeEnd>::kRefused) {
    lost_scopes.fetch_add(1, std::memory_order_relaxed);
  }
}

// The row of the node that the thread evaluates, 0 if there is none. Each node is described once.
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
    uint64_t position =
        scopes.append({ticks_now(),
                       parent,
                       forward_of(frame),
                       name_of(thread, facts.name, std::hash<std::string>{}(facts.name)),
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

// The engine's threads may still free memory that their last node held, so their fields are atomic.
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

void Recorder::open_current(ThreadState& thread) {
  drop_ended(thread);
  Stay stay(*this, thread);
  if (stay) {
    open_scope(thread);
  }
}

}  // namespace pytracer
