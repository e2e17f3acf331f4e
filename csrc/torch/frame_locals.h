// The variables of a function that is running.
//
// `frame.f_locals` is no way to read them before Python 3.13: it refreshes, and may empty, the
// dictionary that the program got from locals(), and keeps the values alive in it. So they are
// read where the interpreter keeps them, and nothing is left behind.
#pragma once

#include <Python.h>

namespace pytracer::frame_locals {

// A dictionary of the names and values that the frame has now. A new reference; null with an
// exception set. Where this Python gives no way to read them, an empty one.
PyObject* all(PyFrameObject* frame);

// One of them: a new reference, or null without an exception.
PyObject* one(PyFrameObject* frame, const char* name);

}  // namespace pytracer::frame_locals
