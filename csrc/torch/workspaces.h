// The scratch memory that torch gives to cuBLAS and cuBLASLt and keeps with their handles for good.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pytracer::workspaces {

// Labels each block that is one now; `label` is a row of the label table. Returns their number: 0
// if torch has no CUDA, or keeps them in another way.
size_t label(uint32_t label);

}  // namespace pytracer::workspaces
