#include "reads.h"

#include "../core/recorder.h"
#include "imagined.h"
#include "imagined_guard.h"
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
#include <optional>

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

// Torch asks through our function who listens to an operator.
std::atomic<bool> torch_asks_us{false};

// The outermost operator that runs now. The operators inside of it say nothing here, but torch's
// telling of them, with their arguments, costs 1,000 instructions each, and `multinomial` has 39.
// So inside of an operator of torch's our callback is left out of torch's answer to who listens,
// which leaves 130 instructions. To stop torch and to let it go on costs 1,500: that is done in an
// operator that had many others the last time. How many is remembered by its name's address.
class Outermost {
 public:
  void begin(const at::RecordFunction& fn) {
    if (record_ != nullptr) {
      return;  // inside an annotation in another operator
    }
    record_ = &fn;
    name_ = fn.name();
    inside_ = 0;
    if (std::strncmp(name_, "aten::", 6) != 0) {
      return;
    }
    uint64_t last = met().load(std::memory_order_relaxed);
    uint64_t inside = last >> kBits == word(0) >> kBits ? last & kMostInside : 0;
    if (inside >= many()) {
      enable(false);
    } else {
      leaves_out_ = torch_asks_us.load(std::memory_order_relaxed);
    }
  }

  void meet_another() { ++inside_; }

  // Whether our callback is to be left out for an operator that begins now.
  bool leaves_out() const { return leaves_out_; }

  void end(const at::RecordFunction& fn) {
    if (record_ != &fn) {
      return;
    }
    forget();
    if (enabled) {
      met().store(word(inside_), std::memory_order_relaxed);
    } else {
      enable(listening);
    }
  }

  void forget() {
    record_ = nullptr;
    leaves_out_ = false;
  }

 private:
  static constexpr int kBits = 16;  // addresses have 48
  static constexpr uint64_t kMostInside = (uint64_t{1} << kBits) - 1;

  // From so many inner operators on it is cheaper to stop torch. If operators are recorded, torch
  // tells of the inner ones in any case.
  static uint64_t many() {
    if (torch_asks_us.load(std::memory_order_relaxed)) {
      return ops::records_operators() ? kMostInside + 1 : 12;
    }
    return ops::records_operators() ? 8 : 3;
  }

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
  bool leaves_out_ = false;
};

PYTRACER_STATIC_TLS thread_local constinit Outermost outermost;

// A call of an outermost module that has few operators. Our callback is left out of torch's answer
// for each of them, since to stop torch costs as much as to do so 40 times.
class ShortCall {
 public:
  // False if an earlier call of this module had too many.
  bool begin(const void* module) {
    bool may_be = torch_asks_us.load(std::memory_order_relaxed) &&
                  long_at(module).load(std::memory_order_relaxed) != module;
    module_ = may_be ? module : nullptr;
    operators_ = 0;
    return may_be;
  }

  bool is_open() const { return module_ != nullptr; }

  // Counts an operator. Returns whether the call turns out to be long, which ends this.
  bool is_too_long() {
    if (++operators_ <= kMost) {
      return false;
    }
    long_at(module_).store(module_, std::memory_order_relaxed);
    module_ = nullptr;
    return true;
  }

  void end() { module_ = nullptr; }

 private:
  static constexpr uint32_t kMost = 40;

  // Modules of which a call was long, by their addresses. One that takes another's place here, or
  // its address, costs a little time.
  static std::atomic<const void*>& long_at(const void* module) {
    static std::array<std::atomic<const void*>, 256> modules;
    return modules[reinterpret_cast<uintptr_t>(module) / 16 % modules.size()];
  }

  const void* module_ = nullptr;
  uint32_t operators_ = 0;
};

PYTRACER_STATIC_TLS thread_local constinit ShortCall short_call;

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
  } else if (value.isList() && value.isTensorList()) {  // the first asks without a call
    for (const c10::IValue& one : value.toListRef()) {
      visit_one(one.toTensor());
    }
  }
}

bool has_graph(const at::RecordFunction& fn) {
  bool found = false;
  if (c10::GradMode::is_enabled()) {
    for (const c10::IValue& value : fn.inputs()) {
      each_tensor(value,
                  [&](const at::Tensor& tensor) { found = found || tensor.requires_grad(); });
    }
  }
  return found;
}

