#include "node_names.h"

#include "private_torch.h"

#include <c10/util/Type.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

namespace pytracer::node_names {

namespace {

using private_torch::Demangle;
using private_torch::demangle_entry;

std::string demangle_once(const char* name) {
  struct Known {
    std::string mangled;
    std::string text;
  };

  // By pointer: a shared library has little room for thread-locals.
  static thread_local auto names = std::make_unique<std::array<Known, 256>>();
  // A type's name keeps its address. Comparing the text covers a library that went while another
  // came.
  Known& known = (*names)[(reinterpret_cast<uintptr_t>(name) >> 3) % names->size()];
  if (known.mangled != name) {
    known = {name, c10::demangle(name)};
  }
  return known.text;
}

}  // namespace

void install() {
  if (demangle_entry() != nullptr) {
    __atomic_store_n(demangle_entry(), &demangle_once, __ATOMIC_RELEASE);
  }
}

void uninstall() {
  if (demangle_entry() != nullptr &&
      __atomic_load_n(demangle_entry(), __ATOMIC_ACQUIRE) == &demangle_once) {
    __atomic_store_n(demangle_entry(), static_cast<Demangle>(&c10::demangle), __ATOMIC_RELEASE);
  }
}

}  // namespace pytracer::node_names
