// Puts the replaced calls into the tables of the libraries of a process that runs already.

#include "calls.h"
#include "tree.h"

#include <cstring>
#include <elf.h>
#include <link.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <unordered_map>

namespace pytracer::view {

namespace {

#if defined(__x86_64__)
constexpr uint32_t kTypes[] = {R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT, R_X86_64_64};
#elif defined(__aarch64__)
constexpr uint32_t kTypes[] = {R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT, R_AARCH64_ABS64};
#else
#error "the view knows x86-64 and arm64"
#endif

struct Slot {
  void** at;
  void* theirs;
  void* ours;
  bool is_read_only;
};

struct Tables {
  std::vector<Slot> slots;
  unsigned long long loaded = 0;  // libraries so far
  unsigned long long unloaded = 0;
  std::unordered_map<std::string, void*> ours;
};

Tables& tables() {
  static auto* all = new Tables;
  return *all;
}

void put(const Slot& slot, void* value) {
  auto page = reinterpret_cast<uintptr_t>(slot.at) & ~uintptr_t(sysconf(_SC_PAGESIZE) - 1);
  size_t size = reinterpret_cast<uintptr_t>(slot.at) + sizeof(void*) - page;
  auto* from = reinterpret_cast<void*>(page);
  if (slot.is_read_only) {
    mprotect(from, size, PROT_READ | PROT_WRITE);
  }
  __atomic_store_n(slot.at, value, __ATOMIC_RELEASE);
  if (slot.is_read_only) {
    mprotect(from, size, PROT_READ);
  }
}

struct Library {
  ElfW(Addr) base = 0;
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  ElfW(Addr) read_only = 0, read_only_end = 0;

  void look(const ElfW(Rela) * rows, size_t bytes, size_t skip) const {
    size_t count = bytes / sizeof(ElfW(Rela));
    for (size_t i = skip; i < count; i++) {
      auto type = uint32_t(ELF64_R_TYPE(rows[i].r_info));
      if ((type != kTypes[0] && type != kTypes[1] && type != kTypes[2]) || rows[i].r_addend != 0) {
        continue;
      }
      const ElfW(Sym) & symbol = symbols[ELF64_R_SYM(rows[i].r_info)];
      if (symbol.st_shndx != SHN_UNDEF) {
        continue;  // its own function of that name
      }
      auto found = tables().ours.find(names + symbol.st_name);
      if (found == tables().ours.end()) {
        continue;
      }
      ElfW(Addr) at = base + rows[i].r_offset;
      auto** slot = reinterpret_cast<void**>(at);
      if (*slot != nullptr && *slot != found->second) {
        bool is_read_only = at >= read_only && at < read_only_end;
        tables().slots.push_back({slot, *slot, found->second, is_read_only});
      }
    }
  }
};

int look_at(struct dl_phdr_info* info, size_t, void*) {
  Library library;
  library.base = info->dlpi_addr;
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) & part = info->dlpi_phdr[i];
    ElfW(Addr) begin = library.base + part.p_vaddr, end = begin + part.p_memsz;
    auto own = reinterpret_cast<ElfW(Addr)>(&look_at);
    if (part.p_type == PT_LOAD && own >= begin && own < end) {
      return 0;  // this library
    }
    if (part.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(begin);
    } else if (part.p_type == PT_GNU_RELRO) {
      library.read_only = begin;
      library.read_only_end = end;
    }
  }
  std::string name = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  name = name.substr(name.rfind('/') + 1);
  bool is_the_systems = name.rfind("libc.so", 0) == 0 || name.rfind("ld-", 0) == 0 ||
                        name.find("vdso") != std::string::npos;
  if (dynamic == nullptr || is_the_systems) {
    return 0;
  }
  const ElfW(Rela) * rows[2] = {};
  size_t bytes[2] = {}, relative = 0;
  for (; dynamic->d_tag != DT_NULL; dynamic++) {
    ElfW(Addr) value = dynamic->d_un.d_ptr;
    switch (dynamic->d_tag) {
      case DT_SYMTAB:
        library.symbols = reinterpret_cast<const ElfW(Sym)*>(value);
        break;
      case DT_STRTAB:
        library.names = reinterpret_cast<const char*>(value);
        break;
      case DT_RELA:
        rows[0] = reinterpret_cast<const ElfW(Rela)*>(value);
        break;
      case DT_RELASZ:
        bytes[0] = value;
        break;
      case DT_RELACOUNT:
        relative = value;
        break;  // come first, and name nothing
      case DT_JMPREL:
        rows[1] = reinterpret_cast<const ElfW(Rela)*>(value);
        break;
      case DT_PLTRELSZ:
        bytes[1] = value;
        break;
      default:
        break;
    }
  }
  if (library.symbols != nullptr && library.names != nullptr) {
    library.look(rows[0], bytes[0], relative);
    library.look(rows[1], bytes[1], 0);
  }
  return 0;
}

int count_libraries(struct dl_phdr_info* info, size_t, void* into) {
  auto* counts = static_cast<unsigned long long*>(into);
  counts[0] = info->dlpi_adds;
  counts[1] = info->dlpi_subs;
  return 1;
}

// Finds the tables of libraries that are new.
bool look_again() {
  unsigned long long counts[2] = {};
  dl_iterate_phdr(count_libraries, counts);
  Tables& all = tables();
  if (counts[0] == all.loaded && counts[1] == all.unloaded) {
    return false;
  }
  all.loaded = counts[0];
  all.unloaded = counts[1];
  return true;
}

}  // namespace

std::vector<Call>& calls() {
  static auto* all = new std::vector<Call>;
  return *all;
}

}  // namespace pytracer::view

using namespace pytracer::view;

#define FOR_PYTHON extern "C" __attribute__((visibility("default")))

// Covers libraries that were loaded since the view began. The caller holds Python's lock.
FOR_PYTHON void pytracer_view_look() {
  if (!look_again()) {
    return;
  }
  size_t known = tables().slots.size();
  dl_iterate_phdr(look_at, nullptr);
  for (size_t i = known; i < tables().slots.size(); i++) {
    put(tables().slots[i], tables().slots[i].ours);
  }
}

FOR_PYTHON void pytracer_view_begin(const char* folder, const char* children_write, int network) {
  Tables& all = tables();
  for (const Call& call : calls()) {
    all.ours[call.name] = call.ours;
  }
  all.loaded = all.unloaded = 0;
  restrict_children(children_write);
  begin(folder, "", network != 0);
  pytracer_view_look();
}

FOR_PYTHON void pytracer_view_end() {
  Tables& all = tables();
  end();
  restrict_children("");
  for (const Slot& slot : all.slots) {
    put(slot, slot.theirs);
  }
  all.slots.clear();
}
