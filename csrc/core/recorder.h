// The recorder: the process's one recording. It holds the logs and tables, and the sessions that
// read them.
//
//   scope_stack.h   each thread's stack of open scopes
//   forward_map.h   which operator made an autograd node
//   recorder.h      the logs, the sessions, and what hooks call
//
// Example: loss = linear(x).sum(); loss.backward(). Time runs downwards. Brackets hold the thread's
// frames, the innermost last. The number in an op's frame is autograd's next node number, the
// number in a node's frame is the node's own.
//
//   call          the thread's frames                        rows appended
//   ------------  -----------------------------------------  ------------------------------------
//   push module   [linear]
//   push op       [linear] [aten::linear 0]
//   push op       [linear] [aten::linear 0] [addmm 0]
//   record alloc                                             scope 1: module linear
//                                                            scope 2: op aten::linear, parent 1
//                                                            scope 3: op aten::addmm, parent 2
//                                                            event:   alloc, in scope 3
//   pop op        [linear] [aten::linear 0]                  none; next node is 1, so scope 3
//                                                            made node 0
//   pop op        [linear]                                   end of 2, with the Python line
//   pop module    []                                         end of 1
//   push op       [aten::sum 1]
//   record alloc                                             scope 4: op aten::sum
//                                                            event:   alloc, in scope 4
//   pop op        []                                         end of 4; next node is 2, so scope 4
//                                                            made node 1
//   push pass     [backward]
//   push_node     [backward] [SumBackward0 1]                none: it allocates nothing
//   pop node      [backward]
//   push_node     [backward] [AddmmBackward0 0]
//   push op       [backward] [AddmmBackward0 0] [mm -1]
//   record alloc                                             scope 5: backward
//                                                            scope 6: node AddmmBackward0,
//                                                                     parent 5, forward 3 (which
//                                                                     made node 0)
//                                                            event:   alloc, in scope 6
//   pop, pop, pop []                                         end of 6, end of 5
//
// A frame becomes a row only when something happens inside it: most ops allocate nothing and cost
// no memory.
//
// Hooks (csrc/torch and the trackers of devices) call push, pop and record. None of these waits for
// another thread or touches Python. When nothing is traced, each costs one relaxed load. When
// memory has run out, push and pop may throw, which torch's RecordFunction catches. record never
// throws, so it may run under an allocator's lock: an event that it cannot append is counted as
// lost.
//
// Several traces may run at once. They share the recording, and each reads its own stretch of it.
#pragma once

#include "append_log.h"
#include "clock.h"
#include "event.h"
#include "own_time.h"
#include "scope_stack.h"
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

// Whether a block was made or freed at an address since somebody asked. Every event looks here, so
// it looks at little memory: a bit that is set once somebody has asked, and that the event clears.
// A table that each event wrote to would mostly be far away, and would go back and forth between
// the cores of forward and backward. Addresses may share a bit, and bits share a count.
class Changes {
 public:
  // Returns a number that is another one the next time if there was a change, and sometimes if not.
  uint32_t watch(uint64_t address) noexcept {
    size_t index = index_of(address);
    std::atomic<uint32_t>& count = counts_[index / kBitsOfOneCount];
    if ((word_of(index).load(std::memory_order_relaxed) & bit_of(index)) == 0) {
      count.fetch_add(1, std::memory_order_relaxed);
      word_of(index).fetch_or(bit_of(index), std::memory_order_relaxed);
    }
    return count.load(std::memory_order_relaxed);
  }

  void note(uint64_t address) noexcept {
    size_t index = index_of(address);
    if ((word_of(index).load(std::memory_order_relaxed) & bit_of(index)) != 0) [[unlikely]] {
      word_of(index).fetch_and(~bit_of(index), std::memory_order_relaxed);
    }
  }

 private:
  static constexpr int kIndexBits = 14;
  static constexpr size_t kBitsOfOneCount = 8;

  static size_t index_of(uint64_t address) {
    return (address * 0x9E3779B97F4A7C15) >> (64 - kIndexBits);
  }

  static uint64_t bit_of(size_t index) { return uint64_t{1} << (index % 64); }

  std::atomic<uint64_t>& word_of(size_t index) { return words_[index / 64]; }

  std::array<std::atomic<uint64_t>, (size_t{1} << kIndexBits) / 64> words_{};
  std::array<std::atomic<uint32_t>, (size_t{1} << kIndexBits) / kBitsOfOneCount> counts_{};
};

