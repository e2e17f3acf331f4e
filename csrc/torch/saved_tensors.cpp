#include "saved_tensors.h"

#include "../core/recorder.h"
#include "exchange.h"
#include "labels.h"
#include "private_torch.h"

#include <pybind11/pybind11.h>

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <memory>
#include <new>
#include <typeinfo>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace pytracer::saved_tensors {

namespace {

using private_torch::WeakNode;
using torch::autograd::SavedVariable;

// The object that torch would have kept without hooks, so that torch itself compares versions and
// raises.
struct Packed {
  PyObject_HEAD SavedVariable saved;
  bool output;
  WeakNode made_by;  // the node of an output
};

void packed_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  auto* packed = reinterpret_cast<Packed*>(self);
  packed->saved.~SavedVariable();
  packed->made_by.~WeakNode();
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot packed_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&packed_dealloc)},
                              {0, nullptr}};

PyType_Spec packed_spec = {
    "pytracer._C.SavedTensor", sizeof(Packed), 0, Py_TPFLAGS_DEFAULT, packed_slots};

PyTypeObject* packed_type() {
  static PyObject* const type = PyType_FromSpec(&packed_spec);
  return reinterpret_cast<PyTypeObject*>(type);
}

// While it lives, torch saves without our hooks, as it does while it compiles.
class WithoutHooks {
 public:
  WithoutHooks() : before_(at::SavedTensorDefaultHooks::set_tracing(true)) {}

  ~WithoutHooks() { at::SavedTensorDefaultHooks::set_tracing(before_); }

  WithoutHooks(const WithoutHooks&) = delete;
  WithoutHooks& operator=(const WithoutHooks&) = delete;

 private:
  bool before_;
};

// Whether the node that saves the tensor may be the node that made it. To keep the tensor itself
// would then be a cycle that nobody breaks. A node is made before it saves anything, so an input's
// node is older than the newest. Tensors that may make further nodes meanwhile count as outputs.
bool may_be_output(const at::Tensor& tensor) {
  const auto& node = tensor.grad_fn();
  if (!node) {
    return false;
  }
  return node->sequence_nr() + 1 >= at::sequence_number::peek() ||
         tensor._fw_grad(/*level=*/0).defined() || tensor.key_set().has(c10::DispatchKey::Python) ||
         private_torch::is_custom_node(typeid(*node));
}

PyObject* pack(PyObject* /*self*/, PyObject* argument) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  labels::record_saved(tensor);
  bool output = may_be_output(tensor);
  WithoutHooks without_hooks;
  SavedVariable saved(tensor, output);
  WeakNode made_by = private_torch::weaken(tensor.grad_fn());
  PyTypeObject* type = packed_type();
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) {
    return nullptr;
  }
  auto* packed = reinterpret_cast<Packed*>(object);
  new (&packed->saved) SavedVariable(std::move(saved));
  packed->output = output;
  new (&packed->made_by) WeakNode(std::move(made_by));
  return object;
  END_HANDLE_TH_ERRORS
}

