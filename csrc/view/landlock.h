// The kernel's own refusal to write outside of some folders. It holds for what `calls.cpp` does not
// see: programs linked statically, and system calls made directly.

#pragma once

namespace pytracer::view {

// Restricts the calling thread and what it starts to write in these folders, joined by colons.
// False if the kernel has no Landlock.
bool restrict_writing(const char* folders);

}  // namespace pytracer::view