class Recorder {
 public:
  static constexpr uint64_t kNoLimit = UINT64_MAX;
  // There are 65536 thread numbers. All threads beyond the first 65535 share the last one.
  static constexpr size_t kMostThreads = UINT16_MAX;
  // There are 65536 place numbers. The last 256 are kept, one per device, for the time when all
  // others are in use.
  static constexpr uint32_t kPlacesKept = 256;
  static constexpr uint32_t kMostPlaces = UINT16_MAX + 1 - kPlacesKept;

  static Recorder& get() { return *instance; }

  // --- the hooks' side ------------------------------------------------------------------

  // Called on each thread of the program's that is met for the first time. Threads that torch
  // names work for others.
  static inline std::atomic<void (*)()> on_new_thread{nullptr};

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

  // Adds flags to the frame that was pushed last, before anything happens in it.
  static void mark(ThreadState& thread, uint8_t flags) { thread.frames_.back().flags |= flags; }

  // Gives the frame of a backward pass the number of a node, and the thread that made the node.
  static void mark_forward(ThreadState& thread, int64_t number, uint64_t made_by) {
    thread.frames_.back().sequence = number;
    thread.frames_.back().forward_thread = made_by;
  }

  // Whether the recorder knows the op that made this node of the thread.
  static bool made_by_an_op(const ThreadState& thread, uint64_t number) {
    return thread.made_.has(number);
  }

  // The thread enters an annotation, whose address is the frame's key.
  void push_annotation(ThreadState& thread, ScopeKind kind, std::shared_ptr<Annotation> annotation);

  // Ends the annotation. `owner` is the thread that entered it, `thread` the one that ends it.
  void end_annotation(ThreadState& thread, ThreadState& owner, Annotation& annotation);

  // The engine evaluates an autograd node. A node has a number on the thread that made it.
  void push_node(ThreadState& thread,
                 const void* key,
                 const char* name,
                 int64_t sequence,
                 uint64_t forward_thread,
                 NodeKind node);

