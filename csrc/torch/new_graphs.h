// Tells of each torch.fx.GraphModule that is made: a compiler is at work, and this is its graph.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace pytracer::new_graphs {

// Calls `listener(graph_module)` from now on, whether anything records or not. `constructor` is
// GraphModule.__init__. Returns the problem, or "".
std::string tell(const pybind11::object& constructor, const pybind11::object& listener);

}  // namespace pytracer::new_graphs
