#include "ops.h"

#include "../core/recorder.h"
#include "interceptors.h"
#include "node_names.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <cstring>
#include <memory>
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

bool has_prefix(const char* text, const char* prefix, size_t length) {
  return std::strncmp(text, prefix, length) == 0;
}

// This scope does not carry the node's number. The BACKWARD_FUNCTION scope would, but naming each
// node once more costs more than all the rest; the engine's own notion of "the current node" is
// set by now and says the same.
void enter_node(Recorder& recorder,
                ThreadState& thread,
                const at::RecordFunction& fn,
                const char* name) {
  auto node = torch::autograd::get_current_node();
  int64_t sequence = node ? static_cast<int64_t>(node->sequence_nr()) : -1;
  uint64_t forward_thread = node ? node->thread_id() : 0;
  recorder.push_node(thread, &fn, name, sequence, forward_thread, c10::GradMode::is_enabled());
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& fn) {
  Recorder& recorder = Recorder::get();
  ThreadState& thread = Recorder::this_thread();
  const char* name = fn.name();
  if (fn.scope() == at::RecordScope::USER_SCOPE) {
    bool optimizer = has_prefix(name, kOptimizerPrefix, sizeof(kOptimizerPrefix) - 1);
    recorder.push(thread, optimizer ? ScopeKind::kOptimizer : ScopeKind::kUser, &fn, name);
    if (optimizer) {
      interceptors::before_step();
    }
  } else if (name[0] == 'a' && name[1] == 'u' && has_prefix(name, kNodePrefix, kNodePrefixLength)) {
    enter_node(recorder, thread, fn, name + kNodePrefixLength);
  } else {
    recorder.push(thread, ScopeKind::kOp, &fn, name, fn.seqNr());
  }
  return nullptr;
}

void leave(const at::RecordFunction& fn, at::ObserverContext* /*context*/) {
  ThreadState& thread = Recorder::this_thread();
  if (!Recorder::pop_untouched(thread, &fn, &at::sequence_number::peek)) {
    Recorder::get().pop(thread, &fn, at::sequence_number::peek());
  }
}

}  // namespace

void install(Detail detail) {
  uninstall();
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
