#include "ops.h"

#include "../core/recorder.h"
#include "interceptors.h"
#include "node_names.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <atomic>
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
bool hear_helpers = false;

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

// Whether the operator computes rather than being written in terms of other operators: what it
// calls are then its own helpers, views and buffers, of which no row would be kept.
bool computes(const at::RecordFunction& fn) {
  auto name = fn.operator_name();
  auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  return op && !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

// The same, found once per operator: the names of torch's own stay where they are.
bool is_known_to_compute(const at::RecordFunction& fn, const char* name) {
  constexpr uintptr_t kComputes = 1;
  static std::array<std::atomic<uintptr_t>, 2048> known{};
  auto address = reinterpret_cast<uintptr_t>(name);
  std::atomic<uintptr_t>& slot = known[(address >> 4) % known.size()];
  uintptr_t found = slot.load(std::memory_order_relaxed);
  if ((found & ~kComputes) != address) {
    found = address | (computes(fn) ? kComputes : 0);
    slot.store(found, std::memory_order_relaxed);
  }
  return (found & kComputes) != 0;
}

// Another observer wants to hear of every operator.
bool nobody_else_listens() {
  return at::getStepCallbacks(at::RecordScope::FUNCTION).callbacks_.size() == 1;
}

// The helpers of an operator need not be told of at all: torch spends more on telling than we on
// hearing, and they are half of all operators.
void silence_helpers(ThreadState& thread, const at::RecordFunction& fn, const char* name) {
  if (!hear_helpers && std::strncmp(name, "aten::", 6) == 0 && is_known_to_compute(fn, name) &&
      nobody_else_listens()) {
    thread.silenced_by = &fn;
    at::enableRecordFunction(false);
  }
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
    silence_helpers(thread, fn, name);
  }
  return nullptr;
}

void leave(const at::RecordFunction& fn, at::ObserverContext* /*context*/) {
  ThreadState& thread = Recorder::this_thread();
  if (thread.silenced_by == &fn) {
    thread.silenced_by = nullptr;
    at::enableRecordFunction(true);
  }
  if (!Recorder::pop_untouched(thread, &fn, &at::sequence_number::peek)) {
    Recorder::get().pop(thread, &fn, at::sequence_number::peek());
  }
}

}  // namespace

void install(Detail detail, bool with_helpers) {
  uninstall();
  hear_helpers = with_helpers;
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
