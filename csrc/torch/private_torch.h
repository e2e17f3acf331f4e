// Private things of torch that pytracer reads: members with an underscore, names of types and
// records, symbols found at run time. Torch promises none of them, so a new release of torch may
// change them.
//
// A compiler cannot check most of these. check() tries them at run time, for `pytracer doctor`.
//
// These stay in other files, since each is its file's whole subject:
//   exchange.h       CPython's tables: a function's vectorcall and a method's entry. CPython has a
//                    function for the first since Python 3.12.
//   frame_locals.h   CPython's frames; before Python 3.12 by the headers that it keeps to itself
//   imagined.cpp     the table of virtual functions of at::CUDAHooksInterface, and
//                    c10::impl::device_guard_impl_registry
//
// These types in torch's headers are private, too. The compiler checks them:
//   torch/csrc/autograd   Node, SavedVariable, AccumulateGrad, get_current_node, THPVariable_*
//   torch/csrc/jit        tracer::getTracingState, setTracingState
//   ATen                  SparseTensorImpl, SparseCsrTensorImpl, SavedTensorDefaultHooks,
//                         sequence_number::peek, getStepCallbacks, impl::PythonTorchFunctionTLS
//   c10/core/impl         TorchDispatchModeTLS, LocalDispatchKeySet, DeviceGuardImplInterface,
//                         PyObjectSlot
//   c10/cuda              CUDACachingAllocator's trace entries and snapshots (csrc/cuda)
#pragma once

#include <pybind11/pybind11.h>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

