#include "ops.h"

#include "../core/recorder.h"
#include "calls.h"
#include "graph.h"
#include "node_names.h"
#include "private_torch.h"
#include "saved_tensors.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
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

using private_torch::kNodePrefix;
using private_torch::kOptimizerPrefix;

constexpr size_t kNodePrefixLength = sizeof(kNodePrefix) - 1;

at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
Detail detail = Detail::kCategory;

uint64_t quiet = 0;  // passes of this recording, guarded by the GIL
std::atomic<bool> in_quiet_pass{false};
// A pass has run more than nodes, or may do so.
std::atomic<bool> more_than_nodes{false};

bool has_prefix(const char* text, const char* prefix, size_t length) {
  return std::strncmp(text, prefix, length) == 0;
}

bool nobody_else_listens() {
  auto listeners = [](at::RecordScope scope) {
    return at::getStepCallbacks(scope).callbacks_.size();
  };
  if (detail == Detail::kOp) {
    return listeners(at::RecordScope::FUNCTION) == 1;
  }
  return listeners(at::RecordScope::FUNCTION) == 0 && listeners(at::RecordScope::USER_SCOPE) == 1;
}

// Whether a plain node runs no Python, in which anybody might begin to listen or call a collective:
// no hook, no mode and no tensor of a subclass.
bool is_bare(torch::autograd::Node& node) {
  if (!private_torch::is_torchs_node(typeid(node)) || graph::has_hooks(node) ||
      c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return false;
  }
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    if (node.input_metadata(i).is_tensor_subclass()) {
      return false;
    }
  }
  return nobody_else_listens();
}

// This scope does not carry the node's number. The BACKWARD_FUNCTION scope would, but to name each
// node once more costs more than all the rest. The engine's current node is set by now, and has the
// number.
void enter_node(Recorder& recorder,
                ThreadState& thread,
                const at::RecordFunction& fn,
                const char* name) {
  auto node = torch::autograd::get_current_node();
  NodeKind kind = NodeKind::kPlain;
  if (c10::GradMode::is_enabled()) {
    kind = NodeKind::kWithGrad;
  } else if (!node || private_torch::is_python_node(typeid(*node))) {
    kind = NodeKind::kPython;
  } else if (is_bare(*node)) {
    kind = NodeKind::kBare;
  }
  int64_t sequence = node ? static_cast<int64_t>(node->sequence_nr()) : -1;
  uint64_t forward_thread = node ? node->thread_id() : 0;
  recorder.push_node(thread, &fn, name, sequence, forward_thread, kind);
}

const void* quiet_node() {
  return at::isRecordFunctionEnabled() ? nullptr : torch::autograd::get_current_node().get();
}

bool is_quiet_here() {
  return in_quiet_pass.load(std::memory_order_relaxed) && quiet_node() != nullptr;
}

// Runs under an allocator's lock, so it must not ask Python for the name of a class.
Node describe_quiet_node() {
  auto node = torch::autograd::get_current_node();
  bool python = private_torch::is_python_node(typeid(*node));
  if (python) {
    forbid_quiet_passes();
  }
  return {python ? "torch::autograd::PyNode" : node->name(),
          static_cast<int64_t>(node->sequence_nr()),
          node->thread_id()};
}

constexpr NodeSource kQuietNodes{&quiet_node, &describe_quiet_node};

// Goes with torch's record of the annotation: the thread that ends it learns which one began it.
struct Entered final : at::ObserverContext {
  std::shared_ptr<Annotation> annotation;
  ThreadState* owner = nullptr;
  bool is_step = false;
  calls::Step step;
};

std::unique_ptr<at::ObserverContext> enter_annotation(Recorder& recorder,
                                                      ThreadState& thread,
                                                      const at::RecordFunction& fn) {
  const char* name = fn.name();
  bool is_step = has_prefix(name, kOptimizerPrefix, sizeof(kOptimizerPrefix) - 1);
  // An asynchronous collective says nothing about its thread's work meanwhile.
  if (fn.isAsync() || (detail == Detail::kSteps && !is_step)) {
    return nullptr;
  }
  auto entered = std::make_unique<Entered>();
  std::string text = name;
  if (is_step) {
    if (uint64_t number = entered->step.meet(); number > 1) {
      text += " " + std::to_string(number);  // two Adams are two optimizers
    }
  }
  entered->annotation = std::make_shared<Annotation>(std::move(text));
  entered->owner = &thread;
  entered->is_step = is_step;
  recorder.push_annotation(
      thread, is_step ? ScopeKind::kOptimizer : ScopeKind::kUser, entered->annotation);
  if (is_step) {
    entered->step.begin();
  }
  return entered;
}

