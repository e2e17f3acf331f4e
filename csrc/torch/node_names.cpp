#include "node_names.h"

#include <c10/util/Type.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <elf.h>
#include <link.h>
#include <memory>
#include <string>

namespace pytracer::node_names {

namespace {

using Demangle = std::string (*)(const char*);
using Dynamic = ElfW(Dyn);
using Relocation = ElfW(Rela);
using Symbol = ElfW(Sym);

constexpr char kLibrary[] = "libtorch_cpu.so";
constexpr char kFunction[] = "_ZN3c108demangleB5cxx11EPKc";

std::string demangle_once(const char* name) {
  struct Known {
    std::string mangled;
    std::string text;
  };

  // By pointer: the room that a shared library has for thread-locals is small.
  static thread_local auto names = std::make_unique<std::array<Known, 256>>();
  // A type's name stays where it is; the text is compared in case a library went and another came.
  Known& known = (*names)[(reinterpret_cast<uintptr_t>(name) >> 3) % names->size()];
  if (known.mangled != name) {
    known = {name, c10::demangle(name)};
  }
  return known.text;
}

// Where a loaded library keeps what it needs to find its imports.
struct Imports {
  const Relocation* entries = nullptr;
  size_t bytes = 0;
  const Symbol* symbols = nullptr;
  const char* texts = nullptr;
};

Imports imports_of(const Dynamic* dynamic) {
  Imports found;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    switch (dynamic->d_tag) {
      case DT_JMPREL:
        found.entries = reinterpret_cast<const Relocation*>(dynamic->d_un.d_ptr);
        break;
      case DT_PLTRELSZ:
        found.bytes = dynamic->d_un.d_val;
        break;
      case DT_SYMTAB:
        found.symbols = reinterpret_cast<const Symbol*>(dynamic->d_un.d_ptr);
        break;
      case DT_STRTAB:
        found.texts = reinterpret_cast<const char*>(dynamic->d_un.d_ptr);
        break;
      default:
        break;
    }
  }
  return found;
}

// Called for each library; stops at ours. What is made read-only after loading is left alone.
int find_entry(dl_phdr_info* library, size_t /*size*/, void* result) {
  const char* file = std::strrchr(library->dlpi_name, '/');
  if (std::strcmp(file != nullptr ? file + 1 : library->dlpi_name, kLibrary) != 0) {
    return 0;
  }
  const Dynamic* dynamic = nullptr;
  uintptr_t read_only = 0;
  uintptr_t read_only_end = 0;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const auto& segment = library->dlpi_phdr[i];
    if (segment.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const Dynamic*>(library->dlpi_addr + segment.p_vaddr);
    } else if (segment.p_type == PT_GNU_RELRO) {
      read_only = library->dlpi_addr + segment.p_vaddr;
      read_only_end = read_only + segment.p_memsz;
    }
  }
  if (dynamic == nullptr) {
    return 1;
  }
  const Imports imports = imports_of(dynamic);
  for (size_t i = 0; i < imports.bytes / sizeof(Relocation); ++i) {
    const Relocation& entry = imports.entries[i];
    const Symbol& symbol = imports.symbols[ELF64_R_SYM(entry.r_info)];
    uintptr_t address = library->dlpi_addr + entry.r_offset;
    bool writable = address < read_only || address >= read_only_end;
    if (writable && std::strcmp(imports.texts + symbol.st_name, kFunction) == 0) {
      *static_cast<Demangle**>(result) = reinterpret_cast<Demangle*>(address);
      break;
    }
  }
  return 1;
}

Demangle* entry() {
  static Demangle* const found = [] {
    Demangle* result = nullptr;
    dl_iterate_phdr(&find_entry, static_cast<void*>(&result));
    return result;
  }();
  return found;
}

}  // namespace

void install() {
  if (entry() != nullptr) {
    __atomic_store_n(entry(), &demangle_once, __ATOMIC_RELEASE);
  }
}

void uninstall() {
  if (entry() != nullptr && __atomic_load_n(entry(), __ATOMIC_ACQUIRE) == &demangle_once) {
    __atomic_store_n(entry(), static_cast<Demangle>(&c10::demangle), __ATOMIC_RELEASE);
  }
}

}  // namespace pytracer::node_names
