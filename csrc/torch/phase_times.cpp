#include "phase_times.h"

#include "../core/clock.h"
#include "devices.h"
#include "look.h"
#include "private_torch.h"

#include <pybind11/pybind11.h>

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <string>
#include <utility>

namespace py = pybind11;

namespace pytracer {

namespace {

// Numbers of schema.PHASES.
constexpr uint8_t kForward = 2;
constexpr uint8_t kBackward = 4;
constexpr uint8_t kOptimizer = 5;

// Works through torch's guard of the device. Each call of the guard is made with its device
// current. Otherwise the guard would switch back to another device, and CUDA would bring up a
// context there even if the program has not used it yet.
class DeviceStopwatch final : public Stopwatch {
 public:
  explicit DeviceStopwatch(const devices::Kind& kind)
      : type_(kind.torchs), is_capturing_(private_torch::capture_question(kind.name)) {}

  std::optional<int> device_of(PyObject* tensor) override {
    std::optional<int> index;
    look::each_part(tensor, [&](PyObject* part) {
      c10::Device device = look::device_of(THPVariable_Unpack(part));
      if (!index && device.type() == type_) {
        index = device.index();
      }
    });
    return index;
  }

  Event mark(int device, Event again) override {
    if (is_capturing()) {
      return nullptr;
    }
    c10::Device there{type_, static_cast<c10::DeviceIndex>(device)};
    if (!again) {
      again = std::make_shared<Marked>(there);
    }
    auto* marked = static_cast<Marked*>(again.get());
    c10::DeviceGuard current(marked->device);
    guard().record(&marked->event,
                   guard().getStream(marked->device),
                   marked->device.index(),
                   c10::EventFlag::BACKEND_DEFAULT);
    return again;
  }

  // Does not ask while a graph is captured: that would spoil the capture.
  bool has_passed(const Event& event) override {
    return !is_capturing() && guard().queryEvent(static_cast<Marked*>(event.get())->event);
  }

  // To about half a microsecond.
  int64_t elapsed_ns(const Event& begin, const Event& end) override {
    auto* first = static_cast<Marked*>(begin.get());
    c10::DeviceGuard current(first->device);
    double ms = guard().elapsedTime(
        first->event, static_cast<Marked*>(end.get())->event, first->device.index());
    return std::max<int64_t>(std::llround(ms * 1e6), 0);
  }

 private:
  struct Marked {
    explicit Marked(c10::Device on) : device(on) {}

    ~Marked() {
      try {
        c10::DeviceGuard current(device);
        guard_of(device.type()).destroyEvent(event, device.index());
      } catch (const std::exception&) {  // a device that has failed, or a forked child
      }
    }

    Marked(const Marked&) = delete;
    Marked& operator=(const Marked&) = delete;

    void* event = nullptr;
    c10::Device device;
  };

  static const c10::impl::DeviceGuardImplInterface& guard_of(c10::DeviceType type) {
    return *c10::impl::getDeviceGuardImpl(type);
  }

  const c10::impl::DeviceGuardImplInterface& guard() const { return guard_of(type_); }

  // Torch has no such question for a device without graphs.
  bool is_capturing() const { return !is_capturing_.is_none() && py::bool_(is_capturing_()); }

