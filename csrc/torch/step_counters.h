// Who is called after each training step, whether or not anything records.
//
// A training step is an optimizer's step, or the last one's if several take turns (core/steps.h).
#pragma once

#include <Python.h>

namespace pytracer {
class StepRows;
}

namespace pytracer::step_counters {

// The GIL must be held for all that follows. The caller keeps both alive until the counter is
// removed. With rows, the counter is called only after the steps that they say must be told.
void add(PyObject* counter, StepRows* rows);
// Removing a counter that is not there is harmless.
void remove(PyObject* counter);
void remove_all();
bool are_there();

void step_ended();

}  // namespace pytracer::step_counters
