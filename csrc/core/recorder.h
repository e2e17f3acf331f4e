// The recorder: the process's one recording, and each thread's stack of open scopes.
//
// Hooks (csrc/torch, csrc/cuda) call push, pop and record. None of these waits for another thread
// or touches Python. Where memory has run out altogether push and pop may throw, which torch's
// RecordFunction catches; record never does, so it may run under an allocator's lock: what it
// cannot write down is lost by name. When nothing is traced each costs one relaxed load.
//
//   thread A ──push/pop──> its own frames ─┐ a frame becomes a row only when something
//   thread B ──push/pop──> its own frames ─┤ happens inside it (lazily: most ops allocate
//                                          v nothing and cost no memory)
//            record ──────────────> events, scopes, scope_ends (AppendLog)
//
// Several traces may run at once; they share the recording and each reads its own stretch of it.
#pragma once

#include "append_log.h"
#include "clock.h"
#include "event.h"
#include "tables.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace pytracer {

// The gate in front of every hook.
inline constinit std::atomic<bool> recording{false};

// What a thread's innermost autograd node is.
enum class NodeKind : uint8_t {
  kNone,
  kWithGrad,  // evaluated with grad mode on: it makes a graph of its own
  kPython,    // a Function of the program's: it may run anything
  kPlain,     // one of torch's own: it computes gradients, and its operators are not told apart
};

// Whether an operator is torch's own (`aten::mul`, `detach`) and not a collective (`c10d::...`,
// `nccl:...`) or of a library.
inline bool is_arithmetic(const char* name) {
  return std::strncmp(name, "aten::", 6) == 0 || std::strchr(name, ':') == nullptr;
}

// A scope that the program opens by hand. Unlike an op it may end on another thread: when a
// generator is drained by a worker, or a future is completed. Its thread and whoever ends it share
// this.
struct Annotation {
  explicit Annotation(std::string text) : name(std::move(text)) {}

  const std::string name;
  std::atomic<bool> ended_elsewhere{false};
};

// An op, module or pass that the thread is inside of.
struct Frame {
  const void* key;   // tells whose frame this is when it is popped
  const char* name;  // valid as long as the frame is open
  uint64_t ticks;    // 0 for an op inside an op: it begins when something happens in it
  int64_t sequence;  // of an op: autograd's next node number at entry, or -1 (makes no nodes)
                     // of a node: its own number
  uint64_t forward_thread;  // of a node: torch's id of the thread that made it
  uint32_t scope;           // 0 until something happens inside
  uint32_t name_id;         // when the name is interned already, else 0
  ScopeKind kind;
  uint8_t flags;
  bool allocated;  // a block was made inside: worth a Python line
  NodeKind node;   // of a node
};

// The autograd node that a thread evaluates: what its operators are, and whose.
struct Node {
  std::string name;
  int64_t sequence;         // its number on the thread that made it, -1 for none
  uint64_t forward_thread;  // torch's id of that thread
};

// How the recorder learns of nodes while torch tells of no operators: it asks at each event.
struct NodeSource {
  const void* (*current)();  // which the calling thread evaluates; null for none
  Node (*describe)();        // the same one
};

// A thread's number and, of torch's own threads alone, the name that torch gave it.
struct ThreadName {
  uint64_t native_id;
  std::string text;
};

class ThreadState {
 public:
  ThreadState(uint16_t number, ThreadName name) : number_(number), name_(std::move(name)) {
    frames_.reserve(128);
  }

  bool inside_node() const { return inside(ScopeKind::kNode); }

  NodeKind node() const { return node_; }

  bool inside_step() const { return inside(ScopeKind::kOptimizer); }

  bool in_op() const { return !frames_.empty() && frames_.back().kind == ScopeKind::kOp; }

  bool in_outermost_op() const {
    size_t count = frames_.size();
    return in_op() && (count == 1 || frames_[count - 2].kind != ScopeKind::kOp);
  }

  bool is_in(const void* key) const { return !frames_.empty() && frames_.back().key == key; }

  // Neither in a module nor in a backward pass (which may run modules again).
  bool outside_of_modules() const {
    return !inside(ScopeKind::kModule) && !inside(ScopeKind::kNode) &&
           !inside(ScopeKind::kBackward);
  }

 private:
  friend class Recorder;
  friend class OwnTime;

  bool inside(ScopeKind kind) const {
    return std::any_of(frames_.rbegin(), frames_.rend(), [kind](const Frame& frame) {
      return frame.kind == kind;
    });
  }

