#include "frame_locals.h"

#include <cstring>
#include <initializer_list>

#if PY_VERSION_HEX < 0x030b0000
#include <frameobject.h>
#elif PY_VERSION_HEX < 0x030c0000
#define Py_BUILD_CORE 1  // 3.11 has neither a public function nor a public struct
#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace pytracer::frame_locals {

namespace {

// A value that inner functions share lies in a cell. Borrowed, or null if there is none yet.
[[maybe_unused]] PyObject* out_of_cell(PyObject* value) {
  return value != nullptr && PyCell_Check(value) ? PyCell_GET(value) : value;
}

#if PY_VERSION_HEX >= 0x030c0000

// visit(name, value) for each, until it returns false.
template <class Visit>
void each(PyFrameObject* frame, Visit visit) {
  PyCodeObject* code = PyFrame_GetCode(frame);
  for (const char* attribute : {"co_varnames", "co_cellvars", "co_freevars"}) {
    PyObject* names = PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), attribute);
    Py_ssize_t count = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
    bool go_on = true;
    for (Py_ssize_t i = 0; go_on && i < count; ++i) {
      PyObject* name = PyTuple_GET_ITEM(names, i);
      PyObject* value = PyFrame_GetVar(frame, name);
      PyErr_Clear();  // it has no value yet, or none any more
      go_on = value == nullptr || visit(name, value);
      Py_XDECREF(value);
    }
    Py_XDECREF(names);
    PyErr_Clear();
    if (!go_on) {
      break;
    }
  }
  Py_DECREF(code);
}

#elif PY_VERSION_HEX >= 0x030b0000

template <class Visit>
void each(PyFrameObject* frame, Visit visit) {
  const _PyInterpreterFrame* running = frame->f_frame;
  PyCodeObject* code = running->f_code;
  for (int i = 0; i < code->co_nlocalsplus; ++i) {
    PyObject* name = PyTuple_GET_ITEM(code->co_localsplusnames, i);
    PyObject* value = running->localsplus[i];
    bool shared = (PyBytes_AS_STRING(code->co_localspluskinds)[i] & (CO_FAST_CELL | CO_FAST_FREE));
    value = shared ? out_of_cell(value) : value;
    if (value != nullptr && !visit(name, value)) {
      break;
    }
  }
}

#else

template <class Visit>
void each(PyFrameObject* frame, Visit visit) {
  PyCodeObject* code = frame->f_code;
  PyObject** values = frame->f_localsplus;
  for (PyObject* names : {code->co_varnames, code->co_cellvars, code->co_freevars}) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i, ++values) {
      PyObject* value = names == code->co_varnames ? *values : out_of_cell(*values);
      if (value != nullptr && !visit(PyTuple_GET_ITEM(names, i), value)) {
        return;
      }
    }
  }
}

#endif

}  // namespace

PyObject* all(PyFrameObject* frame) {
  PyObject* found = PyDict_New();
  if (found != nullptr) {
    each(frame, [found](PyObject* name, PyObject* value) {
      return PyDict_SetItem(found, name, value) == 0;
    });
    if (PyErr_Occurred() != nullptr) {
      Py_CLEAR(found);
    }
  }
  return found;
}

PyObject* one(PyFrameObject* frame, const char* name) {
  PyObject* found = nullptr;
  each(frame, [&](PyObject* known, PyObject* value) {
    if (PyUnicode_CompareWithASCIIString(known, name) == 0) {
      found = Py_NewRef(value);
    }
    return found == nullptr;
  });
  return found;
}

}  // namespace pytracer::frame_locals