namespace pytracer::private_torch {

// ------------------------------------------------------------------ storages

// The storage's pointer. Torch's public ways to it copy a copy-on-write storage, or refuse fake
// tensors, which have no memory.
inline c10::DataPtr& data_of(c10::StorageImpl& storage) {
  return storage._mutable_data_ptr_no_checks();
}

// Null if the tensor has none. Torch's other ways to it are calls into its library. Hundreds of
// tensors are looked at around each step.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// The same of a tensor that has a storage.
inline c10::DataPtr& data_of(const at::Tensor& tensor) {
  return data_of(*storage_of(tensor));
}

// A storage's object in Python, if the storage keeps it while others hold the storage.
template <typename Slot>
auto python_object(const Slot& slot, int /*newer torch*/) -> decltype(slot.load_pyobj()) {
  return slot.load_pyobj();
}

template <typename Slot>
PyObject* python_object(const Slot& /*slot*/, int64_t /*older torch: it counts for none*/) {
  return nullptr;
}

// Whether only this many hold it, besides its own object in Python, to which nothing else refers.
template <typename Held>
bool is_held_by(Held* held, size_t holders) {
  size_t count = c10::raw::intrusive_ptr::use_count(held);
  PyObject* own = count == holders + 1 ? python_object(*held->pyobj_slot(), 0) : nullptr;
  return count == holders || (own != nullptr && Py_REFCNT(own) == 1);
}

// Whether nothing but this tensor has its storage. A view keeps the tensor that it is a view of:
// what `linear` returns for three dimensions is such.
inline bool has_storage_alone(const at::Tensor& tensor) {
  bool has_base = tensor.is_view() && is_held_by(tensor._base().unsafeGetTensorImpl(), 1);
  return is_held_by(storage_of(tensor), has_base ? 2 : 1);
}

// ------------------------------------------------------------------ autograd's nodes

// Torch exports none of these types (PyNode: not in torch 2.11), so they are known by the names
// that the C++ ABI gives them.

// Whether the node runs a Function in Python.
inline bool is_python_node(const std::type_info& type) {
  return std::strcmp(type.name(), "N5torch8autograd6PyNodeE") == 0;
}

// Whether the node runs a Function that anybody may have written, in Python or in C++ (CppNode).
inline bool is_custom_node(const std::type_info& type) {
  return std::strstr(type.name(), "6PyNode") != nullptr ||
         std::strstr(type.name(), "7CppNode") != nullptr;
}

inline constexpr const char* kAutogradPrefix = "N5torch8autograd";
inline constexpr size_t kAutogradPrefixLength = 16;

// Whether the node is one of torch's own; jit's nodes lie in another namespace.
inline bool is_torchs_node(const std::type_info& type) {
  const char* name = type.name();
  const char* inside = name + kAutogradPrefixLength;
  return std::strncmp(name, kAutogradPrefix, kAutogradPrefixLength) == 0 &&
         std::strncmp(inside, "6PyNode", 7) != 0 && std::strncmp(inside, "7CppNode", 8) != 0;
}

// Whether the hook on a node is in Python.
inline bool is_python_hook(const std::type_info& type) {
  return std::strstr(type.name(), "PyFunction") != nullptr;
}

// Whether the hook on a node is a lambda in C++: torch has one on each parameter that
// DistributedDataParallel reduces.
inline bool is_lambda_hook(const std::type_info& type) {
  return std::strcmp(type.name(), "N5torch8autograd5utils14LambdaPostHookE") == 0;
}

// Where DistributedDataParallel lists the hooks in Python that are to send its buckets.
inline constexpr const char* kCommunicationHooks = "_comm_hooks";

// The Python object of a PyNode: a member up to some release of torch, a method from there on.
template <class PyNode>
PyObject* object_of(PyNode& node) {
  if constexpr (requires { node.obj; }) {
    return node.obj;
  } else {
    return node.pyobj();
  }
}

// A weak pointer to a node: shared_ptrs hold nodes up to torch 2.12, intrusive_ptrs from there on.
template <class T>
std::weak_ptr<T> weaken(const std::shared_ptr<T>& pointer) {
  return pointer;
}

template <class T>
c10::weak_intrusive_ptr<T> weaken(const c10::intrusive_ptr<T>& pointer) {
  return c10::weak_intrusive_ptr<T>(pointer);
}

using WeakNode = decltype(weaken(std::declval<const at::Tensor&>().grad_fn()));

// ------------------------------------------------------------------ names of records

// The engine opens a FUNCTION scope of this name around each node *and* around the release of
// what the node had saved; torch's BACKWARD_FUNCTION scope inside it covers only the node's call.
inline constexpr char kNodePrefix[] = "autograd::engine::evaluate_function: ";
inline constexpr char kAccumulateGrad[] =
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad";
// An optimizer's step is an annotation "Optimizer.step#SGD.step".
inline constexpr char kOptimizerPrefix[] = "Optimizer.step#";
// An operator on its way to a mode in Python.
inline constexpr char kDispatchMode[] = "PythonDispatchMode";

// Inductor loads the code that it writes as modules of this name, and the code of a torch.fx graph
// has this file.
inline constexpr char kGeneratedModule[] = "torch._inductor.runtime.compile_tasks.";
inline constexpr char kGraphCode[] = "<eval_with_key>.";

// ------------------------------------------------------------------ Python's side of torch

// The function behind each call of a module.
pybind11::object call_impl();

// The class of annotations, and what `with` calls as one begins. An optimizer's step is one.
pybind11::object annotation_class();
pybind11::object enter_annotation();

// The method that each backward pass goes through.
pybind11::object run_backward();

// One of torch._C._autograd's functions about hooks for saved tensors.
pybind11::object saved_tensors_function(const char* name);
inline constexpr const char* kDisableHooks = "_saved_tensors_hooks_disable";
inline constexpr const char* kEnableHooks = "_saved_tensors_hooks_enable";
inline constexpr const char* kTopHooks = "_top_saved_tensors_default_hooks";

// Whether this is the code of the wrapper that torch puts around each optimizer's step. The
// optimizer is the wrapper's `self`.
bool is_step_wrapper(PyCodeObject* code);

// Dynamo's switch for the calling thread: takes a callback and returns the one before. nullptr
// where there is no such switch.
PyObject* set_eval_frame(PyObject* callback);

// Whether Python compiles backward passes as a whole now.
bool compiles_backward();

// The list of calls that torch.cuda makes when it comes up; by the device's name. nullptr for a
// device that has none.
pybind11::object queued_calls(const char* device);

// The function that returns whether the current stream of the device is being captured, or None.
pybind11::object capture_question(const char* device);

// ------------------------------------------------------------------ symbols

// As ATen/cuda/CUDAContextLight.h has it, which needs CUDA's headers: by handle and stream. Later
// releases keep the size behind the pointer, which changes nothing here.
struct Workspaces {
  std::map<std::tuple<void*, void*>, c10::DataPtr> map;
  std::shared_mutex mutex;
};

// The workspaces of cuBLAS and cuBLASLt, found by name in libtorch_cuda.so. Empty where torch has
// no CUDA, and for a release of torch that may keep them in another way (known: 2.11 to 2.15).
std::vector<Workspaces*> workspaces();

// libtorch_cpu's entry for c10::demangle among its imported functions, or nullptr. The engine
// demangles each node's name through it.
using Demangle = std::string (*)(const char*);
Demangle* demangle_entry();

// The same for the function that tells the dispatcher who listens to an operator. Each operator
// calls it.
using Listeners = std::optional<at::StepCallbacks> (*)(at::RecordScope);
Listeners* listeners_entry();

// ------------------------------------------------------------------ at run time

struct Check {
  std::string name;
  std::string purpose;
  std::string problem;  // empty if all is well
};

// Tries each of the above that can be tried here. Runs a tiny backward pass and an optimizer's step
// on the CPU. The GIL must be held.
std::vector<Check> check();

}  // namespace pytracer::private_torch
