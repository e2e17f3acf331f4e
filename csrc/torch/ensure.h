// Methods that end what their object has begun, whatever interrupts their Python.
//
// A Ctrl-C may come between any two lines of Python: also in a `finally`, before its first call.
// What has to happen in any case therefore happens in C, after the method's Python.
#pragma once

#include "session.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

namespace pytracer {

// What one object has begun: sessions, and a counter of steps. It is the object's attribute
// `_held`.
class Held {
 public:
  Held() = default;
  Held(const Held&) = delete;  // it ends once
  Held& operator=(const Held&) = delete;

  std::shared_ptr<Session> session();
  // Calls it after each training step, until the end.
  void count_steps(const pybind11::function& counter);
  bool is_open() const;
  // Ends all of it. Twice is harmless.
  void end();

  // Called when an interrupted method has left sessions that had to be ended here.
  static void set_listener(PyObject* listener);

 private:
  std::vector<std::weak_ptr<Session>> sessions_;
  pybind11::object counter_;
};

// The method, after which its object's sessions are ended: if it raises and nothing was open before
// it (a trace that is entered a second time goes on), or always. The latter does
// nothing at all once the interpreter is going away.
pybind11::object ends_if_it_raises(const pybind11::function& method);
pybind11::object ends_always(const pybind11::function& method);

}  // namespace pytracer
