#include "graph.h"

#include "../core/recorder.h"
#include "private_torch.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <typeinfo>
#include <utility>
#include <vector>

namespace pytracer::graph {

namespace {

using torch::autograd::Node;

// By the address: two libraries may have a type each, which then has two entries.
bool is_torchs_own(const std::type_info& type) {
  static auto* const known = new ska::flat_hash_map<const std::type_info*, bool>;
  auto it = known->find(&type);
  if (it == known->end()) {
    it = known->emplace(&type, private_torch::is_torchs_node(type)).first;
  }
  return it->second;
}

// Whether a Python hook receives the accumulated gradient. DDP's hooks are C++, and leave gradients
// where they are.
bool has_gradient_hook(Node& node) {
  if (node.tensor_post_acc_grad_hooks() != nullptr) {
    return true;
  }
  if (!node.next_edges().empty()) {
    return false;
  }
  return std::any_of(node.post_hooks().begin(), node.post_hooks().end(), [](const auto& hook) {
    return private_torch::is_python_hook(typeid(*hook));
  });
}

// Whether all hooks of the node are DistributedDataParallel's own, which reduces its gradient.
bool is_only_reduced(Node& node) {
  return node.next_edges().empty() && node.tensor_pre_hooks().empty() && node.pre_hooks().empty() &&
         node.tensor_post_acc_grad_hooks() == nullptr &&
         std::all_of(node.post_hooks().begin(), node.post_hooks().end(), [](const auto& hook) {
           return private_torch::is_lambda_hook(typeid(*hook));
         });
}

bool is_fsdps(PyTypeObject* type) {
  return std::strcmp(type->tp_name, "RegisterPostBackwardFunctionBackward") == 0;
}

// Numbers nodes in the order in which they are met. A node has a place by its own number, which
// counts a thread's nodes: so nodes that are met one after another mostly lie side by side. Nodes
// of other threads, those of parameters, and those that are far back are in a table.
class Numbers {
 public:
  // Begins anew. `next` is the number of the thread's next node.
  void begin(uint64_t next) {
    next_ = next;
    met_ = 0;
    std::fill(recent_.begin(), recent_.end(), Met{});
    if (others_.bucket_count() > kRoom * (others_.size() + kRecent)) {
      decltype(others_)().swap(others_);  // far too large, and it takes time to clear
    } else {
      others_.clear();
    }
  }

  struct Met {
    const Node* node = nullptr;
    uint64_t number = 0;
  };

  // The node's number, and whether it is new.
  std::pair<uint64_t, bool> meet(const Node* node) {
    uint64_t back = next_ - node->sequence_nr();  // 1 for the thread's last node
    if (back - 1 < kRecent && node->sequence_nr() < next_) {
      recent_.resize(std::max<size_t>(recent_.size(), back + 1));
      Met& met = recent_[back];
      if (met.node == nullptr) {
        met = {node, ++met_};
        return {met.number, true};
      }
      if (met.node == node) {
        return {met.number, false};
      }
    }
    auto [known, is_new] = others_.emplace(node, met_ + 1);
    met_ += is_new ? 1 : 0;
    return {known->second, is_new};
  }

 private:
  static constexpr size_t kRecent = 1 << 12;
  static constexpr size_t kRoom = 16;

  uint64_t next_ = 0;
  uint64_t met_ = 0;
  std::vector<Met> recent_;
  ska::flat_hash_map<const Node*, uint64_t> others_;
};

class Looking {
 public:
  explicit Looking(uint64_t since) : since_(since) {
    left_.reserve(kOpenNodes);
    numbers_.begin(at::sequence_number::peek());
  }

  Look at(PyObject* outputs) {
    found_.is_plain = add_roots(outputs);
    while (!left_.empty()) {
      Node& node = *left_.back();
      left_.pop_back();
      add(node);
    }
    return found_;
  }

 private:
  void mix(uint64_t value) {
    constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
    found_.structure = (found_.structure ^ value) * kOdd;
    found_.structure ^= found_.structure >> 32;
  }

  void mix(const void* identity) { mix(reinterpret_cast<uintptr_t>(identity)); }

  void meet(Node* node) {
    auto [number, is_new] = numbers_.meet(node);
    mix(number);
    if (is_new) {
      fetch(node);
      left_.push_back(node);
    }
  }

  // A node's fields lie in several lines of the cache, and mostly none of them is near.
  static void fetch(const Node* node) {
    for (size_t at = 0; at < sizeof(Node); at += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(node) + at);
    }
  }

  // Adds the nodes that made the outputs; false if one is not known.
  bool add_roots(PyObject* outputs) {
    if (!PyTuple_Check(outputs) && !PyList_Check(outputs)) {
      return false;
    }
    bool all = true;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(outputs); ++i) {
      PyObject* output = PySequence_Fast_GET_ITEM(outputs, i);
      if (!PyType_IsSubtype(Py_TYPE(output), reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
        all = false;  // a gradient edge
        continue;
      }
      const at::Tensor& tensor = THPVariable_Unpack(output);
      if (!tensor.defined() || tensor.key_set().has(c10::DispatchKey::Python)) {
        all = false;  // a subclass, which computes in Python
      }
      if (!tensor.defined() || !tensor.grad_fn()) {
        all = false;  // a leaf
        continue;
      }
      meet(tensor.grad_fn().get());
    }
    return all;
  }

  void add(Node& node) {
    const std::type_info& type = typeid(node);
    mix(type.name());
    uint64_t number = node.sequence_nr();
    if (number >= since_ && number < static_cast<uint64_t>(found_.first_number) &&
        node.thread_id() == thread_ && Recorder::made_by_an_op(Recorder::this_thread(), number)) {
      found_.first_number = static_cast<int64_t>(number);
    }
    if (!is_torchs_own(type)) {
      found_.is_plain = false;
      if (private_torch::is_python_node(type)) {
        PyObject* object = private_torch::object_of(static_cast<torch::autograd::PyNode&>(node));
        PyTypeObject* kind = object != nullptr ? Py_TYPE(object) : &PyBaseObject_Type;
        mix(kind);
        found_.may_drop_gradients = found_.may_drop_gradients || is_fsdps(kind);
      }
    } else if (has_hooks(node)) {
      bool reduced = is_only_reduced(node);
      found_.is_reduced = found_.is_reduced || reduced;
      found_.is_plain = found_.is_plain && reduced;
      found_.may_drop_gradients = found_.may_drop_gradients || has_gradient_hook(node);
    }
    for (const auto& edge : node.next_edges()) {
      if (edge.function) {
        meet(edge.function.get());
      } else {
        mix(uint64_t{0});
      }
    }
  }

  static constexpr size_t kOpenNodes = 32;

  uint64_t since_;
  uint64_t thread_ = at::RecordFunction::currentThreadId();
  Look found_;
  std::vector<Node*> left_;
  // Kept: the next graph is mostly as large. The GIL guards it.
  static inline auto& numbers_ = *new Numbers;
};

}  // namespace

bool has_hooks(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() ||
         !node.post_hooks().empty() || node.tensor_post_acc_grad_hooks() != nullptr;
}

Look look_at(PyObject* outputs, uint64_t since) {
  return Looking(since).at(outputs);
}

}  // namespace pytracer::graph
