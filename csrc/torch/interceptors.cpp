#include "interceptors.h"

#include "../core/recorder.h"
#include "ops.h"

#include <pybind11/pybind11.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>
#include <optional>
#include <structmember.h>
#include <unordered_map>

namespace pytracer::interceptors {

namespace {

// All guarded by the GIL.
Callbacks callbacks{};
uint64_t errors = 0;
unsigned long backward_thread = 0;  // which runs backward passes; 0: none yet
constexpr unsigned long kSeveral = ~0UL;
bool marking_modules = false;

std::unordered_map<const PyObject*, uint32_t>& module_names() {
  static auto* const names = new std::unordered_map<const PyObject*, uint32_t>;
  return *names;
}

// Dynamo's switch for the calling thread: set_eval_frame(callback) -> the callback before.
PyObject* set_eval_frame(PyObject* callback) {
  static PyObject* const function = [] {
    PyObject* module = PyImport_ImportModule("torch._C._dynamo.eval_frame");
    PyObject* found =
        module != nullptr ? PyObject_GetAttrString(module, "set_eval_frame") : nullptr;
    Py_XDECREF(module);
    PyErr_Clear();
    return found;
  }();
  PyObject* before = function != nullptr ? PyObject_CallOneArg(function, callback) : nullptr;
  PyErr_Clear();
  return before;
}

// What ours ask of tensors (a shape, a gradient) neither reaches the program's __torch_function__
// nor becomes part of a graph that torch.jit.trace records, and Dynamo, which compiles whatever
// Python runs between two graphs, does not compile ours.
class Unheard {
 public:
  Unheard()
      : functions_(at::impl::PythonTorchFunctionTLS::get_disabled_state()),
        tracing_(may_stop_tracing() ? torch::jit::tracer::getTracingState() : nullptr),
        compiler_(set_eval_frame(Py_None)) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    if (tracing_) {
      torch::jit::tracer::setTracingState(nullptr);
    }
  }

  // An exception may be on its way.
  ~Unheard() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(functions_);
    if (tracing_) {
      torch::jit::tracer::setTracingState(std::move(tracing_));
    }
    if (compiler_ != nullptr && compiler_ != Py_None) {
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);
      Py_XDECREF(set_eval_frame(compiler_));
      PyErr_Restore(type, value, traceback);
    }
    Py_XDECREF(compiler_);
  }

  Unheard(const Unheard&) = delete;
  Unheard& operator=(const Unheard&) = delete;

 private:
  // Inside of an operator torch refuses to.
  static bool may_stop_tracing() {
    return !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Tracer);
  }

  at::impl::TorchFunctionDisabledState functions_;
  std::shared_ptr<torch::jit::tracer::TracingState> tracing_;
  PyObject* compiler_;
};

// Calls back without disturbing the program: what goes wrong in ours is counted and forgotten.
// False for what came from outside meanwhile, which is the program's to see: Ctrl-C, an exit.
bool call_quietly(PyObject* callback,
                  PyObject* const* args,
                  size_t count,
                  PyObject** result = nullptr) {
  Unheard unheard;
  uint64_t begin = ticks_now();
  PyObject* returned = PyObject_Vectorcall(callback, args, count, nullptr);
  OwnTime::add(ticks_now() - begin);
  if (returned == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
      return false;
    }
    ++errors;
    PyErr_Clear();
  }
  if (result != nullptr) {
    *result = returned;
  } else {
    Py_XDECREF(returned);
  }
  return true;
}

// False as above.
bool name_of(PyObject* module, uint32_t& name) {
  auto known = module_names().find(module);
  if (known != module_names().end()) {
    name = known->second;
    return true;
  }
  name = 0;
  if (callbacks.name_of_module != nullptr) {
    PyObject* text = nullptr;
    if (!call_quietly(callbacks.name_of_module, &module, 1, &text)) {
      return false;
    }
    const char* utf8 = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
    if (utf8 != nullptr) {
      name = Recorder::get().strings.intern(utf8);
    } else {
      PyErr_Clear();
    }
    Py_XDECREF(text);
  }
  module_names()[module] = name;
  return true;
}

