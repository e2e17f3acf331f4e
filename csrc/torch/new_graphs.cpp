#include "new_graphs.h"

#include "exchange.h"
#include "quietly.h"

namespace py = pybind11;

namespace pytracer::new_graphs {

namespace {

PyObject* constructed(PyObject* function, PyObject* const* args, size_t flags, PyObject* names);

// The type calls its __init__ from C, which takes the function's vectorcall in every Python.
FunctionExchange constructor_calls(&constructed);
PyObject* told = nullptr;  // held for ever

PyObject* constructed(PyObject* function, PyObject* const* args, size_t flags, PyObject* names) {
  PyObject* result = constructor_calls.original()(function, args, flags, names);
  if (result != nullptr && told != nullptr && PyVectorcall_NARGS(flags) > 0 &&
      !quietly::call(told, args, 1)) {
    Py_CLEAR(result);  // the program must see what its signal handler raised
  }
  return result;
}

}  // namespace

std::string tell(const py::object& constructor, const py::object& listener) {
  Py_XSETREF(told, py::object(listener).release().ptr());
  return constructor_calls.put(constructor.ptr()) ? "" : "GraphModule.__init__ is no function";
}

}  // namespace pytracer::new_graphs
