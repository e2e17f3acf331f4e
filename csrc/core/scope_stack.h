// A thread's stack of open scopes.
//
// A hook pushes a frame when the program enters an operator, a node, a module, a pass or an
// annotation, and pops it when the program leaves. A frame costs no memory of the recording: it
// becomes a row (a ScopeBegin) only when something happens inside. Most operators allocate nothing
// and leave no trace. recorder.h shows an example.
#pragma once

#include "event.h"
#include "forward_map.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// A thread-local that is read without a call. A library that is loaded late gets few bytes of them.
#define PYTRACER_STATIC_TLS __attribute__((tls_model("initial-exec")))

namespace pytracer {

// The kind of a thread's innermost autograd node.
enum class NodeKind : uint8_t {
  kNone,
  kWithGrad,  // evaluated with grad mode on: it makes a graph of its own
  kPython,    // a Function that the program wrote: it may run anything
  kPlain,     // one of torch's own: it computes gradients; its operators all count as the node
  kBare,      // plain, and no Python can run in it: nothing but its operators happens in it
};

// Whether an operator is torch's own (`aten::mul`, `detach`), and neither a collective
// (`c10d::...`, `nccl:...`) nor a library's.
inline bool is_arithmetic(const char* name) {
  return std::strncmp(name, "aten::", 6) == 0 || std::strchr(name, ':') == nullptr;
}

// A scope that the program opens by hand. Unlike an op, it may end on another thread: when a worker
// drains a generator, or completes a future. The thread that began it and the thread that ends it
// share this.
struct Annotation {
  explicit Annotation(std::string text) : name(std::move(text)) {}

  const std::string name;
  std::atomic<bool> ended_elsewhere{false};
};

// An op, node, module, pass or annotation that the thread is inside of.
struct Frame {
  const void* key;   // identifies the frame when it is popped
  const char* name;  // valid as long as the frame is open
  uint64_t ticks;    // 0 for an op inside an op: its row begins when something happens in it
  int64_t sequence;  // of an op: autograd's next node number at entry, or -1 (makes no nodes)
                     // of a node: its own number
  uint64_t forward_thread;  // of a node: torch's id of the thread that made it
  uint32_t scope;           // 0 until something happens inside
  uint32_t name_id;         // the interned name, or 0 if it is not interned yet
  ScopeKind kind;
  uint8_t flags;
  bool wants_line;  // a block was made inside, or a node: a view's backward makes blocks, too
  NodeKind node;    // of a node
};

// The autograd node that a thread evaluates.
struct Node {
  std::string name;
  int64_t sequence;         // its number on the thread that made it, -1 for none
  uint64_t forward_thread;  // torch's id of that thread
};

// While RecordFunction is off, the recorder asks for the current node at each event.
struct NodeSource {
  const void* (*current)();  // identifies the node that the thread evaluates; null for none
  Node (*describe)();        // describes that node
};

// The operating system's number of a thread and, of torch's own threads alone, the name that torch
// gave it.
struct ThreadName {
  uint64_t native_id;
  std::string text;
};

class ThreadState {
 public:
  explicit ThreadState(ThreadName name) : name_(std::move(name)) {}

  bool inside_node() const { return inside(ScopeKind::kNode); }

  NodeKind node() const { return node_; }

  // In the node itself, and in nothing that it has entered.
  bool in_bare_node() const {
    return node_ == NodeKind::kBare && !frames_.empty() && frames_.back().kind == ScopeKind::kNode;
  }

  bool inside_step() const { return inside(ScopeKind::kOptimizer); }

  bool in_op() const { return !frames_.empty() && frames_.back().kind == ScopeKind::kOp; }

  bool in_outermost_op() const {
    size_t count = frames_.size();
    return in_op() && (count == 1 || frames_[count - 2].kind != ScopeKind::kOp);
  }

  bool is_in(const void* key) const { return !frames_.empty() && frames_.back().key == key; }

  // Neither in a module nor in a backward pass, which may run modules again.
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

  // Marks the open operators, up to one that has the mark already: a block or a node was made. Not
  // every operator has a row, and the outermost one needs to know.
  void want_line() {
    for (auto frame = frames_.rbegin(); frame != frames_.rend(); ++frame) {
      if (frame->kind != ScopeKind::kOp || frame->wants_line) {
        break;
      }
      frame->wants_line = true;
    }
  }

  struct CachedName {
    std::string_view text;  // the table's copy
    uint32_t id = 0;
  };

  static constexpr size_t kNames = 1024;

  std::atomic<bool> busy_{false};  // inside the recorder: see Recorder::quiesce
  uint32_t calls_ = 0;             // counted because some of them are timed: see OwnTime
  NodeKind node_ = NodeKind::kNone;
  uint16_t number_ = 0;            // in the recording
  uint32_t generation_ = 0;        // of the recording that the thread takes part in
  uint32_t names_generation_ = 0;  // of the recording that the cached names belong to
  bool has_ended_ = false;         // the thread, though other threads still read its nodes
  ThreadName name_;
  MadeNodes made_;
  std::vector<Frame> frames_;
  std::vector<std::shared_ptr<Annotation>> annotations_;  // one for each frame that is one
  std::atomic<bool> some_ended_elsewhere_{false};         // some of these annotations have
  std::vector<CachedName> names_;                         // kNames entries, or none yet

  struct Read {
    uint64_t address;
    uint32_t label;
    uint16_t place;
  };

  // The blocks that the outermost operator reads, recorded if it makes a block. A long list
  // keeps only its first ones.
  std::array<Read, 8> reads_;
  uint8_t read_count_ = 0;
  // The node of the last event, while the recorder asks for nodes. The thread that ends the pass
  // closes it.
  const void* asked_node_ = nullptr;
  std::atomic<uint32_t> asked_scope_{0};
  std::atomic<uint64_t> asked_until_{0};  // the last event's ticks
};

// One pointer, in the static TLS block: the cheapest thread-local there is for a shared library.
extern PYTRACER_STATIC_TLS thread_local constinit ThreadState* this_thread_state;

}  // namespace pytracer
