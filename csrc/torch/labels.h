// What is learned about live blocks: which one backs this parameter, that gradient, ...
// Tensors are only looked at, never held.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pytracer::labels {

// The block that backs the tensor is what `label` (a row of the label table) says.
// False when the tensor has no storage of its own (meta, sparse, undefined).
bool record(const at::Tensor& tensor, uint32_t label);

// The gradient of each tensor that has one.
void record_gradients(const std::vector<at::Tensor>& tensors, const std::vector<uint32_t>& labels);

void record_saved(const at::Tensor& tensor);

}  // namespace pytracer::labels
