// What is learned about live blocks: which one backs this parameter, that gradient, ...
// Tensors are only looked at, never held.
#pragma once

#include <pybind11/pybind11.h>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pytracer::labels {

// Numbers of pytracer/schema.py's categories. A label of none says something else of a block: that
// an operator read it, what shape its tensor has.
inline constexpr uint8_t kUnknown = 0;
inline constexpr uint8_t kGradients = 2;
inline constexpr uint8_t kInputs = 6;
inline constexpr uint8_t kFunctional = 10;

// Where a tensor's memory lies: a device and an address; which stream or pool does not matter.
struct Block {
  uint64_t address = 0;  // 0 for none
  uint16_t place = 0;
};

Block block_of(const at::Tensor& tensor);

// The block that backs the tensor is what `label` (a row of the label table) says.
// A sparse tensor is its indices and values. False when there is no storage (meta, undefined).
bool record(const at::Tensor& tensor, uint32_t label);
bool record_block(const void* address, c10::Device device, uint32_t label);

// The gradient, without the warning that torch gives to whoever asks for that of a non-leaf.
const at::Tensor& gradient_of(const at::Tensor& tensor);

// The row of the label table for a tensor of this kind.
uint32_t number_of(uint8_t category,
                   std::string_view role,
                   std::string_view name,
                   const at::Tensor& tensor);

// Makes CPU memory from before the trace visible, and its end too; what is known already only if
// asked to. Returns how many blocks were written down.
size_t adopt_cpu(const at::Tensor& tensor, bool also_known);

// Tensors known by where they stand: under a key of a module's dictionary, in an optimizer's
// group. Only the holder is referred to, and weakly. A weak reference to the tensor itself, ours or
// Python's, would be seen by the program: torch refuses to swap tensors that have one, as
// module.to() does for tensor subclasses. The GIL guards it all, and nothing in here runs Python:
// no other thread gets a turn in the middle.
class Watched {
 public:
  // `path` leads from the holder to the tensor: an attribute, then keys. Returns whether the
  // tensor was new. One that is not is known as it was, or by this place and these labels
  // `instead`.
  bool add(PyObject* tensor,
           PyObject* holder,
           PyObject* path,
           uint32_t label,
           uint32_t gradient_label,
           bool instead);
  // Labels the blocks that back the tensors that stand there now, or their gradients. Returns at
  // how many places nobody stands any more, or somebody who is not known.
  size_t label();
  // Nothing, where several threads train: see calls::may_read_gradients. Gradients may be
  // views of memory from before the trace: that becomes visible here.
  size_t label_gradients();
  // Of parameters whose gradients this thread is about to read itself. Returns how many have one.
  size_t label_gradients_of(const std::vector<pybind11::object>& tensors);

 private:
  struct Entry {
    pybind11::object holder;  // a weak reference
    pybind11::object path;
    PyObject* tensor;  // who stood there last: an identity, not to be followed
    uint32_t label;
    uint32_t gradient_label;
    bool gradient_met = false;
    bool stands_in = false;  // it is no parameter, in the place of one
  };

  // Where tensors stand together: a module's dictionary. Their entries come one after another,
  // so it is looked up once for all of them.
  struct Shelf {
    pybind11::object holder;
    pybind11::object path;
    pybind11::object container;
  };

  static pybind11::object find(const Entry& entry, Shelf& last);
  static bool label_gradient(const at::Tensor& tensor, Entry& entry);
  template <class LabelOne>
  size_t each(LabelOne label_one);

  std::vector<Entry> entries_;
  std::unordered_map<PyObject*, size_t> known_;  // tensors' identities, and whose entry they have
};

void record_saved(const at::Tensor& tensor);
// Shape and dtype of a tensor that is its whole block: of a view they would not be the block's.
void record_shape(const at::Tensor& tensor);

// Which tensors there are in nested dictionaries, lists and tuples, and where in memory, as one
// number: it is another one when some were replaced. Runs no Python.
uint64_t identity_of(PyObject* nested);

// The tensors with a storage that this one is made of: itself, or a sparse one's parts. Asked of
// torch's own fields: no operator runs.
void each_part(const at::Tensor& tensor, c10::function_ref<void(const at::Tensor&)> found);

}  // namespace pytracer::labels
