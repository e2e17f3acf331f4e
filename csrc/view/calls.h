// The functions of libc that the view replaces. In a process of its own they come first by
// LD_PRELOAD. In a process that runs already, `hooks.cpp` puts them into the tables of its
// libraries.

#pragma once

#include <vector>

namespace pytracer::view {

struct Call {
  const char* name;
  void* ours;
};

std::vector<Call>& calls();  // all of them

inline bool add(const char* name, void* ours) {
  calls().push_back({name, ours});
  return true;
}

void* libcs(const char* name);  // the function that is replaced

// A process that is started from here is restricted to write in these folders; "" for none.
void restrict_children(const char* folders);

}  // namespace pytracer::view

// Defines a function by libc's name. Headers of libc declare it with other attributes.
#define REPLACES(type, name, ...)                                                                 \
  extern "C" __attribute__((visibility("default"))) type view_##name(__VA_ARGS__) __asm__(#name); \
  [[maybe_unused]] static const bool added_##name =                                               \
      pytracer::view::add(#name, reinterpret_cast<void*>(&view_##name));                          \
  type view_##name(__VA_ARGS__)
