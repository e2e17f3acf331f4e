// The moments at which a recording looks at the program's objects: an outermost module begins or
// ends, a backward pass begins or ends, an optimizer steps.
//
// In the steady state nothing has changed since the last time, and none of our Python runs, except
// for DeepSpeed's engines, models that get caches, and saved-tensor hooks. When something is new (a
// module, a parameter, an optimizer's state), Python is called and learns it.
//
// The GIL must be held for all of it. A method returns false if it leaves an exception set: the
// caller passes that on to the program.
#pragma once

#include "labels.h"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace pytracer {

// Functions in Python that learn new things, by the names of their methods.
struct Listeners {
  pybind11::object name_of_module;      // (module) -> str, called once per module
  pybind11::object look_again;          // (): an unknown tensor is in a parameter's place
  pybind11::object note_attributes;     // (module): it may have got tensors
  pybind11::object cache_positions;     // (module) -> which of its arguments are caches
  pybind11::object tensors_of_caches;   // (caches) -> list of the tensors in them
  pybind11::object read_graph;          // (outputs): notes the tensors that the graph has saved
  pybind11::object read_graph_of_func;  // (outputs): the same, if torch.func made it
  pybind11::object note_variables;      // (): a backward pass begins beside the variables
  pybind11::object label_engines;       // (): engines of libraries that hide their parameters
  pybind11::object meet_optimizer;      // (optimizer): it is new, or its groups have grown
  pybind11::object label_state;         // (optimizer): its state has changed
  pybind11::object read_memory;         // (): some session's reading of the device is due
};

// Decides which graphs are read. A walk takes about 2 us a node, so not every graph is walked. The
// decision depends on the program's actions and never on its speed. A structure is the nodes and
// their edges, for any sizes of tensors. It is read in the first two passes that have it, and then
// in its 16th, 64th, 256th ... pass. If one pass of a step is read, all later passes of the step
// are.
class GraphWalks {
 public:
  bool is_due(uint64_t structure, bool must = false);

  // An optimizer has stepped: the next pass belongs to the next step.
  void stepped() { passes_ = 0; }

 private:
  bool is_due_by_itself(uint64_t structure);

  std::unordered_map<uint64_t, uint64_t> met_;  // by structure: the number of its passes
  int passes_ = 0;                              // of this step
  bool walking_ = false;
};

// The moments of one recording.
class Moments {
 public:
  labels::Watched watched;
  bool has_engines = false;

  // A DistributedDataParallel, held by a weak reference.
  void add_reducer(PyObject* module);
  // An optimizer whose state changes without a step of its own: SAM's changes in first_step().
  void add_optimizer(PyObject* optimizer);
  // Whether some are there, and none has a hook of the program's that sends its buckets.
  bool reducers_run_no_python();

  bool before_root(PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject* names);
  bool after_root();
  bool before_backward(PyObject* outputs, uint64_t structure, bool must);
  bool after_backward();
  bool before_step(PyObject* optimizer);
  bool after_step(PyObject* optimizer);

 private:
  // By weak reference only.
  struct Optimizer {
    pybind11::object reference;
    std::vector<Py_ssize_t> groups;  // sizes, which only grow
    bool steps = false;
    uint64_t state = 0;    // the identity of its tensors, see labels::identity_of
    uint64_t holders = 0;  // that of the containers that have each parameter's
  };

  struct CachePositions {
    pybind11::object type;  // a weak reference
    std::vector<Py_ssize_t> positions;
  };

  std::shared_ptr<Optimizer> entry_of(PyObject* optimizer);  // a new one if there is none
  bool label_changed_state(Optimizer& optimizer);
  bool label_replaced_state(Optimizer& optimizer);
  bool label_inside_a_step();
  bool label_inputs(PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject* names);
  bool find_caches(PyObject* module,
                   PyObject* const* args,
                   Py_ssize_t count,
                   PyObject* names,
                   pybind11::list& caches);

  GraphWalks walks_;
  uint64_t passes_ = 0;
  std::vector<pybind11::object> reducers_;
  std::unordered_map<PyObject*, uint64_t> entries_;  // of outermost modules, by identity
  std::unordered_map<PyObject*, CachePositions> cache_positions_;  // by classes
  std::vector<std::shared_ptr<Optimizer>> optimizers_;
  std::vector<std::shared_ptr<Optimizer>> stepping_;  // whose step has begun and not ended
  // The stepping optimizer's, borrowed, and empty between two looks. The list keeps its memory:
  // each new request of 1 KiB would make glibc tidy its whole heap.
  std::vector<PyObject*> parameters_;
};

namespace moments {

// Set once, for the life of the process: `hooks` has methods with the listeners' names.
void set_listeners(const pybind11::object& hooks);
const Listeners& listeners();
// Sets the moments of the next recording.
void use(std::shared_ptr<Moments> moments);
// The moments in use; null before any are.
std::shared_ptr<Moments> current();

}  // namespace moments

}  // namespace pytracer
