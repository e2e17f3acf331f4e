// How long the device works on each phase: a few events a step, and no waiting.
//
// The host runs ahead of a GPU, so its own clock does not say how long a forward takes there. When
// a phase begins or ends (the outermost module, the backward pass, the optimizer), an event goes
// into the current stream, and the device writes the time when it comes to the event. There are six
// events a micro-step, and they are used again. They are read when the trace ends; in a long trace,
// those that the device has passed are read before. A stream that is being captured into a graph
// gets no event: nothing would run, and the graph would keep the event for good. Nothing here
// brings CUDA up or allocates its memory.
//
// A phase is a pair of borders, one where it begins and one where it ends, by the rules of
// pytracer/analysis/facts/phases.py. A forward with a backward lasts until the backward begins, so
// the loss belongs to it. A call of a model without a backward lasts until the call ends. Such
// calls come in hundreds, in evaluations and when a policy plays, and the table leaves them out if
// the program trains. So once it has trained, only the first few calls after a backward are timed,
// and each that may begin a forward. Where there were too many before one backward, none is timed
// before the next.
//
// The GIL guards it all.
#pragma once

#include "../core/event.h"

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pytracer {

// The clock of a device.
class Stopwatch {
 public:
  using Event = std::shared_ptr<void>;  // only its stopwatch knows the type

  virtual ~Stopwatch() = default;
  // The index of the tensor's device, if that is one of the stopwatch's devices.
  virtual std::optional<int> device_of(PyObject* tensor) = 0;
  // Puts an event into the current stream: `again`, if that is given. Null if the stream may get
  // none.
  virtual Event mark(int device, Event again) = 0;
  // Whether the device has passed the event.
  virtual bool has_passed(const Event& event) = 0;
  // The device's time between two events that it has passed, in nanoseconds.
  virtual int64_t elapsed_ns(const Event& begin, const Event& end) = 0;
};

// The stopwatch of an accelerator.
std::shared_ptr<Stopwatch> device_stopwatch(DeviceType type);

// The borders that one session passes, on the thread that trains.
class PhaseTimes {
 public:
  struct Limits {
    size_t pending;  // pairs that wait; beyond this, those that the device has passed are read
    size_t calls;    // calls of models since the last backward; with more, a forward begins later
    size_t others;   // calls after a backward that are timed although they begin no forward; with
                     // more of them, none is before the next backward
    size_t kept;     // pairs in a trace
  };

  struct Row {
    uint8_t phase;  // of schema.PHASES
    int device;
    uint64_t begin;  // the host's ticks at the borders
    uint64_t end;
    int64_t device_ns;
  };

  // Without a stopwatch (on the CPU, whose own clock is right) nothing is measured.
  PhaseTimes(std::shared_ptr<Stopwatch> stopwatch, const Limits& limits);

  // The borders.
  void root_entered(PyObject* module);
  void root_left();
  void backward_begins(PyObject* outputs);
  void backward_ends();
  void step_begins();
  void step_ends();

  // Reads what the device has passed, without waiting.
  void look();
  // The trace ends: calls without a backward are forwards of their own.
  void end_calls();

  // How many pairs the device has not passed; 0 after an error, when waiting is no use.
  size_t waiting() const { return problem_.empty() ? pending_.size() : 0; }

  // Counts all pairs that are not read yet as missing.
  void give_up();

  bool measures() const { return stopwatch_ != nullptr; }

  const std::string& problem() const { return problem_; }

  uint64_t missing() const { return missing_; }

  const std::vector<Row>& rows() const { return rows_; }

 private:
  struct Border {
    uint64_t number;
    Stopwatch::Event event;
    uint64_t ticks;
    int device;
  };

  struct Pair {
    uint8_t phase;
    Border begin;
    Border end;
  };

  using MaybeBorder = std::optional<Border>;

  // To put an event into a stream takes longer than a small module. The host's ticks are those next
  // to the phase: after that at its beginning, before that at its end.
  enum class Side : uint8_t { kBegin, kEnd };

  bool listens();
  bool times_this_call();
  void find_device(PyObject* module);
  MaybeBorder border(Side side);
  void pair(uint8_t phase, const MaybeBorder& begin, const MaybeBorder& end);
  void read_passed();
  void take_back();
  template <class Ask>
  bool ask_device(Ask ask);

  std::shared_ptr<Stopwatch> stopwatch_;
  Limits limits_;
  std::string problem_;
  unsigned long thread_ = 0;  // the thread that trains: the first that passes a border
  std::optional<int> device_;
  uint64_t count_ = 0;
  uint64_t missing_ = 0;
  std::vector<Stopwatch::Event> free_;
  std::deque<Border> used_;
  std::deque<Pair> pending_;
  std::vector<Row> rows_;
  MaybeBorder call_;                             // an outermost module is being called
  std::deque<std::pair<Border, Border>> calls_;  // no backward has followed yet
  MaybeBorder backward_;
  MaybeBorder optimizer_;
  bool stepping_ = false;
  bool trains_ = false;        // a backward has followed a call
  size_t others_ = 0;          // calls since the last backward that began no forward
  bool had_too_many_ = false;  // before that backward: the next ones are not timed at all
};

}  // namespace pytracer
