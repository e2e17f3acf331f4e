#include "reads.h"

#include "../core/recorder.h"
#include "imagined.h"
#include "labels.h"
#include "ops.h"
#include "private_torch.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>

namespace pytracer::reads {

namespace {

PYTRACER_STATIC_TLS thread_local constinit at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
PYTRACER_STATIC_TLS thread_local constinit bool listening = false;
// Torch calls back: while we listen, but see Outermost.
PYTRACER_STATIC_TLS thread_local constinit bool enabled = false;

void enable(bool on) {
  if (enabled != on) {
    enabled = on;
    on ? at::reenableCallback(handle) : at::disableCallback(handle);
  }
}

// The outermost operator that runs now. The operators inside of it say nothing here, but torch's
// telling of them, with their arguments, costs 1,000 instructions each, and `multinomial` has 39.
// To stop torch and to let it go on costs 1,600. So inside of an operator of torch's that had more
// than a few the last time, torch is stopped. How many it had is remembered by its name's address.
class Outermost {
 public:
  void begin(const at::RecordFunction& fn) {
    if (record_ != nullptr) {
      return;  // inside an annotation in another operator
    }
    record_ = &fn;
    name_ = fn.name();
    inside_ = 0;
    uint64_t last = met().load(std::memory_order_relaxed);
    uint64_t inside = last >> kBits == word(0) >> kBits ? last & kMostInside : 0;
    uint64_t many = ops::records_operators() ? 8 : 3;  // ops.h hears of them in any case
    if (inside >= many && std::strncmp(name_, "aten::", 6) == 0) {
      enable(false);
    }
  }

  void meet_another() { ++inside_; }

  void end(const at::RecordFunction& fn) {
    if (record_ != &fn) {
      return;
    }
    record_ = nullptr;
    if (enabled) {
      met().store(word(inside_), std::memory_order_relaxed);
    } else {
      enable(listening);
    }
  }

  void forget() { record_ = nullptr; }

 private:
  static constexpr int kBits = 16;  // addresses have 48
  static constexpr uint64_t kMostInside = (uint64_t{1} << kBits) - 1;

  // The operator's name with how many were inside of it.
  uint64_t word(uint64_t inside) const {
    return reinterpret_cast<uint64_t>(name_) << kBits | std::min(inside, kMostInside);
  }

  // What was met the last time, by any thread.
  std::atomic<uint64_t>& met() const {
    static std::array<std::atomic<uint64_t>, 256> words;
    return words[reinterpret_cast<uintptr_t>(name_) / 16 % words.size()];
  }

  const at::RecordFunction* record_ = nullptr;
  const char* name_ = nullptr;
  uint64_t inside_ = 0;
};

PYTRACER_STATIC_TLS thread_local constinit Outermost outermost;

// Rows of the label table, of one recording.
struct Rows {
  uint32_t generation = 0;
  uint32_t used = 0;
  uint32_t read = 0;
};

const Rows& rows() {
  PYTRACER_STATIC_TLS static thread_local constinit Rows found;
  Recorder& recorder = Recorder::get();
  if (found.generation != recorder.generation()) {
    auto row = [&](const char* role) {
      return recorder.labels.intern({labels::kUnknown, recorder.strings.intern(role), 0, 0, 0});
    };
    found = {recorder.generation(), row("used"), row("read")};
  }
  return found;
}

// Whether it is torch's own tensor, or an imagined one: to ask another subclass would run Python.
bool can_be_asked(const at::Tensor& tensor) {
  if (!tensor.key_set().has(c10::DispatchKey::Python)) {
    return true;
  }
  return imagined::is_imagining() && tensor.has_storage() &&
         imagined::block_of(private_torch::data_of(tensor)).address != 0;
}

template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  auto visit_one = [&](const at::Tensor& tensor) {
    if (tensor.defined() && can_be_asked(tensor)) {
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
      outermost.meet_another();
      return nullptr;  // the outermost operator is enough
    }
    Recorder::get().push(thread, ScopeKind::kOp, &fn, fn.name(), fn.seqNr());
  }
  if (thread.in_outermost_op()) {
    note(fn, thread);
    outermost.begin(fn);
  } else {
    outermost.meet_another();
  }
  return nullptr;
}

void leave(const at::RecordFunction& fn, at::ObserverContext* /*none*/) {
  if (!ops::records_operators() && Recorder::this_thread().is_in(&fn)) {
    ops::leave_operator(fn);
  }
  outermost.end(fn);
}

}  // namespace

void listen() {
  // Inside a backward pass (a hook that steps, another pass) torch sets the thread's callbacks, and
  // puts back the earlier ones after it. Nor may a callback of ours hold gradients there.
  if (listening || torch::autograd::get_current_node()) {
    return;
  }
  listening = true;
  outermost.forget();
  if (handle == at::INVALID_CALLBACK_HANDLE) {
    handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&enter, &leave)
                                            .needsInputs(true)
                                            .scopes({at::RecordScope::FUNCTION}));
    enabled = true;
  } else {
    enable(true);
  }
}

void pause() {
  if (listening) {
    listening = false;
    outermost.forget();
    enable(false);
    Recorder::get().forget_reads(Recorder::this_thread());
  }
}

void forget() {
  listening = false;
  enabled = false;
  outermost.forget();
  if (handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(handle);
    handle = at::INVALID_CALLBACK_HANDLE;
  }
}

}  // namespace pytracer::reads
