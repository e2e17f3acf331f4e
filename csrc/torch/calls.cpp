#include "calls.h"

#include "../core/recorder.h"
#include "../core/steps.h"
#include "devices.h"
#include "exchange.h"
#include "frame_locals.h"
#include "gradients.h"
#include "graph.h"
#include "imagined_guard.h"
#include "look.h"
#include "moments.h"
#include "ops.h"
#include "private_torch.h"
#include "quietly.h"
#include "reads.h"
#include "session.h"
#include "step_counters.h"

#include <pybind11/pybind11.h>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace pytracer::calls {

namespace {

// All guarded by the GIL.
unsigned long backward_thread = 0;  // the thread that runs backward passes; 0: none yet
constexpr unsigned long kSeveral = ~0UL;
bool marking_modules = false;
// The number of the thread's next node when its last backward pass or step was over.
thread_local uint64_t nodes_before = 0;
bool made_a_graph = false;  // a backward pass of this step did: a later one may go through it

PyObject* module_call(PyObject* function, PyObject* const* args, size_t flags, PyObject* names);
PyObject* engine_call(PyObject* self, PyObject* args, PyObject* kwargs);
PyObject* annotation_begins(PyObject* function,
                            PyObject* const* args,
                            size_t flags,
                            PyObject* names);

FunctionExchange module_calls(&module_call);
MethodExchange engine_calls(&engine_call);
FunctionExchange annotations(&annotation_begins);
PyObject* annotation_class = nullptr;
int beginning_steps = 0;  // whose records have not begun

// Names of modules by their address, valid in one recording and for as long as the module lives.
struct ModuleNames {
  struct Known {
    uint32_t name;
    py::object reference;  // weak; its callback removes this entry
  };

  uint32_t generation = 0;
  ska::flat_hash_map<uintptr_t, Known> known;  // each call looks here: in one line of the cache
};

ModuleNames& module_names() {
  static auto* const names = new ModuleNames;
  if (names->generation != Recorder::get().generation()) {
    names->generation = Recorder::get().generation();
    names->known.clear();
  }
  return *names;
}

// A module has died: its address, `self`, may become another's.
PyObject* forget_module(PyObject* self, PyObject* /*reference*/) {
  module_names().known.erase(PyLong_AsSize_t(self));
  Py_RETURN_NONE;
}

PyMethodDef forget_definition{"forget_module", &forget_module, METH_O, nullptr};

py::object reference_to(PyObject* module) {
  auto address =
      py::reinterpret_steal<py::object>(PyLong_FromSize_t(reinterpret_cast<uintptr_t>(module)));
  auto forget =
      py::reinterpret_steal<py::object>(PyCFunction_New(&forget_definition, address.ptr()));
  auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(module, forget.ptr()));
  PyErr_Clear();
  return reference;
}

// Whether torch.compile, torch.export or make_fx runs modules and passes only to trace them.
// Nothing is computed then. An imagined run computes nothing either, but is to be recorded.
bool is_only_looked_at() {
  if (imagined::is_imagining()) {
    return false;
  }
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Key = c10::impl::TorchDispatchModeKey;
  return Modes::any_modes_set() && (Modes::get_mode(Key::FAKE) || Modes::get_mode(Key::PROXY) ||
                                    Modes::get_mode(Key::FUNCTIONAL));
}

// False if it leaves an exception set that the program must see.
bool name_of(PyObject* module, uint32_t& name) {
  auto& known = module_names().known;
  if (auto it = known.find(reinterpret_cast<uintptr_t>(module)); it != known.end()) {
    name = it->second.name;
    return true;
  }
  name = 0;
  PyObject* text = nullptr;
  if (!quietly::call(moments::listeners().name_of_module.ptr(), &module, 1, &text)) {
    return false;
  }
  const char* utf8 = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
  if (utf8 != nullptr) {
    name = Recorder::get().strings.intern(utf8);
  } else {
    PyErr_Clear();
  }
  Py_XDECREF(text);
  if (py::object reference = reference_to(module)) {
    ModuleNames::Known entry{name, std::move(reference)};
    module_names().known[reinterpret_cast<uintptr_t>(module)] = std::move(entry);
  }
  return true;
}

// Times our work at a moment. `What` is another type for each kind of moment.
template <class What>
bool timed(Moments& moments, What what) {
  static auto* const kind = new quietly::Kind;
  quietly::Timed timed(*kind);
  return what(moments);
}

