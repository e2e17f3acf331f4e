#include "step_counters.h"

#include "../core/clock.h"
#include "../core/step_rows.h"
#include "quietly.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

namespace py = pybind11;

namespace pytracer::step_counters {

namespace {

struct Counter {
  py::object told;
  StepRows* rows;
};

std::vector<Counter>& counters() {
  static auto* const known = new std::vector<Counter>;
  return *known;
}

}  // namespace

void add(PyObject* counter, StepRows* rows) {
  counters().push_back({py::reinterpret_borrow<py::object>(counter), rows});
}

void remove(PyObject* counter) {
  std::erase_if(counters(), [counter](const auto& known) { return known.told.ptr() == counter; });
}

void remove_all() {
  counters().clear();
}

bool are_there() {
  return !counters().empty();
}

void step_ended() {
  std::vector<py::object> told;  // one may remove itself
  for (const Counter& counter : counters()) {
    if (counter.rows == nullptr || counter.rows->end_step(unix_now_ns())) {
      told.push_back(counter.told);
    }
  }
  for (const py::object& each : told) {
    if (!quietly::call(each.ptr(), nullptr, 0)) {
      quietly::raise_later();
    }
  }
}

}  // namespace pytracer::step_counters
