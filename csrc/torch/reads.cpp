#include "reads.h"

#include "../core/recorder.h"
#include "labels.h"
#include "ops.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <memory>

namespace pytracer::reads {

namespace {

thread_local at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
thread_local bool listening = false;

// Rows of the label table, of one recording.
struct Rows {
  uint32_t generation = 0;
  uint32_t used = 0;
  uint32_t read = 0;
};

const Rows& rows() {
  static thread_local Rows found;
  Recorder& recorder = Recorder::get();
  if (found.generation != recorder.generation()) {
    auto row = [&](const char* role) {
      return recorder.labels.intern({labels::kUnknown, recorder.strings.intern(role), 0, 0, 0});
    };
    found = {recorder.generation(), row("used"), row("read")};
  }
  return found;
}

// Visits torch's own tensors only: to ask a subclass in Python would run Python.
template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  auto visit_one = [&](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.key_set().has(c10::DispatchKey::Python)) {
      visit(tensor);
    }
  };
  if (value.isTensor()) {
    visit_one(value.toTensor());
  } else if (value.isTensorList()) {
    for (const c10::IValue& one : value.toListRef()) {
      visit_one(one.toTensor());
    }
  }
}

bool has_graph(const at::RecordFunction& fn) {
  bool found = false;
  for (const c10::IValue& value : fn.inputs()) {
    each_tensor(value, [&](const at::Tensor& tensor) { found = found || tensor.requires_grad(); });
  }
  return found && c10::GradMode::is_enabled();
}

void note(const at::RecordFunction& fn, ThreadState& thread) {
  Recorder& recorder = Recorder::get();
  recorder.forget_reads(thread);
  bool used = has_graph(fn);
  for (const c10::IValue& value : fn.inputs()) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.requires_grad()) {
        return;
      }
      if (used) {
        labels::adopt_cpu(tensor, /*also_known=*/false);
        labels::record(tensor, rows().used);
      } else if (labels::Block block = labels::block_of(tensor); block.address != 0) {
        recorder.will_read(thread, block.place, block.address, rows().read);
      }
    });
  }
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& fn) {
  if (!recording.load(std::memory_order_relaxed)) {
    forget();
    return nullptr;
  }
  if (!listening) {
    return nullptr;  // another thread's callback, which came here with its work
  }
  ThreadState& thread = Recorder::this_thread();
  OwnTime own(thread);
  if (!ops::records_operators()) {
    if (thread.in_op()) {
      return nullptr;  // the outermost operator is enough
    }
    Recorder::get().push(thread, ScopeKind::kOp, &fn, fn.name(), fn.seqNr());
  }
  if (thread.in_outermost_op()) {
    note(fn, thread);
  }
  return nullptr;
}

void leave(const at::RecordFunction& fn, at::ObserverContext* /*none*/) {
  if (!ops::records_operators() && Recorder::this_thread().is_in(&fn)) {
    ops::leave_operator(fn);
  }
}

}  // namespace

void listen() {
  // Inside a backward pass (a hook that steps, another pass) torch sets the thread's callbacks, and
  // puts back the earlier ones after it. Nor may a callback of ours hold gradients there.
  if (listening || torch::autograd::get_current_node()) {
    return;
  }
  listening = true;
  if (handle == at::INVALID_CALLBACK_HANDLE) {
    handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&enter, &leave)
                                            .needsInputs(true)
                                            .scopes({at::RecordScope::FUNCTION}));
  } else {
    at::reenableCallback(handle);
  }
}

void pause() {
  if (listening) {
    listening = false;
    at::disableCallback(handle);
    Recorder::get().forget_reads(Recorder::this_thread());
  }
}

void forget() {
  listening = false;
  if (handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(handle);
    handle = at::INVALID_CALLBACK_HANDLE;
  }
}

}  // namespace pytracer::reads
