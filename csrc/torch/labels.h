// Labels of live blocks: which block backs this parameter, that gradient, ... Tensors are only
// looked at, never held.
#pragma once

#include "../core/recorder.h"

#include <pybind11/pybind11.h>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pytracer::labels {

// Numbers of pytracer/data/schema.py's categories. A label of the category unknown has other news
// of a block: that an operator read it, or the shape of its tensor.
inline constexpr uint8_t kUnknown = 0;
inline constexpr uint8_t kGradients = 2;
inline constexpr uint8_t kInputs = 6;
inline constexpr uint8_t kFunctional = 10;

// A tensor's memory: a device and an address. Its stream and pool do not matter.
struct Block {
  uint64_t address = 0;  // 0 for none
  uint16_t place = 0;
};

Block block_of(const at::Tensor& tensor);

// Labels the block that backs the tensor; `label` is a row of the label table. A sparse tensor is
// its indices and values. False if there is no storage (meta, undefined).
bool record(const at::Tensor& tensor, uint32_t label);
bool record_block(const void* address, c10::Device device, uint32_t label);

// The gradient, without torch's warning about the gradients of non-leaves.
const at::Tensor& gradient_of(const at::Tensor& tensor);

// The row of the label table for a tensor of this kind.
uint32_t number_of(uint8_t category,
                   std::string_view role,
                   std::string_view name,
                   const at::Tensor& tensor);

// Makes CPU memory from before the trace visible, and its end too. Skips memory that is known
// already unless `also_known`. Returns how many blocks it has recorded.
size_t adopt_cpu(const at::Tensor& tensor, bool also_known);

// Tensors known by their places: under a key of a module's dictionary, in an optimizer's group. An
// entry refers only to the holder, and weakly. The program would notice a weak reference to the
// tensor itself, ours or Python's: torch refuses to swap tensors that have one, as module.to() does
// for tensor subclasses. The GIL guards it all, and nothing in here runs Python: no other thread
// gets a turn in the middle.
class Watched {
 public:
  // `path` leads from the holder to the tensor: an attribute, then keys. Returns whether the tensor
  // was new. A known tensor keeps its place and labels, or gets these `instead`.
  bool add(PyObject* tensor,
           PyObject* holder,
           PyObject* path,
           uint32_t label,
           uint32_t gradient_label,
           bool instead);
  // Labels the blocks of the tensors that are in these places now, or of their gradients. Returns
  // the number of places that are empty now, or have an unknown tensor. What a block is known as
  // already is recorded `again` only if asked for.
  size_t label(bool again = false);
  // Does nothing if several threads train: see calls::may_read_gradients. Gradients may be views of
  // memory from before the trace: that becomes visible here.
  size_t label_gradients();
  // Labels the gradients of parameters that this thread is about to read itself. Returns how many
  // parameters have one.
  size_t label_gradients_of(const std::vector<PyObject*>& tensors);

 private:
  static constexpr uint8_t kMainLooks = 4;

  struct Entry {
    pybind11::object holder;  // a weak reference
    pybind11::object path;
    PyObject* tensor;  // the last tensor there: an identity, not to be followed
    uint32_t label;
    uint32_t gradient_label;
    Recorder::Labelled labelled{};
    Recorder::Labelled gradient_labelled{};
    Recorder::Labelled main_labelled{};
    bool gradient_met = false;
    uint8_t main_looks = kMainLooks;  // so often it is still looked for in `main_grad`
    bool stands_in = false;           // no parameter, but in the place of one
  };

  // A container of several tensors: a module's dictionary. Their entries come one after another, so
  // it is looked up once for all of them.
  struct Shelf {
    pybind11::object holder;
    pybind11::object path;
    pybind11::object container;
    Py_ssize_t next = 0;  // in the dictionary, behind the last that was found in this order

    pybind11::object at(PyObject* key);  // null if there is none
  };

  static pybind11::object find(const Entry& entry, Shelf& last);
  static bool label_gradient(const at::Tensor& tensor, Entry& entry);
  static bool label_main_gradient(Entry& entry);
  // Null if there is none. An optimizer mostly has its parameters in the order of the entries: the
  // first places looked at are `next` and those behind it.
  Entry* entry_of(PyObject* tensor, size_t& next);
  template <class LabelOne>
  size_t each(LabelOne label_one);

  std::vector<Entry> entries_;
  std::unordered_map<PyObject*, size_t> known_;  // entries by their tensors' identities
};

void record_saved(const at::Tensor& tensor);
// Records the shape and dtype of a tensor that is its whole block. A view's would not be the
// block's.
void record_shape(const at::Tensor& tensor);

// One number for the tensors in nested dictionaries, lists, tuples and records, and for their
// memory. It changes if some are replaced. At the depth, a container counts by its own identity.
// Runs no Python.
uint64_t identity_of(PyObject* nested, int depth);

// The tensors with a storage that this one consists of: itself, or a sparse one's parts. Reads
// torch's own fields: no operator runs.
void each_part(const at::Tensor& tensor, c10::function_ref<void(const at::Tensor&)> found);

}  // namespace pytracer::labels
