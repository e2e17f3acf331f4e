#include "ops.h"

#include "../core/recorder.h"
#include "interceptors.h"
#include "node_names.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <typeinfo>
#include <unordered_set>
#include <utility>

namespace pytracer::ops {

namespace {

// The engine opens a FUNCTION scope of this name around each node *and* around the release of
// what the node had saved; torch's BACKWARD_FUNCTION scope inside it covers only the node's call.
constexpr char kNodePrefix[] = "autograd::engine::evaluate_function: ";
constexpr size_t kNodePrefixLength = sizeof(kNodePrefix) - 1;
constexpr char kOptimizerPrefix[] = "Optimizer.step#";

at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
Detail detail = Detail::kCategory;

// Outermost passes of this recording, guarded by the GIL. These are heard, to learn what a pass
// runs: the first ones, and again one in so many.
uint64_t passes = 0;
uint64_t quiet_passes = 0;
constexpr uint64_t kHeardFirst = 2;
constexpr uint64_t kHeardEvery = 64;
// A pass ran more than torch's own nodes.
std::atomic<bool> more_than_nodes{false};

bool has_prefix(const char* text, const char* prefix, size_t length) {
  return std::strncmp(text, prefix, length) == 0;
}

// By name: torch 2.11 does not export the type itself.
bool is_python(const torch::autograd::Node& node) {
  return std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE") == 0;
}

// This scope does not carry the node's number. The BACKWARD_FUNCTION scope would, but naming each
// node once more costs more than all the rest; the engine's own notion of "the current node" is
// set by now and says the same.
void enter_node(Recorder& recorder,
                ThreadState& thread,
                const at::RecordFunction& fn,
                const char* name) {
  auto node = torch::autograd::get_current_node();
  NodeKind kind = NodeKind::kPlain;
  if (c10::GradMode::is_enabled()) {
    kind = NodeKind::kWithGrad;
  } else if (!node || is_python(*node)) {
    kind = NodeKind::kPython;
  }
  if (kind != NodeKind::kPlain) {
    hear_passes();
  }
  int64_t sequence = node ? static_cast<int64_t>(node->sequence_nr()) : -1;
  uint64_t forward_thread = node ? node->thread_id() : 0;
  recorder.push_node(thread, &fn, name, sequence, forward_thread, kind);
}

const void* quiet_node() {
  return at::isRecordFunctionEnabled() ? nullptr : torch::autograd::get_current_node().get();
}

// Under an allocator's lock, where Python must not be asked for the name of a class.
Node describe_quiet_node() {
  auto node = torch::autograd::get_current_node();
  bool python = is_python(*node);
  if (python) {
    hear_passes();
  }
  return {python ? "torch::autograd::PyNode" : node->name(),
          static_cast<int64_t>(node->sequence_nr()),
          node->thread_id()};
}

constexpr NodeSource kQuietNodes{&quiet_node, &describe_quiet_node};

bool nobody_else_listens() {
  auto heard_by = at::getStepCallbacks(at::RecordScope::FUNCTION);
  return heard_by.callbacks_.size() == 1;
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& fn) {
  Recorder& recorder = Recorder::get();
  ThreadState& thread = Recorder::this_thread();
  const char* name = fn.name();
  if (fn.scope() == at::RecordScope::USER_SCOPE) {
    bool optimizer = has_prefix(name, kOptimizerPrefix, sizeof(kOptimizerPrefix) - 1);
    if (thread.node() != NodeKind::kNone) {
      hear_passes();
    }
    recorder.push(thread, optimizer ? ScopeKind::kOptimizer : ScopeKind::kUser, &fn, name);
    if (optimizer) {
      interceptors::before_step();
    }
  } else if (name[0] == 'a' && name[1] == 'u' && has_prefix(name, kNodePrefix, kNodePrefixLength)) {
    enter_node(recorder, thread, fn, name + kNodePrefixLength);
  } else {
    OwnTime own(thread);
    int64_t sequence = fn.seqNr();
    if (thread.node() == NodeKind::kPlain && (sequence >= 0 || !is_arithmetic(name))) {
      hear_passes();
    }
    recorder.push(thread, ScopeKind::kOp, &fn, name, sequence);
  }
  return nullptr;
}

void leave(const at::RecordFunction& fn, at::ObserverContext* /*context*/) {
  ThreadState& thread = Recorder::this_thread();
  OwnTime own(thread);
  if (!Recorder::pop_untouched(thread, &fn, &at::sequence_number::peek)) {
    Recorder::get().pop(thread, &fn, at::sequence_number::peek());
  }
}

}  // namespace

Pass::Pass(bool may_be_quiet) : enabled_(at::isRecordFunctionEnabled()) {
  uint64_t number = passes++;
  quiet_ = may_be_quiet && enabled_ && detail == Detail::kOp && number >= kHeardFirst &&
           number % kHeardEvery != 0 && !more_than_nodes.load(std::memory_order_relaxed) &&
           !Recorder::get().asks_for_nodes() && installed() && nobody_else_listens();
  if (quiet_) {
    ++quiet_passes;
    Recorder::get().ask_for_nodes(kQuietNodes);
    at::enableRecordFunction(false);
  }
}

Pass::~Pass() {
  if (quiet_) {
    at::enableRecordFunction(enabled_);
    Recorder::get().ask_for_no_nodes();
  }
}

Heard::Heard() : inside_(Recorder::get().asks_for_nodes() && quiet_node() != nullptr) {
  if (inside_) {
    hear_passes();
    Node node = describe_quiet_node();
    node_ = std::move(node.name);
    Recorder::get().push_node(Recorder::this_thread(),
                              this,
                              node_.c_str(),
                              node.sequence,
                              node.forward_thread,
                              NodeKind::kPython);
    at::enableRecordFunction(true);
  }
}

Heard::~Heard() {
  if (inside_) {
    at::enableRecordFunction(false);
    Recorder::get().pop(Recorder::this_thread(), this);
  }
}

void forget_passes() {
  passes = 0;
  quiet_passes = 0;
  more_than_nodes.store(false, std::memory_order_relaxed);
}

uint64_t passes_not_heard() {
  return quiet_passes;
}

void hear_passes() {
  more_than_nodes.store(true, std::memory_order_relaxed);
}

void install(Detail with) {
  uninstall();
  detail = with;
  Recorder::get().torch_thread_id.store(&at::RecordFunction::currentThreadId);
  std::unordered_set<at::RecordScope> scopes{at::RecordScope::USER_SCOPE};
  if (detail == Detail::kOp) {
    scopes.insert(at::RecordScope::FUNCTION);
    node_names::install();
  }
  handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&enter, &leave).scopes(std::move(scopes)));
}

void uninstall() {
  if (installed()) {
    at::removeCallback(handle);
    node_names::uninstall();
    handle = at::INVALID_CALLBACK_HANDLE;
  }
}

bool installed() {
  return handle != at::INVALID_CALLBACK_HANDLE;
}

}  // namespace pytracer::ops
