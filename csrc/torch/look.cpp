#include "look.h"

#include "devices.h"
#include "imagined.h"
#include "imagined_guard.h"
#include "private_torch.h"
#include "quietly.h"

#include <pybind11/pybind11.h>

#include <c10/core/StorageImpl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace pytracer::look {

namespace {

constexpr int kDeepestPart = 4;
constexpr size_t kMostVisits = 5000;  // in one look

PyTypeObject* tensor_type() {
  return reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

// Whether it is a subclass in Python whose memory is other tensors'.
bool has_no_memory(const at::Tensor& tensor) {
  if (!tensor.key_set().has(c10::DispatchKey::Python)) {
    return false;
  }
  return !tensor.has_storage() || private_torch::data_of(tensor).get() == nullptr;
}

// Whether it is a fake tensor of an imagined run without memory of ours: its attributes are no part
// of it.
bool is_fake(const at::Tensor& tensor) {
  return imagined::is_imagining() && tensor.has_storage() &&
         private_torch::data_of(tensor).device().is_meta();
}

// visit(name, value) for each value in the slots that the object's classes declare.
template <class Visit>
void each_slot(PyObject* object, Visit visit) {
  PyObject* classes = Py_TYPE(object)->tp_mro;
  for (Py_ssize_t i = 0; classes != nullptr && i < PyTuple_GET_SIZE(classes); ++i) {
    PyObject* declared = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(classes, i))->tp_dict;
    PyObject* name = nullptr;
    PyObject* descriptor = nullptr;
    for (Py_ssize_t at = 0;
         declared != nullptr && PyDict_Next(declared, &at, &name, &descriptor);) {
      if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
        continue;
      }
      auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
      PyObject* value = PyMemberDescr_Type.tp_descr_get(descriptor, object, type);
      if (value != nullptr) {
        visit(name, value);
        Py_DECREF(value);
      }
      PyErr_Clear();  // the slot is empty
    }
  }
}

template <class Visit>
void each_attribute(PyObject* object, Visit visit) {
  if (PyObject* own = attributes(object)) {
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(own, &at, &name, &value);) {
      visit(name, value);
    }
    Py_DECREF(own);
  }
  each_slot(object, visit);
}

bool names_a_gradient(PyObject* name) {
  const char* text = PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : nullptr;
  PyErr_Clear();
  return text != nullptr && std::strstr(text, "grad") != nullptr;
}

void each_part(PyObject* tensor, int depth, Found found) {
  if (!has_no_memory(THPVariable_Unpack(tensor))) {
    found(tensor);
  } else if (depth > 0 && !is_fake(THPVariable_Unpack(tensor))) {
    each_attribute(tensor, [&](PyObject* name, PyObject* value) {
      if (is_tensor(value) && !names_a_gradient(name)) {
        each_part(value, depth - 1, found);
      }
    });
  }
}

// visit(value) for each value of this attribute, a dictionary or a container of torch's own.
template <class Visit>
void each_value(PyObject* attributes, PyObject* key, Visit visit) {
  PyObject* container = PyDict_GetItemWithError(attributes, key);
  if (container == nullptr) {
    return;
  }
  if (PyDict_Check(container)) {
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(container, &at, &name, &value);) {
      visit(value);
    }
  } else if (is_of_torch(Py_TYPE(container))) {
    py::object items = py::getattr(container, "items", py::none());
    PyObject* listed = nullptr;
    if (!quietly::call(items.ptr(), nullptr, 0, &listed)) {
      quietly::raise_later();
    }
    auto pairs = py::reinterpret_steal<py::object>(listed);
    for (Py_ssize_t i = 0; pairs && PyList_Check(listed) && i < PyList_GET_SIZE(listed); ++i) {
      PyObject* pair = PyList_GET_ITEM(listed, i);
      if (PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2) {
        visit(PyTuple_GET_ITEM(pair, 1));
      }
    }
  }
}

}  // namespace

bool is_record(PyObject* object) {
  if (object == Py_None || PyLong_Check(object) || PyFloat_Check(object) ||
      PyUnicode_Check(object)) {
    return false;
  }
  auto of_torch = [](const char* module, const char* name) {
    return py::object(py::module_::import(module).attr(name)).release().ptr();
  };
  static const auto* const others = new std::array{
      of_torch("torch.nn", "Module"),
      of_torch("torch.optim", "Optimizer"),
      reinterpret_cast<PyObject*>(&PyType_Type),
      reinterpret_cast<PyObject*>(&PyModule_Type),
      reinterpret_cast<PyObject*>(&PyFunction_Type),
      reinterpret_cast<PyObject*>(&PyMethod_Type),
  };
  for (PyObject* other : *others) {
    if (PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(other))) {
      return false;
    }
  }
  return true;
}

