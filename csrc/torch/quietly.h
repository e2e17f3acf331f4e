// Python of ours, run in the middle of the program without disturbing it.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace pytracer::quietly {

// The GIL must be held for all of these.

// Calls back, and lets the program see nothing of it: neither its __torch_function__ nor a graph
// that is being traced nor torch.compile learns what ours asks of tensors. An exception of ours is
// counted and forgotten; the result is then null. False where an exception is set that is the
// program's to see: Ctrl-C, an exit, whatever its signal handler raised while ours ran.
bool call(PyObject* callback, PyObject* const* args, size_t count, PyObject** result = nullptr);

// C++ of ours has left an exception set. Forgets it if it is ours; false if it is the program's.
bool after_exception();

// Calls of one kind: by which clock the next one is timed.
struct Kind {
  bool is_long = false;
};

// What tracing computes on the calling thread, from here to the end of the block. What is timed
// inside of it is counted once. The thread's own clock would cost a short call a tenth, so ticks
// time it, until one of its kind takes long: another program may have had the core, so that one
// counts as no more than the longest of the short ones, and the next one asks the thread's clock.
class Timed {
 public:
  explicit Timed(Kind& kind);
  ~Timed();
  Timed(const Timed&) = delete;  // it ends once
  Timed& operator=(const Timed&) = delete;

 private:
  Kind& kind_;
  Timed* outer_;
  bool by_thread_;         // its clock; else by ticks
  bool counts_;            // else it is part of the outer one
  uint64_t began_ns_ = 0;  // by the thread's clock
  uint64_t began_at_;      // in ticks
  uint64_t inside_ = 0;    // ticks that were counted as others'
};

// Where no exception can pass: the one that is set is raised as soon as Python goes on.
void raise_later();

// Exceptions of ours so far.
uint64_t errors();

}  // namespace pytracer::quietly
