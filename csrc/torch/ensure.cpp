#include "ensure.h"

#include "../core/step_rows.h"
#include "quietly.h"

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace pytracer {

namespace {

PyObject* sessions_over = nullptr;

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Keeps an exception that is on its way.
void end_what_is_held_by(PyObject* object) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* held = PyObject_GetAttrString(object, "_held");
  if (held != nullptr && py::isinstance<Held>(held)) {
    py::handle(held).cast<Held&>().end();
  }
  PyErr_Clear();
  Py_XDECREF(held);
  PyErr_Restore(type, value, traceback);
}

bool holds_something_open(PyObject* object) {
  PyObject* held = PyObject_GetAttrString(object, "_held");
  bool is_open =
      held != nullptr && py::isinstance<Held>(held) && py::handle(held).cast<Held&>().is_open();
  PyErr_Clear();
  Py_XDECREF(held);
  return is_open;
}

// `method` is the function in Python; args[0] is the object.
PyObject* call_and_end_if_it_raises(PyObject* method, PyObject* args, PyObject* kwargs) {
  bool was_open = PyTuple_GET_SIZE(args) > 0 && holds_something_open(PyTuple_GET_ITEM(args, 0));
  PyObject* result = PyObject_Call(method, args, kwargs);
  if (result == nullptr && !was_open && PyTuple_GET_SIZE(args) > 0) {
    end_what_is_held_by(PyTuple_GET_ITEM(args, 0));
  }
  return result;
}

PyObject* call_and_end(PyObject* method, PyObject* args, PyObject* kwargs) {
  if (is_finalizing()) {
    Py_RETURN_NONE;  // the interpreter ends: open sessions were ended at exit
  }
  PyObject* result = PyObject_Call(method, args, kwargs);
  if (PyTuple_GET_SIZE(args) > 0) {
    end_what_is_held_by(PyTuple_GET_ITEM(args, 0));
  }
  return result;
}

template <PyObject* (*function)(PyObject*, PyObject*, PyObject*)>
py::object bound_to(const py::function& method) {
  static PyMethodDef definition{"method",
                                reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)),
                                METH_VARARGS | METH_KEYWORDS,
                                nullptr};
  auto called = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, method.ptr()));
  auto bound = py::reinterpret_steal<py::object>(PyInstanceMethod_New(called.ptr()));
  if (!bound) {
    throw py::error_already_set();
  }
  return bound;
}

}  // namespace

std::shared_ptr<Session> Held::session() {
  auto session = std::make_shared<Session>();
  std::erase_if(sessions_, [](const auto& known) { return known.expired(); });
  sessions_.push_back(session);
  return session;
}

void Held::count_steps(const py::function& counter, const py::object& rows) {
  auto* native = rows.cast<StepRows*>();  // null for None
  counter_ = counter;
  rows_ = rows;
  sessions::count_steps(counter_.ptr(), native);
}

bool Held::is_open() const {
  auto open = [](const auto& known) {
    auto session = known.lock();
    return session && session->is_open();
  };
  return counter_ || std::any_of(sessions_.begin(), sessions_.end(), open);
}

void Held::end() {
  if (py::object counter = std::exchange(counter_, py::object())) {
    sessions::count_no_steps(counter.ptr());
    rows_ = py::object();
  }
  bool were_open = false;
  for (const auto& known : std::exchange(sessions_, {})) {
    if (auto session = known.lock(); session && session->is_open()) {
      session->end();
      were_open = true;
    }
  }
  if (were_open && sessions_over != nullptr && !quietly::call(sessions_over, nullptr, 0)) {
    quietly::raise_later();
  }
}

void Held::set_listener(PyObject* listener) {
  PyObject* before = std::exchange(sessions_over, Py_NewRef(listener));
  Py_XDECREF(before);
}

py::object ends_if_it_raises(const py::function& method) {
  return bound_to<&call_and_end_if_it_raises>(method);
}

py::object ends_always(const py::function& method) {
  return bound_to<&call_and_end>(method);
}

}  // namespace pytracer
