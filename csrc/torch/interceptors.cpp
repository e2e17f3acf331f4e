#include "interceptors.h"

#include "../core/recorder.h"

#include <array>
#include <unordered_map>
#include <vector>

namespace pytracer::interceptors {

namespace {

// All guarded by the GIL.
Callbacks callbacks{};
PyObject* original_module_call = nullptr;
PyObject* original_engine_call = nullptr;
uint64_t errors = 0;

std::unordered_map<const PyObject*, uint32_t>& module_names() {
  static auto* const names = new std::unordered_map<const PyObject*, uint32_t>;
  return *names;
}

// Calls back without disturbing the program: an exception in flight stays, ours are counted.
PyObject* call_quietly(PyObject* callback, PyObject* const* args, size_t count) {
  PyObject* result = PyObject_Vectorcall(callback, args, count, nullptr);
  if (result == nullptr) {
    ++errors;
    PyErr_Clear();
  }
  return result;
}

uint32_t name_of(PyObject* module) {
  auto [it, is_new] = module_names().try_emplace(module, 0);
  if (!is_new) {
    return it->second;
  }
  uint32_t name = 0;
  if (callbacks.name_of_module != nullptr) {
    PyObject* text = call_quietly(callbacks.name_of_module, &module, 1);
    const char* utf8 = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
    if (utf8 != nullptr) {
      name = Recorder::get().strings.intern(utf8);
    } else {
      PyErr_Clear();
    }
    Py_XDECREF(text);
  }
  module_names()[module] = name;  // the callback may have grown the table
  return name;
}

// Root-module callbacks see what a Python function would: a tuple and a dict.
void tell_root(PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  PyObject* tuple = PyTuple_New(count);
  PyObject* dict = PyDict_New();
  if (tuple != nullptr && dict != nullptr) {
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    }
    Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyDict_SetItem(dict, PyTuple_GET_ITEM(names, i), args[count + i]);
    }
    std::array<PyObject*, 3> call{module, tuple, dict};
    Py_XDECREF(call_quietly(callbacks.before_root, call.data(), call.size()));
  }
  Py_XDECREF(tuple);
  Py_XDECREF(dict);
  PyErr_Clear();
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

PyObject* module_call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Py_ssize_t total = count + (names != nullptr ? PyTuple_GET_SIZE(names) : 0);
  std::array<PyObject*, 12> few;
  std::vector<PyObject*> many;
  PyObject** call = few.data();
  if (static_cast<size_t>(total) + 1 > few.size()) {
    many.resize(static_cast<size_t>(total) + 1);
    call = many.data();
  }
  call[0] = self;
  for (Py_ssize_t i = 0; i < total; ++i) {
    call[i + 1] = args[i];
  }
  auto forward = [&] {
    return PyObject_Vectorcall(original_module_call, call, static_cast<size_t>(count) + 1, names);
  };
  if (!recording.load(std::memory_order_relaxed)) {
    return forward();
  }
  uint32_t name = name_of(self);
  bool root = Recorder::this_thread().outside_of_modules();
  if (root && callbacks.before_root != nullptr) {
    tell_root(self, args, count, names);
  }
  OpenFrame frame(ScopeKind::kModule, "", name);
  if (root) {
    Recorder::get().open_current(Recorder::this_thread());
  }
  return forward();
}

PyObject* engine_call(PyObject* /*self*/,
                      PyObject* const* args,
                      Py_ssize_t count,
                      PyObject* names) {
  auto forward = [&] {
    return PyObject_Vectorcall(original_engine_call, args, static_cast<size_t>(count), names);
  };
  if (!recording.load(std::memory_order_relaxed)) {
    return forward();
  }
  ThreadState& thread = Recorder::this_thread();
  bool outermost = !thread.inside_node();
  if (outermost && callbacks.before_backward != nullptr && count > 0) {
    Py_XDECREF(call_quietly(callbacks.before_backward, args, 1));
  }
  PyObject* result = nullptr;
  {
    OpenFrame frame(ScopeKind::kBackward, "backward", 0);
    Recorder::get().open_current(thread);
    result = forward();
  }
  if (outermost && callbacks.after_backward != nullptr && result != nullptr) {
    Py_XDECREF(call_quietly(callbacks.after_backward, nullptr, 0));
  }
  return result;
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef module_call_definition = {
    "__call__",
    as_method(&module_call),
    METH_FASTCALL | METH_KEYWORDS,
    "__call__($self, /, *args, **kwargs)\n--\n\nCall self as a function."};

PyMethodDef engine_call_definition = {
    "_engine_run_backward",
    as_method(&engine_call),
    METH_FASTCALL | METH_KEYWORDS,
    "_engine_run_backward(t_outputs, *args, **kwargs)\n--\n\nRuns the autograd engine."};

void replace(PyObject*& held, PyObject* with) {
  PyObject* before = held;
  held = Py_XNewRef(with);
  Py_XDECREF(before);
}

}  // namespace

PyObject* make_module_call(PyObject* module_type, PyObject* original) {
  replace(original_module_call, original);
  return PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(module_type), &module_call_definition);
}

PyObject* make_engine_call(PyObject* original) {
  replace(original_engine_call, original);
  return PyCFunction_New(&engine_call_definition, nullptr);
}

void set_callbacks(const Callbacks& with) {
  replace(callbacks.name_of_module, with.name_of_module);
  replace(callbacks.before_root, with.before_root);
  replace(callbacks.before_backward, with.before_backward);
  replace(callbacks.after_backward, with.after_backward);
}

void forget_module(uintptr_t address) {
  module_names().erase(reinterpret_cast<const PyObject*>(address));
}

void forget_all_modules() {
  module_names().clear();
}

uint64_t callback_errors() {
  return errors;
}

}  // namespace pytracer::interceptors