  struct CachedName {
    std::string_view text;  // the table's copy
    uint32_t id = 0;
  };

  // Forward ops by the number of the autograd node they made: the nodes' side of the map from
  // backward to forward. A ring, since numbers grow for ever: 2^17 nodes may be alive at once.
  static constexpr uint64_t kRing = uint64_t{1} << 17;
  static constexpr size_t kNames = 1024;

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  std::atomic<bool> busy_{false};  // inside the recorder: see Recorder::quiesce
  uint32_t calls_ = 0;             // of which some are timed: see OwnTime
  NodeKind node_ = NodeKind::kNone;
  bool retired_ = false;  // its thread has ended
  uint16_t number_;
  uint32_t generation_ = 0;  // of the recording that the caches belong to
  ThreadName name_;
  std::atomic<uint64_t> torch_id_{0};  // what torch calls this thread in forwardThreadId()
  int64_t claimed_ = 0;                // node numbers below this have an op
  std::vector<Frame> frames_;
  std::vector<std::shared_ptr<Annotation>> annotations_;  // of the frames that are annotations
  std::atomic<bool> some_ended_elsewhere_{false};         // of these annotations
  // Set once, before torch_id_. From calloc: of a thread that makes few nodes it takes one page.
  std::unique_ptr<std::atomic<uint64_t>[], Free> made_by_;
  std::vector<CachedName> names_;  // kNames, or none yet

  struct Read {
    uint64_t address;
    uint32_t label;
    uint16_t place;
  };

  // What the outermost operator reads, worth noting if it makes a block: of a long list the first.
  std::array<Read, 8> reads_;
  uint8_t read_count_ = 0;
  // The node of the last event, while the recorder asks for nodes. Who ends the pass closes it.
  const void* asked_node_ = nullptr;
  std::atomic<uint32_t> asked_scope_{0};
  std::atomic<uint64_t> asked_until_{0};  // the last event's ticks
};

// One pointer, in the static TLS block: the cheapest thread-local there is for a shared library.
extern __attribute__((
    tls_model("initial-exec"))) thread_local constinit ThreadState* this_thread_state;

// What tracing itself computes, and no time that its threads wait. One in 61 of the short calls is
// timed and stands for all. (A prime, so that it is not always the same one of a program's loop.)
// Ticks go on while another program has the core, so a call that took too long stands for nothing.
// What takes longer by itself is timed by the thread's clock: see quietly::Timed.
class OwnTime {
 public:
  struct Reading {
    uint64_t at;     // when it was read, in ticks
    uint64_t ticks;  // of short calls
    uint64_t ns;     // of the others
  };

  explicit OwnTime(ThreadState& thread)
      : begin_(++thread.calls_ % kOneIn == 0 && !in_longer_call ? ticks_now() : 0) {}

  OwnTime(const OwnTime&) = delete;
  OwnTime& operator=(const OwnTime&) = delete;

  ~OwnTime() {
    if (begin_ != 0) {
      uint64_t took = ticks_now() - begin_;
      add_ticks(took < interrupted_ticks() ? kOneIn * took : 0);
    }
  }

  static void add_ticks(uint64_t ticks) { ticks_.fetch_add(ticks, std::memory_order_relaxed); }

  static void add_ns(uint64_t ns) { ns_.fetch_add(ns, std::memory_order_relaxed); }

  static Reading read() {
    return {
        ticks_now(), ticks_.load(std::memory_order_relaxed), ns_.load(std::memory_order_relaxed)};
  }

  // Of this thread: what happens inside of it is counted with it.
  static inline thread_local constinit bool in_longer_call = false;

 private:
  static constexpr uint32_t kOneIn = 61;
  static inline std::atomic<uint64_t> ticks_{0};
  static inline std::atomic<uint64_t> ns_{0};

  uint64_t begin_;
};

class Recorder {
 public:
  static constexpr uint64_t kNoLimit = UINT64_MAX;
  // Of 65536 place numbers these are given out; the others are for what no number is left for.
  static constexpr uint32_t kPlacesKept = 256;  // one per device
  static constexpr uint32_t kMostPlaces = UINT16_MAX + 1 - kPlacesKept;

  static Recorder& get() { return *instance; }

  // --- the hooks' side ------------------------------------------------------------------

  static ThreadState& this_thread() {
    ThreadState* state = this_thread_state;
    return state != nullptr ? *state : new_thread_state();
  }

