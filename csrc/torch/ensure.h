// Methods that end what their object has begun, whatever interrupts their Python.
//
// A Ctrl-C may come between any two lines of Python: also in a `finally`, before its first call.
// So the work that must happen in any case happens in C, after the method's Python.
#pragma once

#include "session.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

namespace pytracer {

// The sessions and the counter of steps that one object has begun. It is the object's attribute
// `_held`.
class Held {
 public:
  Held() = default;
  Held(const Held&) = delete;  // it ends once
  Held& operator=(const Held&) = delete;

  std::shared_ptr<Session> session();
  // Calls the counter after each training step, until the end; with `rows` (a StepRows or None),
  // after those that must be told.
  void count_steps(const pybind11::function& counter, const pybind11::object& rows);
  bool is_open() const;
  // Ends all of it. Calling it twice is harmless.
  void end();

  // Called after an interrupted method left sessions that were ended here.
  static void set_listener(PyObject* listener);

 private:
  std::vector<std::weak_ptr<Session>> sessions_;
  pybind11::object counter_;
  pybind11::object rows_;  // of the counter
};

// Wraps the method so that its object's sessions are ended after it. The first does so if the
// method raises and nothing was open before it (a trace that is entered a second time goes on). The
// second always does, and once the interpreter is ending it does nothing at all.
pybind11::object ends_if_it_raises(const pybind11::function& method);
pybind11::object ends_always(const pybind11::function& method);

}  // namespace pytracer