void each_field(PyObject* object, c10::function_ref<void(PyObject*, PyObject*)> visit) {
  each_attribute(object, visit);
}

bool is_parameter(PyObject* tensor) {
  if (!THPVariable_Unpack(tensor).is_leaf()) {
    return false;
  }
  if (PyType_IsSubtype(Py_TYPE(tensor), reinterpret_cast<PyTypeObject*>(ParameterClass))) {
    return true;
  }
  // A parameter made of a subclass stays of that class, and has a mark.
  auto held = py::reinterpret_steal<py::object>(attributes(tensor));
  return held && PyDict_GetItemString(held.ptr(), "_is_param") == Py_True;
}

bool is_tensor(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  return type == tensor_type() || reinterpret_cast<PyObject*>(type) == ParameterClass ||
         PyType_IsSubtype(type, tensor_type());
}

PyObject* attributes(PyObject* object) {
  if (Py_TYPE(object)->tp_dictoffset == 0 || PyType_Check(object)) {
    return nullptr;
  }
  PyObject* found = PyObject_GenericGetDict(object, nullptr);
  PyErr_Clear();
  return found;
}

PyObject* attribute(PyObject* object, PyObject* name) {
  PyTypeObject* type = Py_TYPE(object);
  if (type->tp_dictoffset == 0 || PyType_Check(object)) {
    return nullptr;
  }
  PyObject* found = nullptr;
  if (_PyType_Lookup(type, name) == nullptr) {  // nothing of the class hides it, or runs for it
    found = PyObject_GenericGetAttr(object, name);
  } else if (PyObject* all = attributes(object)) {
    found = Py_XNewRef(PyDict_GetItemWithError(all, name));
    Py_DECREF(all);
  }
  PyErr_Clear();
  return found;
}

PyObject* referred_to(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) {
    PyErr_Clear();
  }
  return found;
#else
  PyObject* found = PyWeakref_GetObject(reference);
  return found == Py_None ? nullptr : Py_XNewRef(found);
#endif
}

PyObject* item(PyObject* container, PyObject* key) {
  PyObject* found = nullptr;
  if (PyDict_Check(container)) {
    found = PyDict_GetItemWithError(container, key);
  } else if (PyLong_CheckExact(key) && (PyList_Check(container) || PyTuple_Check(container))) {
    Py_ssize_t position = PyLong_AsSsize_t(key);
    if (position >= 0 && position < PySequence_Fast_GET_SIZE(container)) {
      found = PySequence_Fast_GET_ITEM(container, position);
    }
  } else if (is_of_torch(Py_TYPE(container))) {
    PyObject* made = PyObject_GetItem(container, key);
    PyErr_Clear();
    return made;
  }
  if (found == nullptr) {
    PyErr_Clear();
  }
  return Py_XNewRef(found);
}

bool is_of_torch(PyTypeObject* type) {
  PyObject* module =
      type->tp_dict != nullptr ? PyDict_GetItemString(type->tp_dict, "__module__") : nullptr;
  const char* name =
      module != nullptr && PyUnicode_Check(module) ? PyUnicode_AsUTF8(module) : type->tp_name;
  PyErr_Clear();
  return name != nullptr && std::strncmp(name, "torch.", 6) == 0;
}

void each_part(PyObject* tensor, Found found) {
  Undisturbed undisturbed;
  each_part(tensor, kDeepestPart, found);
}

void each_tensor(PyObject* value, int depth, bool also_in_objects, Found found) {
  each_tensor(&value, 1, depth, also_in_objects, found);
}

void each_tensor(
    PyObject* const* values, Py_ssize_t count, int depth, bool also_in_objects, Found found) {
  Undisturbed undisturbed;
  std::vector<std::pair<py::object, int>> left;
  for (Py_ssize_t i = count; i > 0; --i) {
    left.emplace_back(py::reinterpret_borrow<py::object>(values[i - 1]), depth);
  }
  for (size_t visits = 0; !left.empty() && visits < kMostVisits; ++visits) {
    auto [held, levels] = std::move(left.back());
    left.pop_back();
    PyObject* object = held.ptr();
    auto later = [&left, below = levels - 1](PyObject* inner) {
      left.emplace_back(py::reinterpret_borrow<py::object>(inner), below);
    };
    if (is_tensor(object)) {
      each_part(object, found);
    } else if (levels == 0) {
      continue;
    } else if (PyDict_Check(object)) {
      PyObject* key = nullptr;
      PyObject* inner = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &inner);) {
        later(inner);
      }
    } else if (PyList_Check(object) || PyTuple_Check(object)) {
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
        later(PySequence_Fast_GET_ITEM(object, i));
      }
    } else if (also_in_objects && is_record(object)) {
      each_field(object, [&](PyObject* /*name*/, PyObject* inner) { later(inner); });
    }
  }
}