// Returns the tensor as torch saved it. If the tensor has no gradient, torch keeps the very object,
// with its class and attributes, as it does for hooks that return their argument.
PyObject* unpack(PyObject* /*self*/, PyObject* argument) {
  HANDLE_TH_ERRORS
  const auto* packed = reinterpret_cast<const Packed*>(argument);
  if (!packed->output) {
    return THPVariable_Wrap(packed->saved.unpack());
  }
  auto made_by = packed->made_by.lock();
  return THPVariable_Wrap(
      packed->saved.unpack(made_by ? made_by : torch::autograd::get_current_node()));
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_definition = {"pack", &pack, METH_O, nullptr};
PyMethodDef unpack_definition = {"unpack", &unpack, METH_O, nullptr};

// ------------------------------------------------------------------ the stack of hooks

using Default = at::SavedTensorDefaultHooks;

// Made when first wanted; null until then. Also read without the GIL.
std::atomic<PyObject*> our_pack{nullptr};
std::atomic<PyObject*> our_unpack{nullptr};

// Guarded by the GIL. Each thread has a stack of hooks; ours go onto the stack of the thread that
// installed them, `home`. 0 if they are not wanted.
unsigned long home = 0;
bool pushed = false;

bool is_pushed_here() {
  return pushed && is_home();
}

bool are_ours(const std::pair<c10::SafePyObject, c10::SafePyObject>& hooks) {
  return hooks.first.ptr(getPyInterpreter()) == our_pack.load(std::memory_order_relaxed);
}

c10::SafePyObject safe(PyObject* hook) {
  return {Py_NewRef(hook), getPyInterpreter()};
}

// If the program has hooks of its own, only those count.
void push() {
  if (Default::is_enabled() && !Default::get_hooks(/*ignore_is_tracing=*/true)) {
    Default::lazy_initialize();
    Default::push_hooks(safe(our_pack), safe(our_unpack));
    pushed = true;
  }
}

// Takes ours from the stack, also from under hooks that the program has yet to pop.
void pop() {
  std::vector<std::pair<c10::SafePyObject, c10::SafePyObject>> above;
  while (Default::get_hooks(/*ignore_is_tracing=*/true)) {
    auto top = Default::pop_hooks();
    if (are_ours(top)) {
      break;
    }
    above.push_back(std::move(top));
  }
  for (; !above.empty(); above.pop_back()) {
    Default::push_hooks(std::move(above.back().first), std::move(above.back().second));
  }
  pushed = false;
}

bool top_is_ours() {
  auto top = Default::get_hooks(/*ignore_is_tracing=*/true);
  return top && are_ours(*top);
}

// torch.func refuses to run while hooks are active. It first calls the function that disables
// hooks: then ours step aside. They come back when it enables hooks again.

template <class Forward>
PyObject* while_aside(Forward forward) {
  bool on_top = is_pushed_here() && top_is_ours();
  if (on_top) {
    pop();
  }
  PyObject* result = forward();
  if (result == nullptr && on_top) {
    push();
  }
  return result;
}

PyObject* back_again(PyObject* result) {
  if (result != nullptr && !pushed && home == PyThread_get_thread_ident()) {
    push();
  }
  return result;
}

PyObject* disable(PyObject* self, PyObject* args, PyObject* kwargs);
PyObject* disable_fast(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* enable(PyObject* self, PyObject* args, PyObject* kwargs);
PyObject* enable_fast(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* top(PyObject* self, PyObject* args, PyObject* kwargs);
PyObject* top_fast(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);

MethodExchange disabling(&disable, &disable_fast);
MethodExchange enabling(&enable, &enable_fast);
MethodExchange asking(&top, &top_fast);

PyObject* disable(PyObject* self, PyObject* args, PyObject* kwargs) {
  return while_aside([&] { return disabling.original()(self, args, kwargs); });
}

PyObject* disable_fast(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return while_aside([&] { return disabling.fast_original()(self, args, count, names); });
}

PyObject* enable(PyObject* self, PyObject* args, PyObject* kwargs) {
  return back_again(enabling.original()(self, args, kwargs));
}

PyObject* enable_fast(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return back_again(enabling.fast_original()(self, args, count, names));
}

// Torch asks for the program's hooks: selective checkpointing warns about them, and will refuse.

PyObject* top(PyObject* self, PyObject* args, PyObject* kwargs) {
  return top_is_ours() ? Py_NewRef(Py_None) : asking.original()(self, args, kwargs);
}

PyObject* top_fast(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return top_is_ours() ? Py_NewRef(Py_None) : asking.fast_original()(self, args, count, names);
}

bool exchange(MethodExchange& method, const char* name) {
  py::object function = private_torch::saved_tensors_function(name);
  return method.put(function.ptr());
}

}  // namespace

bool install() {
  if (home != 0) {
    return true;
  }
  if (our_pack == nullptr) {
    our_unpack = PyCFunction_New(&unpack_definition, nullptr);
    our_pack = PyCFunction_New(&pack_definition, nullptr);
  }
  home = PyThread_get_thread_ident();
  if (!exchange(disabling, private_torch::kDisableHooks) ||
      !exchange(enabling, private_torch::kEnableHooks) ||
      !exchange(asking, private_torch::kTopHooks)) {
    uninstall();
    return false;
  }
  push();
  return true;
}

void uninstall() {
  if (is_pushed_here()) {
    pop();
  }
  home = 0;
  pushed = false;
  disabling.take_away();
  enabling.take_away();
  asking.take_away();
}

bool is_home() {
  return home == PyThread_get_thread_ident();
}

bool installed() {
  return home != 0;
}

bool program_has_hooks() {
  const auto& stack = Default::get_tls_state().stack;
  return !stack.empty() && !are_ours(stack.top());
}

}  // namespace pytracer::saved_tensors
