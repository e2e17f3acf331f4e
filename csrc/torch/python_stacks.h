// The Python stack of the calling thread, as a row of the recorder's stack table.
#pragma once

#include <cstdint>

namespace pytracer::python_stacks {

void install();
void uninstall();
// Whether code that torch.compile wrote may run: then each allocation asks for its line there.
void expect_generated(bool is_expected);

// How many frames of Python are between generated code and an allocation. None on a device.
void allocates_in_python(int frames);
// Releases what is held of the program. The GIL must be held.
void clear();

}  // namespace pytracer::python_stacks