void each_owned_alone(PyObject* value, Py_ssize_t references, int depth, Found found) {
  if (Py_REFCNT(value) > references) {
    return;
  }
  if (is_tensor(value)) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    bool is_alone = tensor.defined() && tensor.use_count() == 1 && tensor.has_storage() &&
                    private_torch::has_storage_alone(tensor);
    if (is_alone) {
      found(value);
    }
  } else if (depth > 0 && (PyDict_CheckExact(value) || PyODict_CheckExact(value))) {
    PyObject* key = nullptr;
    PyObject* inner = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &inner);) {
      each_owned_alone(inner, 1, depth - 1, found);
    }
  } else if (depth > 0 && (PyList_CheckExact(value) || PyTuple_CheckExact(value))) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      each_owned_alone(PySequence_Fast_GET_ITEM(value, i), 1, depth - 1, found);
    }
  }
}

void each_module(c10::ArrayRef<PyObject*> roots,
                 c10::function_ref<bool(PyObject*, PyObject*)> visit) {
  static PyObject* const modules = PyUnicode_InternFromString("_modules");
  Undisturbed undisturbed;
  std::vector<py::object> left;
  for (size_t i = roots.size(); i > 0; --i) {
    left.push_back(py::reinterpret_borrow<py::object>(roots[i - 1]));
  }
  std::unordered_set<PyObject*> seen;  // some modules refer to the module that they are in
  while (!left.empty()) {
    py::object one = std::move(left.back());
    left.pop_back();
    auto held = py::reinterpret_steal<py::object>(attributes(one.ptr()));
    if (!held || !seen.insert(one.ptr()).second) {
      continue;
    }
    if (!visit(one.ptr(), held.ptr())) {
      return;
    }
    size_t first = left.size();
    each_value(held.ptr(), modules, [&](PyObject* value) {
      if (value != Py_None) {
        left.push_back(py::reinterpret_borrow<py::object>(value));
      }
    });
    std::reverse(left.begin() + static_cast<std::ptrdiff_t>(first), left.end());
  }
}

PyObject* first_parameter(PyObject* module) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  PyObject* found = nullptr;
  each_module(module, [&](PyObject* /*one*/, PyObject* held) {
    each_value(held, parameters, [&](PyObject* value) {
      if (found == nullptr && is_tensor(value)) {
        found = Py_NewRef(value);
      }
    });
    return found == nullptr;
  });
  return found;
}

std::string shape_of(const at::Tensor& tensor) {
  const auto& impl = *tensor.unsafeGetTensorImpl();
  if (impl.is_nested()) {
    return "nested";
  }
  if (impl.has_symbolic_sizes_strides()) {
    return "";
  }
  std::string text;
  for (int64_t size : impl.sizes_default()) {
    text += (text.empty() ? "" : "x") + std::to_string(size);
  }
  return text.empty() ? "scalar" : text;
}

const char* dtype_of(const at::Tensor& tensor) {
  return torch::getTHPDtype(tensor.scalar_type())->name;
}

c10::Device device_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return c10::Device(c10::DeviceType::Meta);
  }
  const auto& data = private_torch::data_of(tensor);
  imagined::Block block = data.device().is_meta() ? imagined::block_of(data) : imagined::Block{};
  if (block.address == 0) {
    return data.device();
  }
  return devices::torchs_device(block.type, 0);
}

Memory memory_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return {};
  }
  auto* storage = private_torch::storage_of(tensor);
  const auto& impl = *tensor.unsafeGetTensorImpl();
  const auto& data = private_torch::data_of(*storage);
  uint64_t address = data.device().is_meta() ? imagined::block_of(data).address
                                             : reinterpret_cast<uint64_t>(data.get());
  Memory found{address, static_cast<uint64_t>(storage->sym_nbytes().maybe_as_int().value_or(0)), 1};
  if (!impl.has_symbolic_sizes_strides()) {
    for (int64_t size : impl.sizes_default()) {
      found.elements *= static_cast<uint64_t>(size);
    }
  }
  return found;
}

}  // namespace pytracer::look
