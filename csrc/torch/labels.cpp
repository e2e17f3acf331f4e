#include "labels.h"

#include "calls.h"
#include "cpu_allocator.h"
#include "devices.h"
#include "imagined.h"
#include "look.h"
#include "private_torch.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/DeviceType.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

namespace py = pybind11;

namespace pytracer::labels {

namespace {

// The place table's row of the device that the thread asked for last.
struct LastPlace {
  uint32_t generation = 0;
  c10::DeviceType type{};
  c10::DeviceIndex index = 0;
  uint16_t number = 0;
};

// Asks the tables. That is rare, so this stays out of its caller. There is no block on a device
// that a recording does not know.
[[gnu::noinline]] Block find_block(const void* address, c10::Device device, LastPlace& last) {
  const devices::Kind* kind = devices::find(device.type());
  if (kind == nullptr) {
    return {};
  }
  Recorder& recorder = Recorder::get();
  auto index = static_cast<uint8_t>(std::max<int>(device.index(), 0));  // the host has -1
  uint32_t generation = recorder.generation();
  uint16_t number = recorder.place({0, 0, 0, kind->type, index});
  last = {generation, device.type(), device.index(), number};
  return {reinterpret_cast<uint64_t>(address), number};
}

Block block_at(const void* address, c10::Device device) {
  PYTRACER_STATIC_TLS static thread_local constinit LastPlace last_of_thread;
  LastPlace& last = last_of_thread;
  if (last.generation == Recorder::get().generation() && last.type == device.type() &&
      last.index == device.index()) {
    return {reinterpret_cast<uint64_t>(address), last.number};
  }
  return find_block(address, device, last);
}

bool is_compressed(c10::Layout layout) {
  return layout == c10::kSparseCsr || layout == c10::kSparseCsc || layout == c10::kSparseBsr ||
         layout == c10::kSparseBsc;
}

bool record(const Block& block, uint32_t label) {
  if (block.address != 0) {
    Recorder::get().record(Action::kLabel, block.place, block.address, label);
  }
  return block.address != 0;
}

}  // namespace

Block block_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return {};
  }
  // The storage's pointer, not the tensor's: views share a block. Read this way it neither makes
  // copy-on-write storages copy nor complains about fake tensors, which have none.
  const auto& data = private_torch::data_of(tensor);
  const void* address = data.get();
  c10::Device device = data.device();
  if (device.is_meta()) {
    imagined::Block block = imagined::block_of(data);
    if (block.address == 0) {
      return {};
    }
    address = reinterpret_cast<const void*>(block.address);
    device = devices::torchs_device(block.type, 0);
  }
  return block_at(address, device);
}

void each_part(const at::Tensor& tensor, c10::function_ref<void(const at::Tensor&)> found) {
  if (!tensor.defined()) {
    return;
  }
  // A subclass in Python may say that it is sparse without being it.
  bool is_torchs_own = !tensor.key_set().has(c10::DispatchKey::Python);
  if (is_torchs_own && tensor.is_sparse()) {
    auto* parts = static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
    found(parts->indices());
    found(parts->values());
  } else if (is_torchs_own && is_compressed(tensor.layout())) {
    auto* parts = static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
    found(parts->compressed_indices());
    found(parts->plain_indices());
    found(parts->values());
  } else {
    found(tensor);
  }
}

bool record(const at::Tensor& tensor, uint32_t label) {
  bool is_known = false;
  each_part(tensor,
            [&](const at::Tensor& part) { is_known = record(block_of(part), label) || is_known; });
  return is_known;
}

namespace {

// The block of a tensor that has just one, which begins where its storage does.
Block only_block_of(const at::Tensor& tensor) {
  c10::StorageImpl* storage = private_torch::storage_of(tensor);
  if (storage == nullptr || tensor.layout() != c10::kStrided ||
      tensor.key_set().has(c10::DispatchKey::Python)) {
    return {};
  }
  const auto& data = private_torch::data_of(*storage);
  bool begins_there = data.get() == data.get_context() && !data.device().is_meta();
  return begins_there ? block_at(data.get(), data.device()) : Block{};
}

// What the block is known as need not be said again.
void record_all(const at::Tensor& tensor, uint32_t label, Recorder::Labelled& before) {
  if (Block block = only_block_of(tensor); block.address != 0) {
    Recorder::get().record_label(block.place, block.address, label, before);
    return;
  }
  if (!labels::record(tensor, label) && tensor.key_set().has(c10::DispatchKey::Python)) {
    auto whole = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    look::each_part(whole.ptr(),
                    [label](PyObject* part) { labels::record(THPVariable_Unpack(part), label); });
  }
}

}  // namespace

