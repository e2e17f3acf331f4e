// Puts our functions where Python finds the code of a callable. The callable itself, its type and
// everything that refers to it stay the same objects.
#pragma once

#include <Python.h>

namespace pytracer {

// A function of METH_FASTCALL | METH_KEYWORDS. Its public name differs between releases of Python.
using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

// The vectorcall of one Python function.
class FunctionExchange {
 public:
  explicit FunctionExchange(vectorcallfunc ours) : ours_(ours) {}

  // False if `function` is no Python function. It is kept alive for as long as ours is there.
  bool put(PyObject* function);
  // If somebody has put another one there meanwhile, theirs stays.
  void take_away();

  bool is_put() const { return function_ != nullptr; }

  // The function that ours replaces. Valid for ever: a call may still be on its way.
  vectorcallfunc original() const { return original_; }

 private:
  vectorcallfunc ours_;
  vectorcallfunc original_ = nullptr;
  PyFunctionObject* function_ = nullptr;
};

// The entry of one method or function in its extension's table.
class MethodExchange {
 public:
  explicit MethodExchange(PyCFunctionWithKeywords ours, FastFunction ours_if_fast = nullptr)
      : ours_(ours), ours_if_fast_(ours_if_fast) {}

  // False if `callable` has no such entry, takes its arguments in another way, or if its entry lies
  // in memory that must not be written.
  bool put(PyObject* callable);
  void take_away();

  bool is_put() const { return entry_ != nullptr; }

  // The function that ours replaces, by the way in which it takes arguments. Valid for ever.
  PyCFunctionWithKeywords original() const;
  FastFunction fast_original() const;

 private:
  PyCFunction ours_for(int flags) const;

  PyCFunctionWithKeywords ours_;
  FastFunction ours_if_fast_;
  PyCFunction original_ = nullptr;
  PyMethodDef* entry_ = nullptr;
};

// Whether a MethodExchange for both ways of taking arguments could put ours there.
bool has_exchangeable_entry(PyObject* callable);

// Whether data at this address may be written. False for data that the loader has made read-only.
bool is_writable(const void* address);

}  // namespace pytracer