// False if it leaves an exception set that the program must see.
template <class What>
bool at_moment(What what) {
  std::shared_ptr<Moments> moments = moments::current();
  if (!moments) {
    return true;
  }
  sessions::AtMoment around;
  try {
    return timed(*moments, what);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return quietly::after_exception();
}

// Closes the frame however the call ends, KeyboardInterrupt and thread exit included.
class OpenFrame {
 public:
  OpenFrame(ScopeKind kind, const char* name, uint32_t name_id) : thread_(Recorder::this_thread()) {
    Recorder::get().push(thread_, kind, this, name, -1, name_id);
  }

  ~OpenFrame() { Recorder::get().pop(thread_, this); }

  OpenFrame(const OpenFrame&) = delete;  // its address is the frame's key
  OpenFrame& operator=(const OpenFrame&) = delete;

 private:
  ThreadState& thread_;
};

// Opens a record of a module's call for torch's profilers. Its scope is one that eager torch never
// uses: so profilers do not take it for an operator or an annotation, and our callbacks do not get
// it.
class Mark {
 public:
  explicit Mark(uint32_t name) : function_(at::RecordScope::STATIC_RUNTIME_MODEL) {
    if (function_.isActive()) {
      function_.before(Recorder::get().strings.at(name));
    }
  }

 private:
  at::RecordFunction function_;
};

// 0 if operators are recorded: they have these flags themselves.
uint8_t modes() {
  if (ops::records_operators()) {
    return 0;
  }
  // Autocast is on for a device if its key is not excluded.
  c10::DispatchKeySet excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  bool casts = !excluded.has_all(devices::kAutocastKeys);
  return (c10::GradMode::is_enabled() ? kScopeGrad : 0) | (casts ? kScopeAutocast : 0);
}

// args[0] is the module.
PyObject* module_call(PyObject* function, PyObject* const* args, size_t flags, PyObject* names) {
  auto forward = [&] { return module_calls.original()(function, args, flags, names); };
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (!recording.load(std::memory_order_relaxed) || count == 0 || is_only_looked_at()) {
    return forward();
  }
  ops::ResumeRecordFunction resumed;
  uint32_t name = 0;
  if (!name_of(args[0], name)) {
    return nullptr;
  }
  bool root = Recorder::this_thread().outside_of_modules();
  if (root) {
    reads::pause(args[0]);
    if (!at_moment(
            [&](Moments& now) { return now.before_root(args[0], args + 1, count - 1, names); })) {
      return nullptr;
    }
  }
  PyObject* result = nullptr;
  {
    OpenFrame frame(ScopeKind::kModule, "", name);
    Recorder::mark(Recorder::this_thread(), modes());
    if (root) {
      Recorder::get().open_current(Recorder::this_thread());
    }
    std::optional<Mark> mark;
    if (marking_modules) {
      mark.emplace(name);
    }
    result = forward();
  }
  if (root && result != nullptr && !at_moment([](Moments& now) { return now.after_root(); })) {
    Py_CLEAR(result);
  }
  if (root) {
    reads::listen();
  }
  return result;
}

// One of `run_backward(tensors, grad_tensors, keep_graph, create_graph, ...)`. Borrowed, or null.
PyObject* argument(PyObject* args, PyObject* kwargs, Py_ssize_t position, const char* name) {
  if (PyTuple_GET_SIZE(args) > position) {
    return PyTuple_GET_ITEM(args, position);
  }
  return kwargs != nullptr ? PyDict_GetItemString(kwargs, name) : nullptr;
}

bool makes_a_graph(PyObject* args, PyObject* kwargs) {
  return argument(args, kwargs, 3, "create_graph") != Py_False;
}

// Whether the pass makes a graph of its own, or Python compiles it as a whole.
bool may_run_more_than_nodes(PyObject* args, PyObject* kwargs) {
  if (makes_a_graph(args, kwargs)) {
    return true;
  }
  return private_torch::compiles_backward();
}

// Whether a pass over such a graph runs only torch's own code.
bool runs_no_python(const graph::Look& look) {
  std::shared_ptr<Moments> now = look.is_reduced ? moments::current() : nullptr;
  return look.is_plain && (!look.is_reduced || (now && now->reducers_run_no_python()));
}

PyObject* engine_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  auto forward = [&] { return engine_calls.original()(self, args, kwargs); };
  if (!recording.load(std::memory_order_relaxed) || is_only_looked_at()) {
    return forward();
  }
  ops::ResumeRecordFunction resumed;
  ThreadState& thread = Recorder::this_thread();
  bool outermost = !thread.inside_node() && !torch::autograd::get_current_node();
  if (outermost && backward_thread != PyThread_get_thread_ident()) {
    backward_thread = backward_thread == 0 ? PyThread_get_thread_ident() : kSeveral;
  }
  PyObject* outputs = argument(args, kwargs, 0, "tensors");
  outermost = outermost && outputs != nullptr;
  graph::Look look;
  if (outermost) {
    // Not only paused: the engine copies the thread's callbacks for each node, which costs 150
    // instructions even if they are disabled.
    reads::forget();
    look = graph::look_at(outputs, ops::records_operators() ? UINT64_MAX : nodes_before);
    // Without operators, only the graph tells what a backward pass made for a later one.
    bool must_be_read = made_a_graph && !ops::records_operators();
    if (!at_moment([&](Moments& now) {
          return now.before_backward(outputs, look.structure, must_be_read);
        })) {
      return nullptr;
    }
    made_a_graph = made_a_graph || makes_a_graph(args, kwargs);
  }
  PyObject* result = nullptr;
  {
    OpenFrame frame(ScopeKind::kBackward, "backward", 0);
    if (!ops::records_operators()) {
      Recorder::mark_forward(thread, look.first_number, at::RecordFunction::currentThreadId());
    }
    Recorder::get().open_current(thread);
    bool may_be_quiet = runs_no_python(look) && backward_thread != kSeveral &&
                        !may_run_more_than_nodes(args, kwargs);
    ops::QuietBackward quiet(may_be_quiet);
    gradients::Watch watch(look.may_drop_gradients);
    result = forward();
  }
  nodes_before = at::sequence_number::peek();
  if (outermost && result != nullptr &&
      !at_moment([](Moments& now) { return now.after_backward(); })) {
    Py_CLEAR(result);
  }
  if (outermost && !thread.inside_step()) {
    reads::listen();
  }
  return result;
}

