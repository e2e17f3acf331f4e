// Saved-tensor hooks written in C: they see each tensor that autograd saves, as it is saved.
//
// Torch stops checking versions as soon as any default hook is active, and a hook that returns
// an operator's output makes a reference cycle. These keep both promises themselves: pack stores
// a detached alias and the version, unpack compares and raises torch's own error.
#pragma once

#include <Python.h>

namespace pytracer::saved_tensors {

// New references to the two callables for torch._C._autograd._push_saved_tensors_default_hooks.
PyObject* pack_hook();
PyObject* unpack_hook();

}  // namespace pytracer::saved_tensors