void note(const at::RecordFunction& fn, ThreadState& thread) {
  Recorder& recorder = Recorder::get();
  recorder.forget_reads(thread);
  bool used = has_graph(fn);
  if (used) {
    Recorder::mark(thread, kScopeGraph);
  }
  const Rows& numbers = rows();
  for (const c10::IValue& value : fn.inputs()) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.requires_grad()) {
        return;
      }
      if (used) {
        labels::adopt_cpu(tensor, /*also_known=*/false);
        labels::record(tensor, numbers.used);
      } else if (labels::Block block = labels::block_of(tensor); block.address != 0) {
        recorder.will_read(thread, block.place, block.address, numbers.read);
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

// Torch's answer, without our callback in it. It stays as it is if anybody else listens, who may
// want the arguments, too.
[[gnu::noinline]] std::optional<at::StepCallbacks> listeners_but_us(at::RecordScope scope) {
  std::optional<at::StepCallbacks> all = at::getStepCallbacksUnlessEmpty(scope);
  if (!all || scope != at::RecordScope::FUNCTION || all->callbacks_.back().start_ != &enter ||
      all->callbacks_.size() != (ops::records_operators() ? 2 : 1)) {
    return all;
  }
  if (!short_call.is_open()) {
    outermost.meet_another();
  } else if (short_call.is_too_long()) {
    enable(false);
  }
  if (all->callbacks_.size() == 1) {
    all.reset();
  } else {
    all->callbacks_.pop_back();
    all->needs_inputs_ = false;
  }
  return all;
}

// For every operator of the program, so it calls what it must and has no frame of its own.
std::optional<at::StepCallbacks> who_listens(at::RecordScope scope) {
  if (outermost.leaves_out() || short_call.is_open()) [[unlikely]] {
    return listeners_but_us(scope);
  }
  return at::getStepCallbacksUnlessEmpty(scope);
}

// The operators of a bare node have no rows of their own, so torch need not tell us of them. Ours
// is the only callback: see ops.cpp.
[[gnu::noinline]] std::optional<at::StepCallbacks> who_listens_in_node(at::RecordScope scope) {
  if (scope == at::RecordScope::FUNCTION && !c10::GradMode::is_enabled()) {
    return std::nullopt;
  }
  return who_listens(scope);
}

// The same where operators are recorded, and nodes with them.
std::optional<at::StepCallbacks> who_listens_outside_of_nodes(at::RecordScope scope) {
  if (this_thread_state != nullptr && this_thread_state->in_bare_node()) [[unlikely]] {
    return who_listens_in_node(scope);
  }
  return who_listens(scope);
}

}  // namespace

void leave_out_inner_operators(bool on) {
  private_torch::Listeners* entry = private_torch::listeners_entry();
  bool asks = on && entry != nullptr;
  torch_asks_us.store(asks, std::memory_order_relaxed);
  if (asks) {
    __atomic_store_n(entry,
                     ops::records_operators() ? &who_listens_outside_of_nodes : &who_listens,
                     __ATOMIC_RELEASE);
    return;
  }
  private_torch::Listeners now =
      entry != nullptr ? __atomic_load_n(entry, __ATOMIC_ACQUIRE) : nullptr;
  if (now == &who_listens || now == &who_listens_outside_of_nodes) {
    __atomic_store_n(entry,
                     static_cast<private_torch::Listeners>(&at::getStepCallbacksUnlessEmpty),
                     __ATOMIC_RELEASE);
  }
}

void listen() {
  // Inside a backward pass (a hook that steps, another pass) torch sets the thread's callbacks, and
  // puts back the earlier ones after it. Nor may a callback of ours hold gradients there.
  if (listening || torch::autograd::get_current_node()) {
    return;
  }
  listening = true;
  outermost.forget();
  short_call.end();
  if (handle == at::INVALID_CALLBACK_HANDLE) {
    handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&enter, &leave)
                                            .needsInputs(true)
                                            .scopes({at::RecordScope::FUNCTION}));
    enabled = true;
  } else {
    enable(true);
  }
}

void pause(const void* module) {
  bool had_paused = !listening && !short_call.is_open();
  short_call.end();
  if (had_paused) {
    return;
  }
  listening = false;
  outermost.forget();
  Recorder::get().forget_reads(Recorder::this_thread());
  if (module == nullptr || !short_call.begin(module)) {
    enable(false);
  }
}

void forget() {
  listening = false;
  enabled = false;
  outermost.forget();
  Recorder::get().forget_reads(Recorder::this_thread());
  short_call.end();
  if (handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(handle);
    handle = at::INVALID_CALLBACK_HANDLE;
  }
}

}  // namespace pytracer::reads