bool record_block(const void* address, c10::Device device, uint32_t label) {
  return record(block_at(address, device), label);
}

py::object Watched::find(const Entry& entry, Shelf& last) {
  PyObject* path = entry.path.ptr();
  Py_ssize_t end = PyTuple_GET_SIZE(path) - 1;
  auto leads_to_last = [&] {
    for (Py_ssize_t i = 0; i < end; ++i) {
      if (PyTuple_GET_ITEM(path, i) != PyTuple_GET_ITEM(last.path.ptr(), i)) {
        return false;
      }
    }
    return true;
  };
  if (!last.holder.is(entry.holder) || PyTuple_GET_SIZE(last.path.ptr()) != end + 1 ||
      !leads_to_last()) {
    last = {entry.holder, entry.path, py::object(), 0};
    auto holder = py::reinterpret_steal<py::object>(look::referred_to(entry.holder.ptr()));
    py::object found;
    if (holder) {
      found = py::reinterpret_steal<py::object>(
          end > 0 ? look::attribute(holder.ptr(), PyTuple_GET_ITEM(path, 0))
                  : look::attributes(holder.ptr()));
    }
    for (Py_ssize_t i = 1; found && i < end; ++i) {
      PyObject* key = PyTuple_GET_ITEM(path, i);
      found = py::reinterpret_steal<py::object>(look::item(found.ptr(), key));
    }
    last.container = std::move(found);
  }
  py::object found;  // null if the holder has died, or the place is empty
  if (last.container) {
    found = last.at(PyTuple_GET_ITEM(path, end));
  }
  return found && look::is_tensor(found.ptr()) ? found : py::object();
}

// Entries come in the order of their dictionary, so the next is mostly the one that is asked for.
py::object Watched::Shelf::at(PyObject* key) {
  if (PyDict_CheckExact(container.ptr())) {
    PyObject* there = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t after = next;
    if (PyDict_Next(container.ptr(), &after, &there, &value) && there == key) {
      next = after;
      return py::reinterpret_borrow<py::object>(value);
    }
  }
  return py::reinterpret_steal<py::object>(look::item(container.ptr(), key));
}

bool Watched::add(PyObject* tensor,
                  PyObject* holder,
                  PyObject* path,
                  uint32_t label,
                  uint32_t gradient_label,
                  bool instead) {
  look::Undisturbed undisturbed;
  bool is_there = false;
  if (auto known = known_.find(tensor); known != known_.end()) {
    Entry before = entries_[known->second];
    Shelf any;
    is_there = find(before, any).ptr() == tensor;  // else it died, and its address is in use again
  }
  if (is_there && !instead) {
    return false;
  }
  auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(holder, nullptr));
  if (!reference) {
    throw py::error_already_set();
  }
  Entry entry{std::move(reference),
              py::reinterpret_borrow<py::object>(path),
              tensor,
              label,
              gradient_label};
  auto [known, is_new] = known_.try_emplace(tensor, entries_.size());
  if (is_there && !is_new) {
    entries_[known->second] = std::move(entry);
  } else {
    known->second = entries_.size();
    entries_.push_back(std::move(entry));
  }
  return !is_there;
}

namespace {

// Whether functional_call has put this tensor in a parameter's place.
bool stands_for_a_moment(PyObject* tensor, PyObject* path) {
  PyObject* shelf = PyTuple_GET_ITEM(path, 0);
  return PyUnicode_Check(shelf) && PyUnicode_CompareWithASCIIString(shelf, "_parameters") == 0 &&
         !look::is_parameter(tensor);
}

}  // namespace

template <class LabelOne>
size_t Watched::each(LabelOne label_one) {
  look::Undisturbed undisturbed;
  Shelf last;
  size_t gone = 0;
  size_t unknown = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    py::object tensor = find(entry, last);
    PyObject* before = std::exchange(entry.tensor, tensor.ptr());
    if (tensor) {
      // Tensors that take turns in a place (a shard and the whole, under FSDP) are new only once.
      // Weights that were computed (functional_call, MAML) come and go.
      bool may_be_new = tensor.ptr() != before && THPVariable_Unpack(tensor.ptr()).is_leaf();
      unknown += may_be_new && known_.try_emplace(tensor.ptr(), i).second ? 1 : 0;
      const at::Tensor& found = THPVariable_Unpack(tensor.ptr());
      if (tensor.ptr() != before) {
        entry.stands_in = stands_for_a_moment(tensor.ptr(), entry.path.ptr());
      }
      if (entry.stands_in && found.is_leaf() && found.requires_grad()) {
        record(found, entry.label);  // nobody's module has these weights
      } else if (entry.stands_in) {
        record(found, number_of(kUnknown, "stand_in", "", found));
      } else {
        label_one(found, entry);
      }
    } else {
      ++gone;
    }
  }
  if (gone > 0) {
    std::erase_if(entries_, [](const Entry& entry) { return entry.tensor == nullptr; });
    known_.clear();
    for (size_t i = 0; i < entries_.size(); ++i) {
      known_.emplace(entries_[i].tensor, i);
    }
  }
  return gone + unknown;
}