// Root-module callbacks see what a Python function would: a tuple and a dict.
bool tell_root(PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  PyObject* tuple = PyTuple_New(count);
  PyObject* dict = PyDict_New();
  bool go_on = true;
  if (tuple != nullptr && dict != nullptr) {
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    }
    Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyDict_SetItem(dict, PyTuple_GET_ITEM(names, i), args[count + i]);
    }
    std::array<PyObject*, 3> call{module, tuple, dict};
    go_on = call_quietly(callbacks.before_root, call.data(), call.size());
  } else {
    PyErr_Clear();
  }
  Py_XDECREF(tuple);
  Py_XDECREF(dict);
  return go_on;
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

// A module's call as torch's profilers record it. The scope is one that eager torch never uses, so
// they cannot take it for an operator or an annotation, and our own callbacks do not hear it.
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

struct StandIn {
  PyObject_HEAD vectorcallfunc call;
  PyObject* original;
};

PyObject* original_of(PyObject* self) {
  return reinterpret_cast<StandIn*>(self)->original;
}

// args[0] is the module.
PyObject* module_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  auto forward = [&] { return PyObject_Vectorcall(original_of(self), args, flags, names); };
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (!recording.load(std::memory_order_relaxed) || count == 0) {
    return forward();
  }
  ops::Heard heard;
  uint32_t name = 0;
  if (!name_of(args[0], name)) {
    return nullptr;
  }
  bool root = Recorder::this_thread().outside_of_modules();
  if (root && callbacks.before_root != nullptr && !tell_root(args[0], args + 1, count - 1, names)) {
    return nullptr;
  }
  PyObject* result = nullptr;
  {
    OpenFrame frame(ScopeKind::kModule, "", name);
    if (root) {
      Recorder::get().open_current(Recorder::this_thread());
    }
    std::optional<Mark> mark;
    if (marking_modules) {
      mark.emplace(name);
    }
    result = forward();
  }
  if (root && callbacks.after_root != nullptr && result != nullptr &&
      !call_quietly(callbacks.after_root, nullptr, 0)) {
    Py_CLEAR(result);
  }
  return result;
}

// `_engine_run_backward(outputs, gradients, retain_graph, create_graph, ...)`
bool may_make_graph(PyObject* const* args, Py_ssize_t count) {
  return count < 4 || args[3] != Py_False;
}

// args[0] is the outputs.
PyObject* engine_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  auto forward = [&] { return PyObject_Vectorcall(original_of(self), args, flags, names); };
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (!recording.load(std::memory_order_relaxed)) {
    return forward();
  }
  ops::Heard heard;
  ThreadState& thread = Recorder::this_thread();
  bool outermost = !thread.inside_node();
  if (outermost && backward_thread != PyThread_get_thread_ident()) {
    backward_thread = backward_thread == 0 ? PyThread_get_thread_ident() : kSeveral;
  }
  if (outermost && callbacks.before_backward != nullptr && count > 0 &&
      !call_quietly(callbacks.before_backward, args, 1)) {
    return nullptr;
  }
  PyObject* result = nullptr;
  {
    OpenFrame frame(ScopeKind::kBackward, "backward", 0);
    Recorder::get().open_current(thread);
    ops::Pass pass(outermost && backward_thread != kSeveral && !may_make_graph(args, count));
    result = forward();
  }
  if (outermost && callbacks.after_backward != nullptr && result != nullptr &&
      !call_quietly(callbacks.after_backward, nullptr, 0)) {
    Py_CLEAR(result);
  }
  return result;
}

// args[0] is the optimizer, which has stepped.
PyObject* step_code_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  PyObject* result = PyObject_Vectorcall(original_of(self), args, flags, names);
  if (Recorder::get().asks_for_nodes()) {
    ops::hear_passes();  // an optimizer that a hook of the backward pass runs
  }
  if (result != nullptr && callbacks.after_step != nullptr && PyVectorcall_NARGS(flags) > 0 &&
      recording.load(std::memory_order_relaxed)) {
    // A step may end the recording, and what cannot be written then is the program's to know.
    Unheard unheard;
    PyObject* callback = Py_NewRef(callbacks.after_step);
    PyObject* returned = PyObject_Vectorcall(callback, args, 1, nullptr);
    Py_DECREF(callback);
    if (returned == nullptr) {
      Py_CLEAR(result);
    }
    Py_XDECREF(returned);
  }
  return result;
}