  // Pops the innermost frame if nothing has happened in it and it leaves no nodes to claim. Returns
  // false, and does nothing, in any other case: then call pop.
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
        thread.made_.has_unclaimed(frame.sequence, static_cast<int64_t>(next_sequence()))) {
      return false;
    }
    frames.pop_back();
    return true;
  }

  // `next_sequence` is autograd's next node number now: the op made the nodes in between.
  void pop(ThreadState& thread, const void* key, int64_t next_sequence = -1);

  // Returns the event's position, or AppendLog::kRefused.
  uint64_t record(Action action, uint16_t place, uint64_t address, uint64_t bytes) noexcept;

  // The thread's outermost operator reads this block. The block gets its label as soon as the
  // operator makes a block.
  static void will_read(ThreadState& thread, uint16_t place, uint64_t address, uint32_t label) {
    if (thread.read_count_ < thread.reads_.size()) {
      thread.reads_[thread.read_count_++] = {address, label, place};
    }
  }

  static void forget_reads(ThreadState& thread) { thread.read_count_ = 0; }

  // A label that a block got, where the block was, and the count of changes there: until it is
  // another, the block and its label stay.
  struct Labelled {
    uint64_t position = AppendLog<Event>::kRefused;
    uint64_t address = 0;
    uint32_t changes = 0;
  };

  // Records a label of the block that begins at this address, unless that would only say again
  // what `before` says. Keep one `before` for each holder of a block and label.
  void record_label(uint16_t place, uint64_t address, uint32_t label, Labelled& before) noexcept;

  // Counts an event that cannot be recorded.
  void lose(Action action) noexcept {
    lost_events[static_cast<size_t>(action)].fetch_add(1, std::memory_order_relaxed);
  }

  // Gives the innermost frame a row now, though nothing has happened in it yet.
  void open_current(ThreadState& thread);
  void mark_step(std::string_view name);

  // Numbers are 16 bits wide. When they run out, all further streams and pools of a device share
  // one row, and the recorder counts that: the bytes stay right, but not where they lie.
  uint16_t place(const Place& place);

  // How the Python stack of the calling thread becomes a row of `stacks`; null takes none.
  std::atomic<uint32_t (*)()> take_stack{nullptr};
  // How the calling thread's line in code that a compiler wrote becomes a row of `stacks`, 0 if it
  // runs none; null while no such code can run. Where an allocator asks, nothing may be waited for.
  enum class Caller : uint8_t { kAllocator, kOperator };
  std::atomic<uint32_t (*)(Caller)> take_generated{nullptr};
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

  // Counts of what was lost since the recording began: events by action, then the others in the
  // order of kLossNames (harvest.cpp).
  using Losses = std::array<uint64_t, kActions + 4>;

  uint32_t begin_session(uint64_t max_events);
  // After the last session has ended, no thread appends any more, and the logs can be read whole.
  // A session's rows stay until the session is forgotten.
  void end_session(uint32_t id);
  // Nobody reads the session any more. Forgetting the last session frees the recording's memory.
  void forget_session(uint32_t id);
  Positions start_of(uint32_t id) const;
  // Where the session's rows end: at the logs' present ends, or where these were when it ended.
  Positions end_of(uint32_t id) const;
  Losses losses_before(uint32_t id) const;
  Losses losses() const;
  // How many sessions have not ended.
  uint32_t sessions() const;
  // This session has read the rows below `positions`. Memory that no session needs is freed.
  void release_below(uint32_t id, const Positions& positions);

  // The threads of the recording, by their numbers.
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
  std::atomic<uint64_t> merged_threads{0};   // that share the last number
  std::atomic<uint64_t> forgotten_nodes{0};  // whose forward op is not known any more

  // Counts recordings, also across a fork. Numbers interned in an earlier generation are invalid,
  // so every cache of interned numbers carries its generation.
  static uint32_t generation() { return generation_.load(std::memory_order_relaxed); }

  // For those who ask at each event. Valid for the life of the process.
  static const std::atomic<uint32_t>* generation_now() { return &generation_; }

 private:
  class Stay;

  Recorder() { names_.reserve(kMostThreads + 1); }  // takes memory as threads come

  void continue_after(const Recorder& parents);

  static ThreadState& new_thread_state();
  ThreadState& adopt_thread();
  void retire_thread(ThreadState& state);
  void reuse(ThreadState& state);
  void number(ThreadState& thread);
  bool quiesce();
  void refresh(ThreadState& thread);
  uint32_t name_of(ThreadState& thread, Frame& frame);
  uint32_t name_of(ThreadState& thread, std::string_view name, size_t slot);
  uint32_t open_scope(ThreadState& thread);
  uint32_t scope_of_line(ThreadState& thread, uint32_t around);
  uint32_t scope_of_node(ThreadState& thread, const NodeSource& source);
  void close_node(ThreadState& thread);
  uint32_t forward_of(const Frame& node);
  uint32_t made_by_another(uint64_t torch_id, uint64_t number);
  void record_reads(ThreadState& thread, uint64_t ticks, uint32_t scope) noexcept;
  void claim(ThreadState& thread, Frame& op, int64_t next_sequence);
  void close(ThreadState& thread, size_t depth);
  void erase(ThreadState& thread, size_t depth, int64_t next_sequence);
  void pop_ended(ThreadState& thread);

  // Drops the frames of annotations that another thread has ended: nothing more happens inside
  // them.
  void drop_ended(ThreadState& thread) {
    if (thread.some_ended_elsewhere_.load(std::memory_order_relaxed) &&
        thread.some_ended_elsewhere_.exchange(false)) [[unlikely]] {
      pop_ended(thread);
    }
  }

  void set_limits();

  friend class ThreadEnd;

  static Recorder* instance;

  mutable std::mutex mutex_;  // sessions; no hook takes it, so it may be held while waiting

  struct Session {
    Positions start;
    Positions unread;  // rows from here on are still needed
    Positions limit;   // rows from here on exceed the session's limit
    Losses lost_before;
    bool ended = false;
    Positions end;  // once it has ended
  };

  Positions reached() const;

  uint32_t open_sessions() const;
  void clear();
  void forget_threads();

  std::map<uint32_t, Session> sessions_;  // until they are forgotten
  Positions released_;
  uint32_t next_session_ = 1;
  static inline constinit std::atomic<uint32_t> generation_{1};
  std::atomic<const NodeSource*> node_source_{nullptr};
  Changes changes_;
  // Earlier labels do not count: a session has begun since, or a device's recording.
  std::atomic<uint64_t> labels_from_{0};

  std::atomic<ThreadState*> forward_thread_{nullptr};  // the first that made nodes; mostly the only
  mutable std::mutex threads_mutex_;  // a leaf: hooks take it, nothing is waited for under it
  // A state outlives its thread: other threads may hold a pointer to it. The next thread gets it.
  std::vector<std::unique_ptr<ThreadState>> threads_;
  std::vector<ThreadState*> unused_;
  std::vector<ThreadName> names_;  // by number
  EndedThreads ended_threads_;
};

// A hook's stay in the recorder. Raises the thread's flag, and only then looks whether anything
// records (see Recorder::quiesce). True while something does. By then the thread has dropped its
// caches of an earlier recording.
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

}  // namespace pytracer