size_t Watched::label(bool again) {
  return each([again](const at::Tensor& tensor, Entry& entry) {
    if (again) {
      entry.labelled = {};
    }
    record_all(tensor, entry.label, entry.labelled);
  });
}

bool Watched::label_gradient(const at::Tensor& tensor, Entry& entry) {
  const at::Tensor& gradient = gradient_of(tensor);
  if (gradient.defined()) {
    adopt_cpu(gradient, /*also_known=*/!entry.gradient_met);
    entry.gradient_met = true;
    record_all(gradient, entry.gradient_label, entry.gradient_labelled);
  }
  bool has_main = entry.main_looks > 0 && label_main_gradient(entry);
  entry.main_looks = has_main ? kMainLooks : entry.main_looks - (entry.main_looks > 0);
  return gradient.defined() || has_main;
}

// Megatron-LM and Transformer Engine add gradients up in float32 there.
bool Watched::label_main_gradient(Entry& entry) {
  static PyObject* const name = PyUnicode_InternFromString("main_grad");
  auto held = py::reinterpret_steal<py::object>(look::attributes(entry.tensor));
  PyObject* main = held ? PyDict_GetItemWithError(held.ptr(), name) : nullptr;
  PyErr_Clear();
  if (main == nullptr || !look::is_tensor(main)) {
    return false;
  }
  const at::Tensor& gradient = THPVariable_Unpack(main);
  adopt_cpu(gradient, /*also_known=*/!entry.gradient_met);
  entry.gradient_met = true;
  record_all(gradient, entry.gradient_label, entry.main_labelled);
  return true;
}

size_t Watched::label_gradients() {
  return calls::may_read_gradients() ? each(&label_gradient) : 0;
}

Watched::Entry* Watched::entry_of(PyObject* tensor, size_t& next) {
  constexpr size_t kNear = 4;
  for (size_t i = next; i < std::min(next + kNear, entries_.size()); ++i) {
    if (entries_[i].tensor == tensor) {
      next = i + 1;
      return &entries_[i];
    }
  }
  auto known = known_.find(tensor);
  if (known == known_.end()) {
    return nullptr;
  }
  next = known->second + 1;
  return &entries_[known->second];
}

size_t Watched::label_gradients_of(const std::vector<PyObject*>& tensors) {
  look::Undisturbed undisturbed;
  Shelf last;
  size_t next = 0;
  size_t labelled = 0;
  for (PyObject* tensor : tensors) {
    Entry* entry = entry_of(tensor, next);
    if (entry != nullptr && find(*entry, last).ptr() == tensor) {
      if (labelled == 0) {
        entry->gradient_labelled = entry->main_labelled = {};  // a step has an event of its own
      }
      labelled += label_gradient(THPVariable_Unpack(tensor), *entry) ? 1 : 0;
    }
  }
  return labelled;
}

const at::Tensor& gradient_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->grad();
}

namespace {

// A row of the label table that was asked for before: batches mostly have the same shapes.
struct KnownRow {
  static constexpr size_t kMostDimensions = 5;

  uint32_t generation = 0;
  uint32_t number = 0;
  std::string role;
  uint8_t category = 0;
  c10::ScalarType dtype{};
  uint8_t dimensions = 0;
  std::array<int64_t, kMostDimensions> sizes{};

  bool is(uint8_t of_category, std::string_view of_role, const at::Tensor& tensor) const {
    c10::IntArrayRef shape = tensor.unsafeGetTensorImpl()->sizes_default();
    return generation == Recorder::get().generation() && category == of_category &&
           role == of_role && dtype == tensor.scalar_type() && dimensions == shape.size() &&
           std::equal(shape.begin(), shape.end(), sizes.begin());
  }