  // Inline, with the clock read only where it matters: this runs for every operator of the
  // program, and most of them allocate nothing.
  void push(ThreadState& thread,
            ScopeKind kind,
            const void* key,
            const char* name,
            int64_t sequence = -1,
            uint32_t name_id = 0) {
    uint8_t flags = 0;
    if (sequence >= 0) {
      flags = thread.node_ >= NodeKind::kPython ? kScopeGrad | kScopeRecompute : kScopeGrad;
    }
    auto& frames = thread.frames_;
    bool inner_op =
        kind == ScopeKind::kOp && !frames.empty() && frames.back().kind == ScopeKind::kOp;
    uint64_t ticks = inner_op ? 0 : ticks_now();
    frames.push_back({key, name, ticks, sequence, 0, 0, name_id, kind, flags, false, {}});
  }

  // What is known of the frame that was pushed last, before anything happens in it.
  static void mark(ThreadState& thread, uint8_t flags) { thread.frames_.back().flags |= flags; }

  // The same: of a backward pass, the number of a node and the thread that made it.
  static void mark_forward(ThreadState& thread, int64_t number, uint64_t made_by) {
    thread.frames_.back().sequence = number;
    thread.frames_.back().forward_thread = made_by;
  }

  // Whether an op is known to have made the thread's node of this number.
  static bool made_by_an_op(const ThreadState& thread, uint64_t number) {
    if (!thread.made_by_) {
      return false;
    }
    uint64_t entry = thread.made_by_[number % ThreadState::kRing].load(std::memory_order_relaxed);
    return entry >> 32 == (number & UINT32_MAX);
  }

  // The thread enters an annotation, whose address is the frame's key.
  void push_annotation(ThreadState& thread, ScopeKind kind, std::shared_ptr<Annotation> annotation);

  // It has ended. `owner` is the thread that entered it, `thread` the one that ends it.
  void end_annotation(ThreadState& thread, ThreadState& owner, Annotation& annotation);

  // An autograd node is evaluated: its number on the thread that made it, and that thread.
  void push_node(ThreadState& thread,
                 const void* key,
                 const char* name,
                 int64_t sequence,
                 uint64_t forward_thread,
                 NodeKind node);

  // True, and done, for the innermost frame when nothing has happened in it and it has made no
  // nodes that an inner operator has not claimed; else call pop.
  template <class NextSequence>
  static bool pop_untouched(ThreadState& thread, const void* key, NextSequence next_sequence) {
    auto& frames = thread.frames_;
    if (frames.empty()) {
      return false;
    }
    const Frame& frame = frames.back();
    if (frame.key != key || frame.scope != 0 || frame.kind != ScopeKind::kOp) {
      return false;
    }
    if (frame.sequence >= 0 &&
        static_cast<int64_t>(next_sequence()) > std::max(frame.sequence, thread.claimed_)) {
      return false;
    }
    frames.pop_back();
    return true;
  }

  // `next_sequence` is autograd's next node number now: the op made the nodes in between.
  void pop(ThreadState& thread, const void* key, int64_t next_sequence = -1);

  // Returns the event's position, or AppendLog::kRefused.
  uint64_t record(Action action, uint16_t place, uint64_t address, uint64_t bytes) noexcept;

  // The thread's outermost operator reads this block, which is labelled so as soon as the operator
  // makes one.
  static void will_read(ThreadState& thread, uint16_t place, uint64_t address, uint32_t label) {
    if (thread.read_count_ < thread.reads_.size()) {
      thread.reads_[thread.read_count_++] = {address, label, place};
    }
  }

  static void forget_reads(ThreadState& thread) { thread.read_count_ = 0; }

  // It happened and cannot be recorded.
  void lose(Action action) noexcept {
    lost_events[static_cast<size_t>(action)].fetch_add(1, std::memory_order_relaxed);
  }

  // Gives the innermost frame a row now, though nothing has happened in it yet.
  void open_current(ThreadState& thread);
  void mark_step(std::string_view name);

  // Numbers are 16 bits wide. Beyond them a device's streams and pools share one row, which is
  // counted: the bytes stay right, and where they lie is lost by name.
  uint16_t place(const Place& place);

  // How the Python stack of the calling thread becomes a row of `stacks`; null takes none.
  std::atomic<uint32_t (*)()> take_stack{nullptr};
  // How a thread that makes autograd nodes learns what torch calls it.
  std::atomic<uint64_t (*)()> torch_thread_id{nullptr};

