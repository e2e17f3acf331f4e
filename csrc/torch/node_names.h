// As soon as anybody hears of operators, the engine writes the name of each node that it runs, and
// demangles the name of the node's type every time: about 2 % of a step that is bound by the host.
// While we are the ones who hear, it finds the demangled name where it was left the last time.
#pragma once

namespace pytracer::node_names {

// Changes one entry of libtorch_cpu's table of imported functions, c10::demangle's. Where there is
// no such entry, or it cannot be written, nothing changes but the speed.
void install();
void uninstall();

}  // namespace pytracer::node_names
