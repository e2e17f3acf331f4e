// The Python stack of the calling thread, as a row of the recorder's stack table.
#pragma once

#include <cstdint>

namespace pytracer::python_stacks {

void install();
void uninstall();
// Whether code that torch.compile wrote may run: then each allocation asks for its line there.
void expect_generated(bool is_expected);
// Releases what is held of the program. The GIL must be held.
void clear();

}  // namespace pytracer::python_stacks
