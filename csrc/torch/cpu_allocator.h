// The CPU allocator's events. While installed, torch's CPU allocator is one of ours that forwards
// every request and reports it.
#pragma once

#include <string>

namespace c10 {
struct StorageImpl;
}

namespace pytracer::cpu_allocator {

// Returns an empty string, or why the allocator in place cannot be wrapped.
std::string install();
void uninstall();
bool installed();

// Records that a block from before is alive, and makes its free visible. Returns false for memory
// that is not the CPU allocator's (numpy's, shared, mapped from a file).
bool adopt(c10::StorageImpl& storage);
// Whether its free will be recorded: it was made while this was installed, or adopted.
bool knows(const c10::StorageImpl& storage);

}  // namespace pytracer::cpu_allocator
