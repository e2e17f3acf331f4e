// The variables of a function that is running.
//
// Before Python 3.13, `frame.f_locals` is no way to read them: it refreshes, and may empty, the
// dictionary that the program got from locals(), and keeps the values alive there. So this reads
// them where the interpreter keeps them, and leaves nothing behind.
#pragma once

#include <Python.h>

namespace pytracer::frame_locals {

// A dictionary of the names and values that the frame has now. A new reference; null with an
// exception set. Empty if this Python has no way to read them.
PyObject* all(PyFrameObject* frame);

// One of them: a new reference, or null without an exception.
PyObject* one(PyFrameObject* frame, const char* name);

}  // namespace pytracer::frame_locals
