// C functions that stand in for three of torch's Python functions while something is traced:
//
//   torch.nn.Module.__call__              keeps the module stack
//   torch.autograd._engine_run_backward   marks the backward pass
//   torch.optim.Optimizer._optimizer_step_code
//                                         called by torch after each step, for profilers
//
// They add no Python frame, run none of their own Python per call, and pass everything through.
// Global module hooks would do the same job at ten times the cost: they switch off the fast path
// of every module's call, and torch.compile guards on them, as it does on optimizers' hooks.
#pragma once

#include <Python.h>

#include <cstdint>

namespace pytracer::interceptors {

// Replacements that behave exactly like `original`; the caller puts them in place and back.
// New references.
PyObject* make_module_call(PyObject* original);
PyObject* make_engine_call(PyObject* original);
PyObject* make_step_code_call(PyObject* original);

struct Callbacks {
  PyObject* name_of_module;   // module -> str, asked once per module
  PyObject* before_root;      // (module, args, kwargs): the outermost module is entered
  PyObject* after_root;       // (): it has been left without an exception
  PyObject* before_backward;  // (outputs): an outermost backward pass starts
  PyObject* after_backward;   // (): it has ended without an exception
  PyObject* before_step;      // (): an optimizer's step starts, in a Python frame further up
  PyObject* after_step;       // (optimizer): it has ended without an exception; may raise
};

// Keeps references of its own; nulls detach. The GIL must be held for all of these.
void set_callbacks(const Callbacks& callbacks);
// Whether module calls also tell torch's own profilers which module is entered.
void mark_modules(bool on);
// An optimizer's annotation has been entered. Takes the GIL.
void before_step();
// A module has died: its address may become another's.
void forget_module(uintptr_t address);
void forget_all_modules();
// Whether no thread but this one runs backward passes. Only the thread that trains a model may look
// at its gradients: the engine makes them without the GIL, and where Python gives one up torch lets
// go of the GIL before the parameter has forgotten it.
bool may_read_gradients();
// Exceptions that a callback raised; they never reach the traced program.
uint64_t callback_errors();
void count_error();

}  // namespace pytracer::interceptors