// ------------------------------------------------------------------ optimizers

// The optimizer whose step begins or ends now: torch's wrapper is a few frames further up.
py::object stepping_optimizer() {
  py::object found = py::none();
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int i = 0; i < 12 && frame != nullptr && found.is_none(); ++i) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (private_torch::is_step_wrapper(code)) {
      if (PyObject* optimizer = frame_locals::one(frame, "self")) {
        found = py::reinterpret_steal<py::object>(optimizer);
      }
    }
    Py_DECREF(code);
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  return found;
}

// Counts training steps, whether or not anything records.
class Steps {
 public:
  // The number among the optimizers that are alive and have stepped, from 1 on. Numbers of dead
  // optimizers are free.
  uint64_t number_of(PyObject* optimizer) {
    size_t free = optimizers_.size();
    for (size_t i = optimizers_.size(); i > 0; --i) {
      auto found = py::reinterpret_steal<py::object>(look::referred_to(optimizers_[i - 1].ptr()));
      if (found.ptr() == optimizer) {
        return i;
      }
      if (!found) {
        free = i - 1;
        iterations_.forget(i);
      }
    }
    is_counted_ = is_counted_ && iterations_.has_begun();
    auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(optimizer, nullptr));
    if (!reference) {
      PyErr_Clear();
      return 0;
    }
    optimizers_.resize(std::max(optimizers_.size(), free + 1));
    optimizers_[free] = std::move(reference);
    return free + 1;
  }

  // How many iterations have ended, now that this optimizer has stepped. In the first iteration
  // another optimizer may still follow; until then the first one counts as the only one.
  int ended_by(uint64_t optimizer) {
    int ended = 0;
    if (iterations_.stepped(optimizer, true)) {
      ended += is_counted_ ? 0 : 1;
      is_counted_ = false;
    }
    bool is_over = iterations_.is_over();
    if (!is_counted_ && (is_over || iterations_.is_first())) {
      ++ended;
      is_counted_ = true;
    }
    if (is_over) {
      iterations_.close();
      is_counted_ = false;
    }
    return ended;
  }

 private:
  std::vector<py::object> optimizers_;  // weak references
  Iterations iterations_;
  bool is_counted_ = false;  // this iteration is
};

Steps& steps() {
  static auto* const all = new Steps;
  return *all;
}

const void* handled_exception() {
  PyObject *type, *value, *traceback;
  PyErr_GetExcInfo(&type, &value, &traceback);
  const void* identity = value;
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return identity;
}

