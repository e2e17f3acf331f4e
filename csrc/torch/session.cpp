#include "session.h"

#include "../core/device_totals.h"
#include "../core/recorder.h"
#include "calls.h"
#include "cpu_allocator.h"
#include "device_tracker.h"
#include "devices.h"
#include "private_torch.h"
#include "python_stacks.h"
#include "reads.h"
#include "saved_tensors.h"
#include "step_counters.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <fstream>
#include <map>
#include <optional>
#include <unistd.h>
#include <utility>

namespace py = pybind11;

namespace pytracer {

namespace {

// All guarded by the GIL.
std::map<uint32_t, Wants> wanted;
std::map<uint32_t, std::shared_ptr<Listening>> who_listens;  // of the same sessions
sessions::Counted counted;
std::string problem_with_calls;

Wants operator|(const Wants& a, const Wants& b) {
  return {std::max(a.detail, b.detail),
          a.cpu || b.cpu,
          a.device || b.device,
          a.stacks || b.stacks,
          a.saved_tensors || b.saved_tensors};
}

std::optional<Wants> wanted_by_all() {
  std::optional<Wants> all;
  for (const auto& [id, wants] : wanted) {
    all = all ? *all | wants : wants;
  }
  return all;
}

// One accelerator: whether its tracker is attached, or waits until the device is up. The GIL guards
// it.
class Accelerator {
 public:
  explicit Accelerator(DeviceType type) : type_(type) {}

  void hook(bool wanted_now) {
    DeviceTracker* tracker = device_tracker(type_);
    if (tracker == nullptr) {
      return;
    }
    bool ready = wanted_now && tracker->ready();
    if (ready && !attached_) {
      attach();
    }
    wait(wanted_now && !ready);
  }

  // An exception here would reach the program as the device's.
  void came_up() {
    if (!waits_) {
      return;
    }
    attach();
    try {
      seed();
    } catch (const std::exception& error) {
      problem_ = error.what();
    }
  }

  void seed() {
    if (attached_) {
      py::gil_scoped_release unlocked;  // others may allocate meanwhile
      device_tracker(type_)->seed();
    }
  }

  const std::string& problem() const { return problem_; }

 private:
  void attach() {
    problem_ = device_tracker(type_)->attach();
    attached_ = problem_.empty();
  }

  // Torch runs torch.cuda's queued calls when it brings CUDA up, before the first allocation.
  // A device without such a list is up from the start.
  void wait(bool on) {
    if (on == waits_) {
      return;
    }
    py::object queued = private_torch::queued_calls(devices::kind_of(type_).name);
    if (!queued) {
      return;
    }
    waits_ = on;
    if (!call_) {
      call_ = py::cpp_function([this] { came_up(); });
    }
    if (on) {
      queued.attr("append")(py::make_tuple(call_, py::list()));
      return;
    }
    for (size_t i = PyList_GET_SIZE(queued.ptr()); i > 0; --i) {
      if (py::object(py::tuple(queued[py::int_(i - 1)])[0]).is(call_)) {
        PySequence_DelItem(queued.ptr(), static_cast<Py_ssize_t>(i - 1));
      }
    }
  }

