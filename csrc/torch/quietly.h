// Runs our Python in the middle of the program without disturbing it.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace pytracer::quietly {

// The GIL must be held for all of these.

// Calls our function, hidden from the program: neither its __torch_function__ nor a graph that is
// being traced nor torch.compile sees our calls on tensors. Counts and drops an exception of ours;
// the result is then null. Returns false if an exception is set that the program must see: Ctrl-C,
// an exit, or one that its signal handler raised meanwhile.
bool call(PyObject* callback, PyObject* const* args, size_t count, PyObject** result = nullptr);

// Our C++ has left an exception set. Drops it if it is ours; false if it is the program's.
bool after_exception();

// One kind of calls: the clock that times the next one.
struct Kind {
  bool is_long = false;
};

// Adds the time that tracing computes on the calling thread, from here to the end of the block.
// Blocks inside of it are counted once. The thread's own clock would cost a short call a tenth, so
// ticks time it, until a call of its kind takes long. Another program may have had the core then:
// so that call counts as no more than the longest short call, and the next one reads the thread's
// clock.
class Timed {
 public:
  explicit Timed(Kind& kind);
  ~Timed();
  Timed(const Timed&) = delete;  // it ends once
  Timed& operator=(const Timed&) = delete;

 private:
  Kind& kind_;
  Timed* outer_;
  bool by_thread_;         // timed by the thread's clock; else by ticks
  bool counts_;            // else it is part of the outer one
  uint64_t began_ns_ = 0;  // by the thread's clock
  uint64_t began_at_;      // in ticks
  uint64_t inside_ = 0;    // ticks that other blocks inside have counted
};

// For places that no exception can pass: raises the one that is set as soon as Python goes on.
void raise_later();

// The number of exceptions of ours so far.
uint64_t errors();

}  // namespace pytracer::quietly
