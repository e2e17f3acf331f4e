// Looks at autograd's graph before the engine runs it.
#pragma once

#include <Python.h>

#include <cstdint>

namespace pytracer::graph {

struct Look {
  // Whether a backward pass runs nothing but nodes of torch's own: no Function that the program has
  // written, and no hook. Then no Python runs in the pass, and nobody can begin to listen to its
  // operators.
  bool is_plain = false;
  // Whether a gradient may be freed during the pass: by a hook that receives each gradient, or by
  // FSDP's own nodes.
  bool may_drop_gradients = false;
  // The same for graphs of the same nodes with the same edges, whatever their tensors' sizes.
  uint64_t structure = 0;
  // The first of its nodes that an operator seen on this thread has made since, -1 for none.
  int64_t first_number = -1;
};

// At the graph behind these outputs, at about 50 ns a node. The GIL must be held. `since`: the
// number that the thread's next node had when the pass before was over.
Look look_at(PyObject* outputs, uint64_t since);

}  // namespace pytracer::graph
