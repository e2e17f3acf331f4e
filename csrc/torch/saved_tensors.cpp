#include "saved_tensors.h"

#include "../core/recorder.h"
#include "labels.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <new>
#include <string_view>
#include <typeinfo>
#include <utility>

namespace pytracer::saved_tensors {

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;

// Nodes are shared_ptrs up to torch 2.12 and intrusive ones from there on.
template <class T>
std::weak_ptr<T> weaken(const std::shared_ptr<T>& pointer) {
  return pointer;
}

template <class T>
c10::weak_intrusive_ptr<T> weaken(const c10::intrusive_ptr<T>& pointer) {
  return c10::weak_intrusive_ptr<T>(pointer);
}

using WeakNode = decltype(weaken(std::declval<const at::Tensor&>().grad_fn()));

// What torch would have kept without hooks, so that torch itself compares the versions and raises.
struct Packed {
  PyObject_HEAD SavedVariable saved;
  bool output;
  WeakNode made_by;  // of an output
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

// Torch saves without asking our hooks, as it does while it compiles.
class WithoutHooks {
 public:
  WithoutHooks() : before_(at::SavedTensorDefaultHooks::set_tracing(true)) {}

  ~WithoutHooks() { at::SavedTensorDefaultHooks::set_tracing(before_); }

  WithoutHooks(const WithoutHooks&) = delete;
  WithoutHooks& operator=(const WithoutHooks&) = delete;

 private:
  bool before_;
};

// By name: torch does not export the type.
bool is_custom_function(const Node& node) {
  std::string_view type = typeid(node).name();
  return type.find("6PyNode") != type.npos || type.find("7CppNode") != type.npos;
}

// Whether the node that saves the tensor may be the one that made it; keeping the tensor itself
// would then be a cycle that nobody breaks. A node is made before it saves anything, so an input
// has an older one than the newest. What may make further nodes meanwhile counts as an output.
bool may_be_output(const at::Tensor& tensor) {
  const auto& node = tensor.grad_fn();
  if (!node) {
    return false;
  }
  return node->sequence_nr() + 1 >= at::sequence_number::peek() ||
         tensor._fw_grad(/*level=*/0).defined() || tensor.key_set().has(c10::DispatchKey::Python) ||
         is_custom_function(*node);
}

PyObject* pack(PyObject* /*self*/, PyObject* argument) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  labels::record_saved(tensor);
  bool output = may_be_output(tensor);
  WithoutHooks without_hooks;
  SavedVariable saved(tensor, output);
  WeakNode made_by = weaken(tensor.grad_fn());
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

PyObject* unpack(PyObject* /*self*/, PyObject* argument) {
  HANDLE_TH_ERRORS
  const auto* packed = reinterpret_cast<const Packed*>(argument);
  if (!packed->output) {
    return THPVariable_Wrap(packed->saved.unpack().tensor_data());
  }
  auto made_by = packed->made_by.lock();
  return THPVariable_Wrap(
      packed->saved.unpack(made_by ? made_by : torch::autograd::get_current_node()).tensor_data());
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_definition = {"pack", &pack, METH_O, nullptr};
PyMethodDef unpack_definition = {"unpack", &unpack, METH_O, nullptr};

}  // namespace

PyObject* pack_hook() {
  return PyCFunction_New(&pack_definition, nullptr);
}

PyObject* unpack_hook() {
  return PyCFunction_New(&unpack_definition, nullptr);
}

}  // namespace pytracer::saved_tensors
