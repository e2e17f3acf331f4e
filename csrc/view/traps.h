// Changes of files by system calls that are made directly, past libc: they reach the view, too.

#pragma once

namespace pytracer::view {

// From now on, in this process and all that it starts. Nothing happens where seccomp is forbidden.
void trap_changes();

}  // namespace pytracer::view