  static bool has_room_for(const at::Tensor& tensor) {
    const auto& impl = *tensor.unsafeGetTensorImpl();
    return !impl.is_nested() && !impl.has_symbolic_sizes_strides() &&
           impl.sizes_default().size() <= kMostDimensions;
  }

  static KnownRow& slot_for(uint8_t category, const at::Tensor& tensor) {
    // On the heap: there is little room for thread-local data in a library that is loaded late.
    static thread_local auto rows = std::make_unique<std::array<KnownRow, 32>>();
    size_t hash = category;
    for (int64_t size : tensor.unsafeGetTensorImpl()->sizes_default()) {
      hash = hash * 31 + static_cast<size_t>(size);
    }
    return (*rows)[hash % rows->size()];
  }
};

uint32_t intern(uint8_t category,
                std::string_view role,
                std::string_view name,
                const at::Tensor& tensor) {
  Recorder& recorder = Recorder::get();
  return recorder.labels.intern({category,
                                 recorder.strings.intern(role),
                                 recorder.strings.intern(name),
                                 recorder.strings.intern(look::shape_of(tensor)),
                                 recorder.strings.intern(look::dtype_of(tensor))});
}

}  // namespace

uint32_t number_of(uint8_t category,
                   std::string_view role,
                   std::string_view name,
                   const at::Tensor& tensor) {
  if (!name.empty() || !KnownRow::has_room_for(tensor)) {
    return intern(category, role, name, tensor);
  }
  KnownRow& row = KnownRow::slot_for(category, tensor);
  if (!row.is(category, role, tensor)) {
    c10::IntArrayRef shape = tensor.unsafeGetTensorImpl()->sizes_default();
    row.generation = Recorder::get().generation();
    row.number = intern(category, role, name, tensor);
    row.role = role;
    row.category = category;
    row.dtype = tensor.scalar_type();
    row.dimensions = static_cast<uint8_t>(shape.size());
    std::copy(shape.begin(), shape.end(), row.sizes.begin());
  }
  return row.number;
}

size_t adopt_cpu(const at::Tensor& tensor, bool also_known) {
  size_t adopted = 0;
  if (!cpu_allocator::installed()) {
    return adopted;
  }
  each_part(tensor, [&](const at::Tensor& part) {
    if (part.has_storage() && look::device_of(part).is_cpu()) {
      auto& storage = *private_torch::storage_of(part);
      if (also_known || !cpu_allocator::knows(storage)) {
        adopted += cpu_allocator::adopt(storage) ? 1 : 0;
      }
    }
  });
  return adopted;
}

namespace {

void mix(uint64_t& seen, const void* identity) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  seen = (seen ^ reinterpret_cast<uintptr_t>(identity)) * kOdd;
  seen ^= seen >> 32;
}

void add_identities(PyObject* nested, int depth, uint64_t& seen) {
  if (depth == 0) {
    mix(seen, nested);
  } else if (look::is_tensor(nested)) {
    const at::Tensor& tensor = THPVariable_Unpack(nested);
    mix(seen, tensor.unsafeGetTensorImpl());
    if (auto* storage = private_torch::storage_of(tensor)) {
      mix(seen, private_torch::data_of(*storage).get());
    }
  } else if (PyDict_Check(nested)) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(nested, &at, &key, &value);) {
      add_identities(value, depth - 1, seen);
    }
  } else if (PyList_Check(nested) || PyTuple_Check(nested)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(nested); ++i) {
      add_identities(PySequence_Fast_GET_ITEM(nested, i), depth - 1, seen);
    }
  } else if (look::is_record(nested)) {
    look::each_field(nested, [&](PyObject* /*name*/, PyObject* value) {
      add_identities(value, depth - 1, seen);
    });
  }
}

}  // namespace

uint64_t identity_of(PyObject* nested, int depth) {
  uint64_t seen = 0;
  add_identities(nested, depth, seen);
  return seen;
}

void record_saved(const at::Tensor& tensor) {
  each_part(tensor, [](const at::Tensor& part) {
    if (Block block = block_of(part); block.address != 0) {
      Recorder::get().record(Action::kSaved, block.place, block.address, part.nbytes());
    }
  });
}

void record_shape(const at::Tensor& tensor) {
  each_part(tensor, [](const at::Tensor& part) {
    Block block = block_of(part);
    if (block.address != 0 && part.nbytes() == private_torch::storage_of(part)->nbytes()) {
      record(block, number_of(kUnknown, "shape", "", part));
    }
  });
}

}  // namespace pytracer::labels
