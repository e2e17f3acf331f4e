#include "saved_tensors.h"

#include "../core/recorder.h"
#include "labels.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <new>
#include <sstream>

namespace pytracer::saved_tensors {

namespace {

struct Packed {
  PyObject_HEAD at::Tensor data;
  uint32_t version;
  uint32_t output_number;
  // Only read when unpacking, and then alive: torch's SavedVariable holds the node of an input,
  // and the node of an output is the one that is running.
  const torch::autograd::Node* made_by;
};

void packed_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<Packed*>(self)->data.~Tensor();
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

// torch/csrc/autograd/saved_variable.cpp, SavedVariable::unpack, word for word.
std::string modified_message(const Packed& packed) {
  std::ostringstream message;
  message << "one of the variables needed for gradient computation has been "
             "modified by an inplace operation: ["
          << packed.data.toString() << ' ';
  if (packed.data.is_nested()) {
    message << packed.data._nested_tensor_size() << ']';
  } else {
    message << packed.data.sizes() << ']';
  }
  if (packed.made_by != nullptr) {
    message << ", which is output " << packed.output_number << " of " << packed.made_by->name()
            << ',';
  }
  message << " is at version " << packed.data._version() << "; expected version " << packed.version
          << " instead.";
  if (!torch::autograd::AnomalyMode::is_enabled()) {
    message << " Hint: enable anomaly detection to find the operation that failed to compute its "
               "gradient, with torch.autograd.set_detect_anomaly(True).";
  } else {
    message << " Hint: the backtrace further above shows the operation that failed to compute its "
               "gradient. The variable in question was changed in there or anywhere later. "
               "Good luck!";
  }
  return message.str();
}

PyObject* pack(PyObject* /*self*/, PyObject* argument) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  labels::record_saved(tensor);
  PyTypeObject* type = packed_type();
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) {
    return nullptr;
  }
  auto* packed = reinterpret_cast<Packed*>(object);
  new (&packed->data) at::Tensor();
  packed->data = tensor.tensor_data();
  packed->version = static_cast<uint32_t>(tensor._version());
  packed->output_number = static_cast<uint32_t>(tensor.output_nr());
  packed->made_by = tensor.grad_fn().get();
  return object;
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject* /*self*/, PyObject* argument) {
  HANDLE_TH_ERRORS
  const auto* packed = reinterpret_cast<const Packed*>(argument);
  if (static_cast<uint32_t>(packed->data._version()) != packed->version) {
    PyErr_SetString(PyExc_RuntimeError, modified_message(*packed).c_str());
    return nullptr;
  }
  return THPVariable_Wrap(packed->data);
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
