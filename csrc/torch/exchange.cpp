#include "exchange.h"

#include <cstdint>
#include <link.h>

namespace pytracer {

namespace {

// How a method may take its arguments.
constexpr int kPlain = METH_VARARGS | METH_KEYWORDS;
constexpr int kFast = METH_FASTCALL | METH_KEYWORDS;

struct Search {
  uintptr_t address;
  bool writable = true;  // an address in no library is on the heap
};

// Python's tables have one type for functions of all kinds.
template <class To, class From>
To as(From function) {
  return reinterpret_cast<To>(reinterpret_cast<void*>(function));
}

bool lies_in(uintptr_t address, const dl_phdr_info& library, const ElfW(Phdr) & segment) {
  uintptr_t begin = library.dlpi_addr + segment.p_vaddr;
  return address >= begin && address < begin + segment.p_memsz;
}

int look_in_library(dl_phdr_info* library, size_t /*size*/, void* argument) {
  auto& search = *static_cast<Search*>(argument);
  bool loaded = false;
  bool writable = false;
  bool protected_later = false;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const auto& segment = library->dlpi_phdr[i];
    if (lies_in(search.address, *library, segment)) {
      loaded |= segment.p_type == PT_LOAD;
      writable |= segment.p_type == PT_LOAD && (segment.p_flags & PF_W) != 0;
      protected_later |= segment.p_type == PT_GNU_RELRO;
    }
  }
  if (loaded) {
    search.writable = writable && !protected_later;
  }
  return loaded ? 1 : 0;
}

PyMethodDef* entry_of(PyObject* callable) {
  if (PyCFunction_CheckExact(callable)) {
    return reinterpret_cast<PyCFunctionObject*>(callable)->m_ml;
  }
  if (Py_IS_TYPE(callable, &PyMethodDescr_Type)) {
    return reinterpret_cast<PyMethodDescrObject*>(callable)->d_method;
  }
  return nullptr;
}

void set_vectorcall(PyFunctionObject* function, vectorcallfunc with) {
#if PY_VERSION_HEX >= 0x030c0000
  PyFunction_SetVectorcall(function, with);
#else
  function->vectorcall = with;
#endif
}

}  // namespace

bool is_writable(const void* address) {
  Search search{reinterpret_cast<uintptr_t>(address)};
  dl_iterate_phdr(&look_in_library, &search);
  return search.writable;
}

bool has_exchangeable_entry(PyObject* callable) {
  const PyMethodDef* entry = callable != nullptr ? entry_of(callable) : nullptr;
  return entry != nullptr && (entry->ml_flags == kPlain || entry->ml_flags == kFast) &&
         is_writable(entry);
}

bool FunctionExchange::put(PyObject* function) {
  if (is_put()) {
    return true;
  }
  if (function == nullptr || !PyFunction_Check(function)) {
    return false;
  }
  auto* found = reinterpret_cast<PyFunctionObject*>(function);
  if (found->vectorcall != ours_) {  // else a wrapper from before has put ours back
    original_ = found->vectorcall;
    set_vectorcall(found, ours_);
  }
  function_ = reinterpret_cast<PyFunctionObject*>(Py_NewRef(function));
  return true;
}

void FunctionExchange::take_away() {
  if (!is_put()) {
    return;
  }
  PyFunctionObject* function = function_;
  function_ = nullptr;
  if (function->vectorcall == ours_) {
    set_vectorcall(function, original_);
  }
  Py_DECREF(function);
}

bool MethodExchange::put(PyObject* callable) {
  if (is_put()) {
    return true;
  }
  PyMethodDef* entry = callable != nullptr ? entry_of(callable) : nullptr;
  PyCFunction ours = entry != nullptr ? ours_for(entry->ml_flags) : nullptr;
  if (ours == nullptr || !is_writable(entry)) {
    return false;
  }
  if (entry->ml_meth != ours) {
    original_ = entry->ml_meth;
    entry->ml_meth = ours;
  }
  entry_ = entry;
  return true;
}

void MethodExchange::take_away() {
  if (is_put() && entry_->ml_meth == ours_for(entry_->ml_flags)) {
    entry_->ml_meth = original_;
  }
  entry_ = nullptr;
}

PyCFunctionWithKeywords MethodExchange::original() const {
  return as<PyCFunctionWithKeywords>(original_);
}

FastFunction MethodExchange::fast_original() const {
  return as<FastFunction>(original_);
}

PyCFunction MethodExchange::ours_for(int flags) const {
  if (flags == kPlain) {
    return as<PyCFunction>(ours_);
  }
  return flags == kFast ? as<PyCFunction>(ours_if_fast_) : nullptr;
}

}  // namespace pytracer