  DeviceType type_;
  bool attached_ = false;
  bool waits_ = false;
  std::string problem_;
  py::object call_;
};

std::vector<Accelerator>& accelerators() {
  static auto* const all = [] {
    auto* each = new std::vector<Accelerator>;
    for (const devices::Kind& kind : devices::kKinds) {
      if (kind.type != DeviceType::kCpu) {
        each->emplace_back(kind.type);
      }
    }
    return each;
  }();
  return *all;
}

// Returns the problem, or "".
std::string hook_allocators(sessions::Counted wanted_now) {
  for (Accelerator& accelerator : accelerators()) {
    accelerator.hook(wanted_now.device);
  }
  if (!wanted_now.cpu) {
    cpu_allocator::uninstall();
    return {};
  }
  std::string problem = cpu_allocator::install();
  return problem.empty() ? problem : "CPU memory cannot be traced: " + problem;
}

sessions::AllListening& all_listening() {
  static auto* const all = new sessions::AllListening;
  return *all;
}

void list_who_listens() {
  std::vector<std::shared_ptr<Listening>> all;
  for (const auto& [id, listening] : who_listens) {
    all.push_back(listening);
  }
  all_listening() = std::make_shared<decltype(all)>(std::move(all));
}

void remove_session(uint32_t id) {
  wanted.erase(id);
  who_listens.erase(id);
  list_who_listens();
}

// Hooks all that is wanted now and unhooks the rest; a part without a change does nothing. Returns
// the problem, or "".
std::string apply() {
  std::optional<Wants> wants = wanted_by_all();
  if (!wants) {
    Recorder::on_new_thread.store(nullptr, std::memory_order_release);
    reads::forget();
    reads::leave_out_inner_operators(false);
    calls::uninstall();
    saved_tensors::uninstall();
    python_stacks::uninstall();
    std::string problem = hook_allocators(counted);
    bool counts = step_counters::are_there();
    if (counts && !calls::await_steps(true)) {
      ops::install(ops::Detail::kSteps);
    } else {
      calls::await_steps(counts);
      ops::uninstall();
    }
    return problem;
  }
  calls::await_steps(false);
  ops::install(wants->detail);
  Recorder::on_new_thread.store(&reads::listen, std::memory_order_release);
  reads::leave_out_inner_operators(true);
  wants->stacks ? python_stacks::install() : python_stacks::uninstall();
  std::string problem =
      hook_allocators({wants->cpu || counted.cpu, wants->device || counted.device});
  if (wants->saved_tensors) {
    saved_tensors::install();
  } else {
    saved_tensors::uninstall();
  }
  problem_with_calls = calls::install();
  return problem;
}

// The time in which the calling thread could have run but had no core; 0 if Linux does not say.
uint64_t waited_for_a_core_ns() {
  std::ifstream file("/proc/thread-self/schedstat");
  uint64_t ran = 0;
  uint64_t waited = 0;
  return file >> ran >> waited ? waited : 0;
}

int64_t steady_ns() {
  using std::chrono::nanoseconds;
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<nanoseconds>(now).count();
}

// How long ago this reading was. The session's first moment, by two clocks, has the ticks' rate.
uint64_t ns_since(const OwnTime::Reading& reading, const Listening& session) {
  uint64_t now = ticks_now();
  if (session.began_ns == 0 || now <= reading.at || reading.at < session.from.at) {
    return 0;
  }
  double rate = static_cast<double>(steady_ns() - session.began_ns) /
                static_cast<double>(now - session.from.at);
  return static_cast<uint64_t>(static_cast<double>(now - reading.at) * rate);
}

}  // namespace

bool Listening::called() {
  ++calls;
  return steps == 0 && std::has_single_bit(calls);
}

// The third step, too: DistributedDataParallel says in it how large its new buckets are.
bool Listening::stepped() {
  ++steps;
  return steps == 3 || std::has_single_bit(steps);
}

Session::~Session() {
  end();
}

bool Session::is_open() const {
  return recording_ && owner_ == getpid();
}

std::string Session::begin(uint64_t max_events,
                           const Wants& wants,
                           std::shared_ptr<PhaseTimes> phases) {
  if (id_ != 0) {
    return "this session has begun already";
  }
  if (wanted.empty()) {
    calls::begin_recording();
  }
  owner_ = getpid();
  id_ = Recorder::get().begin_session(max_events);
  recording_ = true;
  listening_->phases = std::move(phases);
  listening_->by_hooks = wants.saved_tensors;
  listening_->from = OwnTime::read();
  wanted[id_] = wants;
  who_listens[id_] = listening_;
  list_who_listens();
  std::string problem = apply();
  if (!problem.empty()) {
    end();
  } else if (Recorder::this_thread().outside_of_modules()) {
    reads::listen();
  }
  return problem;
}

std::pair<uint64_t, uint64_t> Session::new_counts() {
  std::pair<uint64_t, uint64_t> now{listening_->calls, listening_->steps};
  auto before = std::exchange(told_, now);
  return {now.first - before.first, now.second - before.second};
}

std::array<uint64_t, 4> Session::own_time() const {
  const OwnTime::Reading& from = listening_->from;
  OwnTime::Reading until = listening_->until.at != 0 ? listening_->until : OwnTime::read();
  bool knows = listening_->thread == gettid();
  uint64_t waited = knows ? waited_for_a_core_ns() - listening_->waited_before : 0;
  waited -= std::min(waited, ns_since(until, *listening_));  // perhaps it was all after the stretch
  return {until.ticks - from.ticks, until.ns - from.ns, until.at - from.at, waited};
}

// Ends a session, and forgets it after it was read.
class Session::Ending {
 public:
  explicit Ending(Session& session)
      : session_(session), is_first_(std::exchange(session.recording_, false)) {
    if (is_first_) {
      remove_session(session_.id_);
      apply();
      py::gil_scoped_release unlocked;
      Recorder::get().end_session(session_.id_);
    }
  }

