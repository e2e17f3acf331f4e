// Saved-tensor hooks written in C: they see each tensor that autograd saves, as it is saved.
//
// Torch stops checking versions as soon as any default hook is active, and a hook that returns
// an operator's output makes a reference cycle. So pack lets torch save once more without hooks,
// and unpack lets it unpack: the check and its error are torch's own.
#pragma once

#include <Python.h>

namespace pytracer::saved_tensors {

// New references to the two callables for torch._C._autograd._push_saved_tensors_default_hooks.
PyObject* pack_hook();
PyObject* unpack_hook();

}  // namespace pytracer::saved_tensors
