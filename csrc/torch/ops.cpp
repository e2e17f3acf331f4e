#include "ops.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <memory>
#include <unordered_set>
#include <utility>

#include "../core/recorder.h"

namespace pytracer::ops {

namespace {

// The engine opens a FUNCTION scope of this name around each node *and* around the release of
// what the node had saved; torch's BACKWARD_FUNCTION scope inside it covers only the node's call.
constexpr char kNodePrefix[] = "autograd::engine::evaluate_function: ";
constexpr size_t kNodePrefixLength = sizeof(kNodePrefix) - 1;
constexpr char kOptimizerPrefix[] = "Optimizer.step#";

at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
at::CallbackHandle node_handle = at::INVALID_CALLBACK_HANDLE;

bool has_prefix(const char* text, const char* prefix, size_t length) {
  return std::strncmp(text, prefix, length) == 0;
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& fn) {
  Recorder& recorder = Recorder::get();
  ThreadState& thread = Recorder::this_thread();
  const char* name = fn.name();
  if (fn.scope() == at::RecordScope::USER_SCOPE) {
    bool optimizer = has_prefix(name, kOptimizerPrefix, sizeof(kOptimizerPrefix) - 1);
    recorder.push(thread, optimizer ? ScopeKind::kOptimizer : ScopeKind::kUser, &fn, name);
  } else if (name[0] == 'a' && name[1] == 'u' && has_prefix(name, kNodePrefix, kNodePrefixLength)) {
    recorder.push_node(thread,
                       &fn,
                       name + kNodePrefixLength,
                       fn.seqNr(),
                       c10::GradMode::is_enabled());
  } else {
    recorder.push(thread, ScopeKind::kOp, &fn, name, fn.seqNr());
  }
  return nullptr;
}

void leave(const at::RecordFunction& fn, at::ObserverContext* /*context*/) {
  Recorder::get().pop(Recorder::this_thread(), &fn, at::sequence_number::peek());
}

// Inside the scope that made the node's frame; only this one knows the thread.
std::unique_ptr<at::ObserverContext> enter_node(const at::RecordFunction& fn) {
  Recorder::get().identify_node(Recorder::this_thread(), fn.seqNr(), fn.forwardThreadId());
  return nullptr;
}

void remove(at::CallbackHandle& installed) {
  if (installed != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(installed);
    installed = at::INVALID_CALLBACK_HANDLE;
  }
}

}  // namespace

void install(Detail detail) {
  uninstall();
  Recorder::get().torch_thread_id.store(&at::RecordFunction::currentThreadId);
  std::unordered_set<at::RecordScope> scopes{at::RecordScope::USER_SCOPE};
  if (detail == Detail::kOp) {
    scopes.insert(at::RecordScope::FUNCTION);
  }
  handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&enter, &leave).scopes(std::move(scopes)));
}

void before_backward() {
  if (installed() && node_handle == at::INVALID_CALLBACK_HANDLE &&
      Recorder::get().several_forward_threads()) {
    node_handle = at::addGlobalCallback(
        at::RecordFunctionCallback(&enter_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  }
}

void uninstall() {
  remove(handle);
  remove(node_handle);
}

bool installed() { return handle != at::INVALID_CALLBACK_HANDLE; }

}  // namespace pytracer::ops