void leave_annotation(ThreadState& thread, at::ObserverContext* context) {
  auto* entered = static_cast<Entered*>(context);
  if (entered == nullptr) {
    return;
  }
  Recorder::get().end_annotation(thread, *entered->owner, *entered->annotation);
  if (entered->is_step && entered->owner == &thread) {
    entered->step.end();
  }
  if (detail == Detail::kSteps) {
    calls::rest_between_steps();
  }
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& fn) {
  Recorder& recorder = Recorder::get();
  ThreadState& thread = Recorder::this_thread();
  if (fn.scope() == at::RecordScope::USER_SCOPE) {
    return enter_annotation(recorder, thread, fn);
  }
  const char* name = fn.name();
  if (name[0] == 'a' && name[1] == 'u' && has_prefix(name, kNodePrefix, kNodePrefixLength)) {
    enter_node(recorder, thread, fn, name + kNodePrefixLength);
  } else if (name[0] == 'P' && std::strcmp(name, private_torch::kDispatchMode) == 0) {
    return nullptr;  // an operator is on its way to a mode: the program's, or ours
  } else {
    OwnTime own(thread);
    int64_t sequence = fn.seqNr();
    if (sequence >= 0 && !c10::GradMode::is_enabled()) {
      sequence = -1;  // a Function in Python, which has a number in any case
    }
    recorder.push(thread, ScopeKind::kOp, &fn, name, sequence);
  }
  return nullptr;
}

void leave(const at::RecordFunction& fn, at::ObserverContext* context) {
  ThreadState& thread = Recorder::this_thread();
  if (fn.scope() == at::RecordScope::USER_SCOPE) {
    leave_annotation(thread, context);
    return;
  }
  leave_operator(fn);
}

}  // namespace

void leave_operator(const at::RecordFunction& fn) {
  ThreadState& thread = Recorder::this_thread();
  OwnTime own(thread);
  if (!Recorder::pop_untouched(thread, &fn, &at::sequence_number::peek)) {
    // It made nodes, or something happened in it.
    if (saved_tensors::program_has_hooks()) {
      forbid_quiet_passes();  // their unpacking runs in the backward
    }
    Recorder::get().pop(thread, &fn, at::sequence_number::peek());
  }
}

namespace {

// Hooks of the program may run anything as they unpack saved tensors. Where they are in use, the
// operators say so, or else the graph that is read (capture/graph.py).
bool knows_of_hooks() {
  return records_operators() ||
         (installed() && detail == Detail::kCategory && !saved_tensors::installed());
}

}  // namespace

QuietBackward::QuietBackward(bool is_possible)
    : quiet_(is_possible && knows_of_hooks() && at::isRecordFunctionEnabled() &&
             !more_than_nodes.load(std::memory_order_relaxed) &&
             !in_quiet_pass.load(std::memory_order_relaxed) && nobody_else_listens()) {
  if (quiet_) {
    ++quiet;
    in_quiet_pass.store(true);
    if (detail == Detail::kOp) {
      Recorder::get().ask_for_nodes(kQuietNodes);
    }
    at::enableRecordFunction(false);
  }
}

QuietBackward::~QuietBackward() {
  if (quiet_) {
    at::enableRecordFunction(true);
    if (Recorder::get().asks_for_nodes()) {
      Recorder::get().ask_for_no_nodes();
    }
    in_quiet_pass.store(false);
  }
}

ResumeRecordFunction::ResumeRecordFunction() : inside_(is_quiet_here()) {
  if (!inside_) {
    return;
  }
  forbid_quiet_passes();
  if (Recorder::get().asks_for_nodes()) {
    Node node = describe_quiet_node();
    node_ = std::move(node.name);
    Recorder::get().push_node(Recorder::this_thread(),
                              this,
                              node_.c_str(),
                              node.sequence,
                              node.forward_thread,
                              NodeKind::kPython);
  }
  at::enableRecordFunction(true);
}

ResumeRecordFunction::~ResumeRecordFunction() {
  if (inside_) {
    at::enableRecordFunction(false);
    Recorder::get().pop(Recorder::this_thread(), this);
  }
}

void allow_quiet_passes() {
  quiet = 0;
  more_than_nodes.store(false, std::memory_order_relaxed);
}

void forbid_quiet_passes() {
  more_than_nodes.store(true, std::memory_order_relaxed);
}

uint64_t quiet_passes() {
  return quiet;
}

void install(Detail with) {
  if (installed() && detail == with) {
    return;
  }
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

bool records_operators() {
  return installed() && detail == Detail::kOp;
}

bool installed() {
  return handle != at::INVALID_CALLBACK_HANDLE;
}

}  // namespace pytracer::ops