  c10::DeviceType type_;
  py::object is_capturing_;
};

}  // namespace

std::shared_ptr<Stopwatch> device_stopwatch(DeviceType type) {
  return std::make_shared<DeviceStopwatch>(devices::kind_of(type));
}

PhaseTimes::PhaseTimes(std::shared_ptr<Stopwatch> stopwatch, const Limits& limits)
    : stopwatch_(std::move(stopwatch)), limits_(limits) {}

void PhaseTimes::root_entered(PyObject* module) {
  if (!listens()) {
    return;
  }
  call_.reset();
  if (times_this_call()) {
    find_device(module);
    call_ = border(Side::kBegin);
  }
  if (optimizer_) {  // a closure: the step goes on after its backward
    pair(kOptimizer, optimizer_, call_);
    optimizer_.reset();
  }
}

void PhaseTimes::find_device(PyObject* module) {
  if (auto parameter = py::reinterpret_steal<py::object>(look::first_parameter(module))) {
    std::optional<int> found = stopwatch_->device_of(parameter.ptr());
    device_ = found ? found : device_;
  }
}

void PhaseTimes::root_left() {
  if (!listens()) {
    return;
  }
  MaybeBorder call = std::exchange(call_, std::nullopt);
  MaybeBorder left = call ? border(Side::kEnd) : std::nullopt;
  if (!left) {
    return;
  }
  if (calls_.empty() && !c10::GradMode::is_enabled()) {  // otherwise it is part of a forward
    pair(kForward, call, left);
    return;
  }
  calls_.emplace_back(*call, *left);
  if (calls_.size() > limits_.calls) {
    pair(kForward, calls_.front().first, calls_.front().second);
    calls_.pop_front();
  }
}

void PhaseTimes::backward_begins(PyObject* outputs) {
  if (!listens()) {
    return;
  }
  if (!device_) {
    look::each_tensor(outputs, 1, /*also_in_objects=*/false, [this](PyObject* tensor) {
      device_ = device_ ? device_ : stopwatch_->device_of(tensor);
    });
  }
  backward_ = border(Side::kBegin);
  trains_ = trains_ || call_ || !calls_.empty();
  had_too_many_ = others_ > limits_.others;
  others_ = 0;
  pair(kForward, calls_.empty() ? call_ : MaybeBorder(calls_.front().first), backward_);
  calls_.clear();
  call_.reset();
}

void PhaseTimes::backward_ends() {
  if (!listens()) {
    return;
  }
  MaybeBorder end = border(Side::kEnd);
  pair(kBackward, backward_, end);
  backward_.reset();
  optimizer_ = stepping_ ? end : std::nullopt;
}

void PhaseTimes::step_begins() {
  if (!listens()) {
    return;
  }
  end_calls();
  stepping_ = true;
  optimizer_ = border(Side::kBegin);
}

void PhaseTimes::step_ends() {
  if (!listens()) {
    return;
  }
  pair(kOptimizer, optimizer_, stepping_ ? border(Side::kEnd) : std::nullopt);
  optimizer_.reset();
  stepping_ = false;
}

void PhaseTimes::look() {
  if (stopwatch_) {
    ask_device([this] { read_passed(); });
  }
}

void PhaseTimes::end_calls() {
  for (; !calls_.empty(); calls_.pop_front()) {
    pair(kForward, calls_.front().first, calls_.front().second);
  }
}

void PhaseTimes::give_up() {
  missing_ += pending_.size();
  pending_.clear();
  used_.clear();
  free_.clear();
}

bool PhaseTimes::listens() {
  if (!stopwatch_ || !problem_.empty()) {
    return false;
  }
  unsigned long here = PyThread_get_thread_ident();
  thread_ = thread_ != 0 ? thread_ : here;
  return thread_ == here;
}

bool PhaseTimes::times_this_call() {
  bool may_begin_a_forward = calls_.empty() && c10::GradMode::is_enabled();
  if (!trains_ || optimizer_ || may_begin_a_forward) {
    return true;
  }
  return ++others_ <= limits_.others && !had_too_many_;
}

PhaseTimes::MaybeBorder PhaseTimes::border(Side side) {
  if (!device_) {
    return std::nullopt;
  }
  Stopwatch::Event again;
  if (!free_.empty()) {
    again = std::move(free_.back());
    free_.pop_back();
  }
  Stopwatch::Event event;
  uint64_t before = ticks_now();
  if (!ask_device([&] { event = stopwatch_->mark(*device_, again); })) {
    return std::nullopt;
  }
  if (!event) {
    if (again) {
      free_.push_back(std::move(again));
    }
    return std::nullopt;
  }
  used_.push_back(
      {++count_, std::move(event), side == Side::kEnd ? before : ticks_now(), *device_});
  return used_.back();
}

void PhaseTimes::pair(uint8_t phase, const MaybeBorder& begin, const MaybeBorder& end) {
  if (!begin || !end) {
    return;
  }
  if (begin->device != end->device || rows_.size() >= limits_.kept) {
    ++missing_;
  } else {
    pending_.push_back({phase, *begin, *end});
  }
  if (pending_.size() > limits_.pending || used_.size() > 3 * limits_.pending) {
    look();
  }
}

void PhaseTimes::read_passed() {
  while (!pending_.empty() && stopwatch_->has_passed(pending_.front().end.event)) {
    Pair read = std::move(pending_.front());
    pending_.pop_front();
    int64_t taken = stopwatch_->elapsed_ns(read.begin.event, read.end.event);
    rows_.push_back({read.phase, read.begin.device, read.begin.ticks, read.end.ticks, taken});
  }
  take_back();
}

// Frees events that nothing waits for, to use them again.
void PhaseTimes::take_back() {
  uint64_t oldest = count_ + 1;
  auto need = [&oldest](const Border& border) { oldest = std::min(oldest, border.number); };
  for (const MaybeBorder* open : {&call_, &backward_, &optimizer_}) {
    if (*open) {
      need(**open);
    }
  }
  if (!calls_.empty()) {
    need(calls_.front().first);
  }
  for (const Pair& waiting : pending_) {  // in the order of their ends
    need(waiting.begin);
  }
  for (; !used_.empty() && used_.front().number < oldest; used_.pop_front()) {
    free_.push_back(std::move(used_.front().event));
  }
}

// An error of the device ends the measuring: the program will meet the error itself.
template <class Ask>
bool PhaseTimes::ask_device(Ask ask) {
  std::string said;
  try {
    ask();
    return true;
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_RuntimeError)) {
      throw;
    }
    said = py::str(error.value());
  } catch (const c10::Error& error) {
    said = error.what_without_backtrace();
  }
  size_t end = std::min({said.find('\n'), said.size(), size_t{200}});
  while (end > 0 && end < said.size() && (said[end] & 0xC0) == 0x80) {
    --end;  // not in the middle of a character
  }
  problem_ = said.substr(0, end);
  problem_ = problem_.empty() ? "the device gives no reason" : problem_;
  return false;
}

}  // namespace pytracer
