// Sees the program's calls of modules, of autograd's engine and of optimizers' steps.
//
//   torch.nn.Module._call_impl        its function object gets another vectorcall: the module stack
//   torch._C._EngineBase.run_backward its method table gets another entry: backward passes
//   "Optimizer.step#..."              torch's own annotation, which csrc/torch/ops.h hears of
//
// moments.h says what is done then.
//
// No attribute and no type of torch's changes, so neither torch.compile nor the program can tell:
// what it compares, copies, pickles, wraps or guards on are the same objects. _call_impl and not
// __call__, since Python 3.11 calls a function past its vectorcall unless it is called with a star.
#pragma once

#include <Python.h>

#include <cstdint>

namespace pytracer::calls {

// The GIL must be held for all that follows. Doing either twice is harmless. Returns what could not
// be hooked, or nothing.
const char* install();
void uninstall();
bool installed();

// A recording begins: no thread has run a backward pass yet. Or it ends: no module is known any
// more.
void begin_recording();
void end_recording();

// Whether module calls also tell torch's own profilers which module is entered.
void mark_modules(bool on);

// A step of an optimizer, from when its annotation is entered. Takes the GIL to begin and to end.
class Step {
 public:
  Step() = default;
  ~Step();
  Step(const Step&) = delete;  // it ends once
  Step& operator=(const Step&) = delete;

  // Finds whose step it is. Returns its number among the optimizers that are alive and have
  // stepped, from 1 on; 0 where it is not known.
  uint64_t meet();
  void begin();
  // Its annotation is left on the thread that entered it.
  void end();

 private:
  PyObject* optimizer_ =
      nullptr;  // held by torch's own frame as well, for as long as the step lasts
  uint64_t number_ = 0;
  const void* handled_ = nullptr;  // the exception that was being handled as it began
};

// Calls it after each training step, whether or not anything records: an optimizer's, or the last
// one's of several that take turns. Taking away a counter that is not there is harmless. Returns
// whether any is left.
bool add_step_counter(PyObject* counter);
bool remove_step_counter(PyObject* counter);
bool remove_all_step_counters();

// Whether no thread but this one runs backward passes. Only the thread that trains a model may look
// at its gradients: the engine makes them without the GIL, and where Python gives one up torch lets
// go of the GIL before the parameter has forgotten it.
bool may_read_gradients();

}  // namespace pytracer::calls
