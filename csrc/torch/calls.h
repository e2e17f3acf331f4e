// Sees the program's calls of modules, of autograd's engine and of optimizers' steps.
//
//   torch.nn.Module._call_impl        its function object gets another vectorcall: the module stack
//   torch._C._EngineBase.run_backward its method table gets another entry: backward passes
//   "Optimizer.step#..."              torch's own annotation, which csrc/torch/ops.h receives
//
// moments.h has the work that is done then.
//
// No attribute and no type of torch's changes, so neither torch.compile nor the program can notice:
// they compare, copy, pickle, wrap or guard on the same objects as before. _call_impl is hooked and
// not __call__, since Python 3.11 bypasses a function's vectorcall unless the call has a star.
#pragma once

#include <Python.h>

#include <cstdint>

namespace pytracer::calls {

// The GIL must be held for all that follows. Doing either twice is harmless. Returns a sentence
// about a call that cannot be hooked, or "".
const char* install();
void uninstall();
bool installed();

// A recording begins: no thread has run a backward pass yet. Or it ends: drops the names of
// modules.
void begin_recording();
void end_recording();

// Whether module calls also open a record for torch's own profilers.
void mark_modules(bool on);

// A step of an optimizer, from when its annotation is entered. Takes the GIL to begin and to end.
class Step {
 public:
  Step() = default;
  ~Step();
  Step(const Step&) = delete;  // it ends once
  Step& operator=(const Step&) = delete;

  // Finds the optimizer. Returns its number among the optimizers that are alive and have stepped,
  // from 1 on; 0 if it is not known.
  uint64_t meet();
  void begin();
  // The annotation ends on the thread that entered it.
  void end();

 private:
  PyObject* optimizer_ =
      nullptr;  // held by torch's own frame as well, for as long as the step lasts
  uint64_t number_ = 0;
  const void* handled_ = nullptr;  // the exception that was being handled as it began
};

// A counter of steps was removed: without any, nobody asks where steps end.
void step_counter_removed();

// Whether to begin to listen to records of torch's as an optimizer's step begins, and no earlier.
// While anybody listens, each node of a backward pass takes torch a thousand instructions more.
// Returns whether that is possible.
bool await_steps(bool on);
// Ends listening until the next step, if it is awaited.
void rest_between_steps();

// Whether no other thread runs backward passes. Only the thread that trains a model may look at its
// gradients: the engine makes them without the GIL, and when Python frees a gradient, torch
// releases the GIL before the parameter has dropped it.
bool may_read_gradients();

}  // namespace pytracer::calls