  // From here to ask_for_no_nodes, an event's scope is the node that its thread evaluates.
  void ask_for_nodes(const NodeSource& source) { node_source_.store(&source); }

  void ask_for_no_nodes();

  bool asks_for_nodes() const { return node_source_.load(std::memory_order_relaxed) != nullptr; }

  // --- the sessions' side ---------------------------------------------------------------

  // Log positions: where a session starts, or up to where it has read.
  struct Positions {
    uint64_t events = 0;
    uint64_t scopes = 0;
    uint64_t scope_ends = 0;
  };

  // What was refused since the recording began: events by their action, then scopes, then places.
  using Losses = std::array<uint64_t, kActions + 2>;

  uint32_t begin_session(uint64_t max_events);
  // After the last session has ended no thread appends any more and the logs can be read whole.
  // The session's rows stay until it is forgotten.
  void end_session(uint32_t id);
  // Nobody reads the session any more. With the last one the recording's memory is given back.
  void forget_session(uint32_t id);
  Positions start_of(uint32_t id) const;
  // How far its rows reach: to where the logs are now, or were as it ended.
  Positions end_of(uint32_t id) const;
  Losses losses_before(uint32_t id) const;
  Losses losses() const;
  // How many have not ended.
  uint32_t sessions() const;
  // This session has read the rows below: their memory may go when no other needs it.
  void release_below(uint32_t id, const Positions& positions);

  // What the operating system calls the threads, by their number.
  std::vector<ThreadName> threads_from(size_t first) const;
  // In a forked child: other threads are gone and may have held any lock, so the child gets a
  // recorder of its own and the parent's is left where it lies.
  static void start_afresh_after_fork();

  AppendLog<Event> events;
  AppendLog<ScopeBegin> scopes;
  AppendLog<ScopeEnd> scope_ends;
  StringTable strings;
  RowTable<StackFrame> stacks;
  RowTable<Place> places;
  RowTable<Label> labels;
  std::array<std::atomic<uint64_t>, kActions> lost_events{};
  std::atomic<uint64_t> lost_scopes{0};
  std::atomic<uint64_t> lost_places{0};

  // Counts recordings, on into a forked child: what was interned under an earlier number is not
  // valid any more. Every cache of interned numbers carries the generation that it belongs to.
  uint32_t generation() const { return generation_.load(std::memory_order_relaxed); }

 private:
  class Stay;

  Recorder() = default;
  void continue_after(const Recorder& parents);

  static ThreadState& new_thread_state();
  ThreadState& adopt_thread();
  void retire_thread(ThreadState& state);
  bool quiesce();
  void refresh(ThreadState& thread);
  uint32_t name_of(ThreadState& thread, Frame& frame);
  uint32_t name_of(ThreadState& thread, std::string_view name);
  uint32_t open_scope(ThreadState& thread);
  uint32_t scope_of_node(ThreadState& thread, const NodeSource& source);
  void close_node(ThreadState& thread);
  uint32_t forward_of(const Frame& node) const;
  const ThreadState* thread_called(uint64_t torch_id) const;
  void record_reads(ThreadState& thread, uint64_t ticks, uint32_t scope) noexcept;
  void claim(ThreadState& thread, Frame& op, int64_t next_sequence);
  void close(ThreadState& thread, size_t depth);
  void erase(ThreadState& thread, size_t depth, int64_t next_sequence);
  void drop_ended(ThreadState& thread);
  void set_limits();

  friend struct ThreadExit;

  static Recorder* instance;

  mutable std::mutex mutex_;  // sessions; no hook takes it, so it may be held while waiting

  struct Session {
    Positions start;
    Positions unread;  // rows from here on are still needed
    Positions limit;   // rows from here on are more than it asked for
    Losses lost_before;
    bool ended = false;
    Positions end;  // once it has ended
  };

  Positions reached() const;

  uint32_t open_sessions() const;
  void clear();

  std::map<uint32_t, Session> sessions_;  // until they are forgotten
  Positions released_;
  uint32_t next_session_ = 1;
  std::atomic<uint32_t> generation_{1};
  std::atomic<const NodeSource*> node_source_{nullptr};
  std::atomic<ThreadState*> forward_thread_{nullptr};  // that made nodes first: mostly the one
  mutable std::mutex threads_mutex_;  // a leaf: hooks take it, nothing is waited for under it
  std::vector<std::unique_ptr<ThreadState>> threads_;
};

}  // namespace pytracer