void stand_in_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_DECREF(original_of(self));
  type->tp_free(self);
  Py_DECREF(type);
}

// Whoever looks closer (inspect, the profiler asking for __code__) sees the function itself.
PyObject* stand_in_getattro(PyObject* self, PyObject* name) {
  return PyObject_GetAttr(original_of(self), name);
}

int stand_in_setattro(PyObject* self, PyObject* name, PyObject* value) {
  return PyObject_SetAttr(original_of(self), name, value);
}

PyObject* stand_in_repr(PyObject* self) {
  return PyObject_Repr(original_of(self));
}

PyObject* stand_in_bind(PyObject* self, PyObject* instance, PyObject* /*type*/) {
  return instance == nullptr ? Py_NewRef(self) : PyMethod_New(self, instance);
}

PyMemberDef stand_in_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(StandIn, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot stand_in_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&stand_in_dealloc)},
                                {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                                {Py_tp_getattro, reinterpret_cast<void*>(&stand_in_getattro)},
                                {Py_tp_setattro, reinterpret_cast<void*>(&stand_in_setattro)},
                                {Py_tp_repr, reinterpret_cast<void*>(&stand_in_repr)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(&stand_in_bind)},
                                {Py_tp_members, stand_in_members},
                                {0, nullptr}};

PyType_Spec stand_in_spec = {
    "pytracer._C.StandIn",
    sizeof(StandIn),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    stand_in_slots};

PyObject* stand_in(vectorcallfunc call, PyObject* original) {
  static PyObject* const spec_type = PyType_FromSpec(&stand_in_spec);
  auto* type = reinterpret_cast<PyTypeObject*>(spec_type);
  PyObject* object = type->tp_alloc(type, 0);
  if (object != nullptr) {
    auto* made = reinterpret_cast<StandIn*>(object);
    made->call = call;
    made->original = Py_NewRef(original);
  }
  return object;
}

void replace(PyObject*& held, PyObject* with) {
  PyObject* before = held;
  held = Py_XNewRef(with);
  Py_XDECREF(before);
}

}  // namespace

PyObject* make_module_call(PyObject* original) {
  return stand_in(&module_call, original);
}

PyObject* make_engine_call(PyObject* original) {
  return stand_in(&engine_call, original);
}

PyObject* make_step_code_call(PyObject* original) {
  return stand_in(&step_code_call, original);
}

void before_step() {
  if (callbacks.before_step == nullptr || !Py_IsInitialized()) {
    return;
  }
  pybind11::gil_scoped_acquire locked;
  if (callbacks.before_step != nullptr && !call_quietly(callbacks.before_step, nullptr, 0)) {
    // No exception can pass through here; Ctrl-C comes again a moment later.
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();
    }
    PyErr_Clear();
  }
}

void set_callbacks(const Callbacks& with) {
  backward_thread = 0;
  ops::forget_passes();
  replace(callbacks.name_of_module, with.name_of_module);
  replace(callbacks.before_root, with.before_root);
  replace(callbacks.after_root, with.after_root);
  replace(callbacks.before_backward, with.before_backward);
  replace(callbacks.after_backward, with.after_backward);
  replace(callbacks.before_step, with.before_step);
  replace(callbacks.after_step, with.after_step);
}

void mark_modules(bool on) {
  marking_modules = on;
}

void forget_module(uintptr_t address) {
  module_names().erase(reinterpret_cast<const PyObject*>(address));
}

void forget_all_modules() {
  module_names().clear();
}

void count_error() {
  ++errors;
}

bool may_read_gradients() {
  return backward_thread == 0 || backward_thread == PyThread_get_thread_ident();
}

uint64_t callback_errors() {
  return errors;
}

}  // namespace pytracer::interceptors
