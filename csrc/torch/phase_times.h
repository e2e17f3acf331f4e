// How long the device works on each phase: a few events a step, and no waiting.
//
// The host runs ahead of a GPU, so its own clock does not say how long a forward takes there. Where
// a phase begins or ends (the outermost module, the backward pass, the optimizer) an event is put
// into the stream that is current; the device writes the time when it comes to it. Six a
// micro-step; they are used again. They are read when the trace ends, or in a long one those that
// the device has passed. A stream that is being captured into a graph gets none: nothing would run,
// and the graph would have them for good. Nothing here brings CUDA up or allocates its memory.
//
// A phase is one pair: from the border that begins it to the one that ends it, as
// pytracer/analysis/facts/phases.py has them. A forward that a backward follows lasts until that
// one, so the loss belongs to it; a call of a model that none follows lasts until the model is
// left.
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

// What a device offers.
class Stopwatch {
 public:
  using Event = std::shared_ptr<void>;  // what it is only its stopwatch knows

  virtual ~Stopwatch() = default;
  // Which of its devices the tensor is on, if it is on one.
  virtual std::optional<int> device_of(PyObject* tensor) = 0;
  // Puts an event into the current stream, an old one if given. Null where there may be none.
  virtual Event mark(int device, Event again) = 0;
  // Whether the device has come to it.
  virtual bool has_passed(const Event& event) = 0;
  // The device's time between two events that it has passed.
  virtual int64_t elapsed_ns(const Event& begin, const Event& end) = 0;
};

// An accelerator's own.
std::shared_ptr<Stopwatch> device_stopwatch(DeviceType type);

// The borders that one session passes, on the thread that trains.
class PhaseTimes {
 public:
  struct Limits {
    size_t pending;  // pairs that wait; of more those that have passed are read
    size_t calls;    // of models, since the last backward: a forward of more begins later
    size_t kept;     // pairs of a trace
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
  // The trace ends: calls without a backward have lasted as long as they did.
  void end_calls();

  // How many pairs the device has not passed, as far as it can be waited for.
  size_t waiting() const { return problem_.empty() ? pending_.size() : 0; }

  // What is still not read is missing for good.
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

  bool listens();
  MaybeBorder border();
  void pair(uint8_t phase, const MaybeBorder& begin, const MaybeBorder& end);
  void read_passed();
  void take_back();
  template <class Ask>
  bool ask_device(Ask ask);

  std::shared_ptr<Stopwatch> stopwatch_;
  Limits limits_;
  std::string problem_;
  unsigned long thread_ = 0;  // the first that passes a border trains
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
};

}  // namespace pytracer
