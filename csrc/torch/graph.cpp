#include "graph.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <typeindex>
#include <typeinfo>
#include <unordered_map>
#include <vector>

namespace pytracer::graph {

namespace {

using torch::autograd::Node;

// By the type's name, since torch does not export the types. PyNode runs a Function in Python,
// CppNode one in C++ that anybody may have written; jit's nodes lie in another namespace.
bool is_torchs_own(const std::type_info& type) {
  static auto* const known = new std::unordered_map<std::type_index, bool>;
  auto [it, is_new] = known->try_emplace(type, false);
  if (is_new) {
    const char* name = type.name();
    it->second = std::strncmp(name, "N5torch8autograd", 16) == 0 &&
                 std::strstr(name, "6PyNode") == nullptr &&
                 std::strstr(name, "7CppNode") == nullptr;
  }
  return it->second;
}

bool has_hooks(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() ||
         !node.post_hooks().empty() || node.tensor_post_acc_grad_hooks() != nullptr;
}

// The nodes that the outputs were made by; false if one cannot be told.
bool add_roots(PyObject* outputs, std::vector<Node*>& nodes) {
  if (!PyTuple_Check(outputs) && !PyList_Check(outputs)) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(outputs); ++i) {
    PyObject* output = PySequence_Fast_GET_ITEM(outputs, i);
    if (!PyType_IsSubtype(Py_TYPE(output), reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
      return false;  // a gradient edge
    }
    const at::Tensor& tensor = THPVariable_Unpack(output);
    if (!tensor.defined() || tensor.key_set().has(c10::DispatchKey::Python)) {
      return false;  // a subclass, which computes in Python
    }
    if (!tensor.grad_fn()) {
      return false;  // a leaf
    }
    nodes.push_back(tensor.grad_fn().get());
  }
  return true;
}

}  // namespace

bool is_plain(PyObject* outputs) {
  std::vector<Node*> left;
  if (!add_roots(outputs, left)) {
    return false;
  }
  ska::flat_hash_set<Node*> seen(left.begin(), left.end());
  while (!left.empty()) {
    Node& node = *left.back();
    left.pop_back();
    if (!is_torchs_own(typeid(node)) || has_hooks(node)) {
      return false;
    }
    for (const auto& edge : node.next_edges()) {
      if (edge.function && seen.insert(edge.function.get()).second) {
        left.push_back(edge.function.get());
      }
    }
  }
  return true;
}

}  // namespace pytracer::graph