  ~Ending() {
    if (is_first_) {
      Recorder::get().forget_session(std::exchange(session_.id_, 0));
      if (wanted.empty()) {
        calls::end_recording();
        python_stacks::clear();
      }
    }
  }

  Ending(const Ending&) = delete;  // it ends once
  Ending& operator=(const Ending&) = delete;

  explicit operator bool() const { return is_first_; }

 private:
  Session& session_;
  bool is_first_;
};

// A forked child abandons its parent's streamer: the streamer's thread does not exist there, its
// mutex may be locked for ever, glibc waits for ever to destroy a condition variable that a thread
// waits for, and the file is the parent's.
void Session::end() {
  if (!is_open()) {
    if (owner_ != getpid()) {
      (void)streamer_.release();
    }
    return;
  }
  Ending ending(*this);
  py::gil_scoped_release unlocked;
  streamer_.reset();
}

Recording Session::read() const {
  RecordingBuilder builder;
  py::gil_scoped_release unlocked;
  Harvest(id_).drain_all(builder);
  return std::move(builder.recording);
}

Recording Session::end_and_read() {
  Ending ending(*this);
  return ending ? read() : Recording{};
}

void Session::stream_to(const std::string& path,
                        const std::string& meta,
                        const std::optional<std::string>& anonymous_root) {
  streamer_ = std::make_unique<Streamer>(id_, path, /*overwrite=*/false, meta, anonymous_root);
}

void Session::note(const std::string& meta) {
  if (streamer_) {
    streamer_->note(meta);
  }
}

void Session::end_and_write(const std::string& meta) {
  Ending ending(*this);
  auto streamer = std::move(streamer_);
  py::gil_scoped_release unlocked;
  if (streamer) {
    streamer->finish(meta);
  }
}

namespace sessions {

AtMoment::AtMoment() : listening_(listening()) {
  for (const auto& session : *listening_) {
    if (session->until.at == 0) {
      session->thread = gettid();
      session->waited_before = waited_for_a_core_ns();
      session->began_ns = steady_ns();
      session->until = session->from = OwnTime::read();
    }
  }
}

AtMoment::~AtMoment() {
  for (const auto& session : *listening_) {
    session->until = OwnTime::read();
  }
}

AllListening listening() {
  if (!all_listening()) {
    list_who_listens();
  }
  return all_listening();
}

uint32_t open() {
  return static_cast<uint32_t>(wanted.size());
}

void count_steps(PyObject* counter, StepRows* rows) {
  step_counters::add(counter, rows);
  apply();
}

void count_no_steps(PyObject* counter) {
  step_counters::remove(counter);
  calls::step_counter_removed();
  apply();
}

std::string count_totals(Counted devices) {
  if (!devices.cpu && !devices.device) {
    counted = {};
    DeviceTotals::end();
    return apply();
  }
  if (counted.cpu || counted.device) {
    return "another recorder of this process is always on";
  }
  counted = devices;
  DeviceTotals::get().begin(devices.cpu);
  std::string problem = apply();
  if (!problem.empty()) {
    count_totals({});
    return problem;
  }
  DeviceTotals::get().begin_seeding();
  seed_device();
  DeviceTotals::get().end_seeding();
  return {};
}

std::string calls_problem() {
  return problem_with_calls;
}

std::string device_problem() {
  for (const Accelerator& accelerator : accelerators()) {
    if (!accelerator.problem().empty()) {
      return accelerator.problem();
    }
  }
  return {};
}

void seed_device() {
  for (Accelerator& accelerator : accelerators()) {
    accelerator.seed();
  }
}

void after_fork_in_child() {
  wanted.clear();
  who_listens.clear();
  list_who_listens();
  step_counters::remove_all();
  calls::step_counter_removed();
  counted = {};
  apply();
}

}  // namespace sessions

}  // namespace pytracer
