// Looks at autograd's graph before the engine runs it.
#pragma once

#include <Python.h>

namespace pytracer::graph {

// Whether a backward pass from these outputs runs nothing but nodes of torch's own: no Function
// that the program has written, and no hook. Then no Python runs in the pass, and nobody can begin
// to listen to its operators. The GIL must be held.
bool is_plain(PyObject* outputs);

}  // namespace pytracer::graph
