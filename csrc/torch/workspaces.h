// The scratch that torch gives to cuBLAS and cuBLASLt and keeps with their handles for good.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pytracer::workspaces {

// Says of each block that is one now that it is what `label` (a row of the label table) says.
// Returns how many there were: none where torch has no CUDA, or keeps them in another way.
size_t label(uint32_t label);

}  // namespace pytracer::workspaces
