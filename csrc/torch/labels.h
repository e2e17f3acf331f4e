// What is learned about live blocks: which one backs this parameter, that gradient, ...
// Tensors are only looked at, never held.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_set>
#include <vector>

namespace pytracer::labels {

// The block that backs the tensor is what `label` (a row of the label table) says.
// False when the tensor has no storage of its own (meta, sparse, undefined).
bool record(const at::Tensor& tensor, uint32_t label);

// Tensors known by torch's own weak references. Python's would be seen by the program:
// torch.utils.swap_tensors refuses tensors that have any. The GIL guards it.
class Watched {
 public:
  // Returns whether the tensor was new.
  bool add(const at::Tensor& tensor, uint32_t label, uint32_t gradient_label);
  // Labels the blocks that back the tensors now, or their gradients. Returns how many tensors
  // have died since the last time.
  size_t label();
  size_t label_gradients();

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    uint32_t label;
    uint32_t gradient_label;
  };

  template <class LabelOne>
  size_t each(LabelOne label_one);

  std::vector<Entry> entries_;
  std::unordered_set<const c10::TensorImpl*> known_;  // an entry keeps the address from reuse
};

void record_saved(const at::Tensor& tensor);

}  // namespace pytracer::labels