// Like py::gil_scoped_acquire, which spends thousands of instructions to find the thread's state.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}

  ~WithGil() { PyGILState_Release(state_); }

  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// No exception can pass through here: the program gets its exception a moment later.
template <class What>
void at_step_moment(What what) {
  if (!at_moment(what)) {
    quietly::raise_later();
  }
}

bool is_step(PyObject* annotation) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(annotation)) != annotation_class) {
    return false;  // a class of the program's has code of its own
  }
  py::object name = py::reinterpret_steal<py::object>(PyObject_GetAttrString(annotation, "name"));
  const char* text = name && PyUnicode_Check(name.ptr()) ? PyUnicode_AsUTF8(name.ptr()) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  return std::string_view(text).starts_with(private_torch::kOptimizerPrefix);
}

// args[0] is the annotation.
PyObject* annotation_begins(PyObject* function,
                            PyObject* const* args,
                            size_t flags,
                            PyObject* names) {
  bool begins = annotations.is_put() && PyVectorcall_NARGS(flags) > 0 && is_step(args[0]);
  if (begins) {
    ++beginning_steps;
    ops::install(ops::Detail::kSteps);
  }
  PyObject* result = annotations.original()(function, args, flags, names);
  beginning_steps -= begins ? 1 : 0;
  return result;
}

}  // namespace

bool await_steps(bool on) {
  if (!on) {
    annotations.take_away();
    return false;
  }
  annotation_class = private_torch::annotation_class().ptr();
  return annotations.put(private_torch::enter_annotation().ptr());
}

void rest_between_steps() {
  if (!Py_IsInitialized()) {
    return;
  }
  WithGil locked;
  if (annotations.is_put() && beginning_steps == 0) {
    ops::uninstall();
  }
}

uint64_t Step::meet() {
  if (!Py_IsInitialized()) {
    return 0;
  }
  WithGil locked;
  optimizer_ = stepping_optimizer().release().ptr();
  number_ = optimizer_ == Py_None ? 0 : steps().number_of(optimizer_);
  return number_;
}

void Step::begin() {
  if (optimizer_ == nullptr || !Py_IsInitialized()) {
    return;
  }
  WithGil locked;
  reads::pause();
  made_a_graph = false;
  handled_ = handled_exception();
  if (recording.load(std::memory_order_relaxed)) {
    at_step_moment([this](Moments& now) { return now.before_step(optimizer_); });
  }
}

void Step::end() {
  if (optimizer_ == nullptr || !Py_IsInitialized()) {
    return;
  }
  WithGil locked;
  if (recording.load(std::memory_order_relaxed)) {
    reads::listen();
  }
  nodes_before = at::sequence_number::peek();
  auto optimizer = py::reinterpret_steal<py::object>(std::exchange(optimizer_, nullptr));
  if (handled_exception() != handled_) {
    return;  // an exception ended the step
  }
  if (recording.load(std::memory_order_relaxed)) {
    at_step_moment([&](Moments& now) { return now.after_step(optimizer.ptr()); });
  }
  for (int ended = steps().ended_by(number_); ended > 0; --ended) {
    step_counters::step_ended();
  }
}

Step::~Step() {
  if (optimizer_ != nullptr && Py_IsInitialized()) {
    WithGil locked;
    Py_DECREF(optimizer_);
  }
}

void step_counter_removed() {
  if (!step_counters::are_there() && !recording.load(std::memory_order_relaxed)) {
    steps() = {};
  }
}

const char* install() {
  if (!module_calls.put(private_torch::call_impl().ptr())) {
    return "torch.nn.Module._call_impl is not a function here, so modules cannot be seen";
  }
  if (!engine_calls.put(private_torch::run_backward().ptr())) {
    return "torch's engine has changed, so backward passes cannot be seen";
  }
  return "";
}

void uninstall() {
  module_calls.take_away();
  engine_calls.take_away();
}

bool installed() {
  return module_calls.is_put() || engine_calls.is_put();
}

void begin_recording() {
  backward_thread = 0;
  made_a_graph = false;
  ops::allow_quiet_passes();
}

void end_recording() {
  module_names().known.clear();
  if (!step_counters::are_there()) {
    steps() = {};
  }
}

void mark_modules(bool on) {
  marking_modules = on;
}

bool may_read_gradients() {
  return backward_thread == 0 || backward_thread == PyThread_get_thread_ident();
}

}  // namespace pytracer::calls
