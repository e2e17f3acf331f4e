// As soon as anybody listens to operators, the engine writes the name of each node that it runs,
// and demangles the name of the node's type every time: about 2 % of a host-bound step. While we
// listen, it gets the demangled name from a cache.
#pragma once

namespace pytracer::node_names {

// Changes one entry of libtorch_cpu's table of imported functions, c10::demangle's. Without an
// entry that can be written, only the speed differs.
void install();
void uninstall();

}  // namespace pytracer::node_names
