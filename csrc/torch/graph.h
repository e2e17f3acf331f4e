// Looks at autograd's graph before the engine runs it.
#pragma once

#include <Python.h>

#include <cstdint>

namespace torch::autograd {
struct Node;
}

namespace pytracer::graph {

struct Look {
  // Whether a backward pass runs only nodes of torch's own: no Function of the program's, and no
  // hook. Then no Python runs in the pass, and nobody can begin to listen to its operators.
  bool is_plain = false;
  // Whether DistributedDataParallel reduces gradients in the pass. That is torch's own as well, but
  // for a hook of the program's that sends the buckets.
  bool is_reduced = false;
  // Whether a gradient may be freed during the pass: by a hook that receives each gradient, or by
  // FSDP's own nodes.
  bool may_drop_gradients = false;
  // Equal for graphs of the same nodes with the same edges, for any sizes of their tensors.
  uint64_t structure = 0;
  // The first node that a recorded operator of this thread has made since then, -1 for none.
  int64_t first_number = -1;
};

// Whether the program, or a library, has a hook on the node.
bool has_hooks(torch::autograd::Node& node);

// Looks at the graph behind these outputs, at about 50 ns a node. The GIL must be held. `since` is
// the number of the thread's next node at the end of the pass before.
Look look_at(PyObject* outputs, uint64_t since);

}  // namespace pytracer::graph
