// The extension that records. It translates and decides nothing: policy lives in Python.
#include "columns.h"
#include "core/clock.h"
#include "core/device_totals.h"
#include "core/harvest.h"
#include "core/own_time.h"
#include "core/recorder.h"
#include "step_bindings.h"
#include "torch/calls.h"
#include "torch/cpu_allocator.h"
#include "torch/device_tracker.h"
#include "torch/devices.h"
#include "torch/ensure.h"
#include "torch/frame_locals.h"
#include "torch/graph.h"
#include "torch/imagined.h"
#include "torch/imagined_guard.h"
#include "torch/labels.h"
#include "torch/look.h"
#include "torch/moments.h"
#include "torch/new_graphs.h"
#include "torch/ops.h"
#include "torch/phase_times.h"
#include "torch/private_torch.h"
#include "torch/python_stacks.h"
#include "torch/quietly.h"
#include "torch/reads.h"
#include "torch/session.h"
#include "torch/workspaces.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <pthread.h>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unistd.h>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace pytracer {

namespace {

// A block that an imagined card needs for longer than the program does.
struct Hold {
  std::shared_ptr<imagined::PossibleBlock> block;  // null: there is none
};

// ------------------------------------------------------------------ sessions

py::dict status() {
  Recorder& recorder = Recorder::get();
  py::dict facts;
  facts["recording"] = recording.load();
  facts["sessions"] = recorder.sessions();
  facts["events"] = recorder.events.size();
  facts["scopes"] = recorder.scopes.size();
  facts["host_bytes"] = recorder.events.bytes_held() + recorder.scopes.bytes_held() +
                        recorder.scope_ends.bytes_held();
  facts["callback_errors"] = quietly::errors();
  facts["may_read_gradients"] = calls::may_read_gradients();
  facts["quiet_passes"] = ops::quiet_passes();
  facts["ops_installed"] = ops::installed();
  facts["cpu_installed"] = cpu_allocator::installed();
  facts["calls_installed"] = calls::installed();
  facts["calls_problem"] = sessions::calls_problem();
  facts["device_problem"] = sessions::device_problem();
  return facts;
}

// ------------------------------------------------------------------ Python of ours

// Returns the function's result, or None if it fails. Raises only exceptions that the program must
// see.
py::object call_quietly(const py::function& function, const py::args& arguments) {
  std::vector<PyObject*> given;
  for (py::handle argument : arguments) {
    given.push_back(argument.ptr());
  }
  PyObject* result = nullptr;
  if (!quietly::call(function.ptr(), given.data(), given.size(), &result)) {
    throw py::error_already_set();
  }
  return result != nullptr ? py::reinterpret_steal<py::object>(result) : py::none();
}

// Calls the function while Python's garbage collector is off. An exception at any line of it finds
// the collector as it was.
py::object without_collector(const py::function& function) {
  struct Off {
    const bool was_on = PyGC_Disable() != 0;

    ~Off() {
      if (was_on) {
        PyGC_Enable();
      }
    }
  } off;

  return function();
}

py::object locals_of(const py::object& frame) {
  if (!PyFrame_Check(frame.ptr())) {
    throw py::type_error("expected a frame");
  }
  auto found = py::reinterpret_steal<py::object>(
      frame_locals::all(reinterpret_cast<PyFrameObject*>(frame.ptr())));
  if (!found) {
    throw py::error_already_set();
  }
  return found;
}

// ------------------------------------------------------------------ labels

uint32_t intern_label(int category, const std::string& role) {
  Recorder& recorder = Recorder::get();
  return recorder.labels.intern(
      {static_cast<uint8_t>(category), recorder.strings.intern(role), 0, 0, 0});
}

uint32_t intern_text(const std::string& text) {
  return Recorder::get().strings.intern(text);
}

// The row of a Python stack, whose frames (file, function, line) come with the outermost first.
uint32_t intern_stack(const std::vector<std::tuple<std::string, std::string, uint32_t>>& frames) {
  Recorder& recorder = Recorder::get();
  uint32_t row = 0;
  for (const auto& [file, function, line] : frames) {
    row = recorder.stacks.intern(
        {row, recorder.strings.intern(file), recorder.strings.intern(function), line});
  }
  return row;
}

// The Python lines that the recording has so far, as (file, line).
std::set<std::pair<std::string, uint32_t>> recorded_lines() {
  Recorder& recorder = Recorder::get();
  std::set<std::pair<std::string, uint32_t>> lines;
  for (const StackFrame& frame : recorder.stacks.rows_from(1)) {
    lines.emplace(recorder.strings.at(frame.file), frame.line);
  }
  return lines;
}

const at::Tensor& tensor_of(py::handle object) {
  if (!look::is_tensor(object.ptr())) {
    throw py::type_error("expected a tensor");
  }
  return THPVariable_Unpack(object.ptr());
}

c10::Storage storage_of(py::handle object) {
  if (!THPStorage_Check(object.ptr())) {
    throw py::type_error("expected a storage");
  }
  return THPStorage_Unpack(object.ptr());
}

uint32_t label_of(int category,
                  const std::string& role,
                  const std::string& name,
                  py::handle tensor) {
  return labels::number_of(static_cast<uint8_t>(category), role, name, tensor_of(tensor));
}

void label_tensors(const py::list& tensors, const std::vector<uint32_t>& numbers) {
  for (size_t i = 0; i < std::min(tensors.size(), numbers.size()); ++i) {
    labels::record(tensor_of(tensors[i]), numbers[i]);
  }
}

// Labels tensors without a name.
void label_as(int category, const std::string& role, const py::list& tensors) {
  for (py::handle tensor : tensors) {
    labels::record(tensor_of(tensor), label_of(category, role, "", tensor));
  }
}

size_t adopt_cpu_tensors(const py::list& tensors, bool also_known) {
  size_t adopted = 0;
  for (py::handle tensor : tensors) {
    tensor_of(tensor);
    look::each_part(tensor.ptr(), [&](PyObject* part) {
      adopted += labels::adopt_cpu(THPVariable_Unpack(part), also_known);
    });
  }
  return adopted;
}

py::object gradient_of(py::handle tensor) {
  const at::Tensor& gradient = labels::gradient_of(tensor_of(tensor));
  return gradient.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient))
                            : py::none();
}

// ------------------------------------------------------------------ looking

py::dict attributes_of(py::handle object) {
  auto found = py::reinterpret_steal<py::object>(look::attributes(object.ptr()));
  return found ? py::dict(found) : py::dict();
}

py::object attribute_of(py::handle object, const py::str& name) {
  auto found = py::reinterpret_steal<py::object>(look::attribute(object.ptr(), name.ptr()));
  return found ? found : py::none();
}

// The pairs of a dictionary, or of a container of torch's own; an empty list for anything else.
py::list items_of(py::handle container) {
  if (PyDict_Check(container.ptr())) {
    return py::reinterpret_steal<py::list>(PyDict_Items(container.ptr()));
  }
  return look::is_of_torch(Py_TYPE(container.ptr())) ? py::list(container.attr("items")())
                                                     : py::list();
}

std::vector<PyObject*> borrowed(const py::list& objects) {
  std::vector<PyObject*> found;
  for (py::handle object : objects) {
    found.push_back(object.ptr());
  }
  return found;
}

// Whether it is one of these modules or inside one.
bool has_module(const py::list& roots, py::handle module) {
  bool found = false;
  look::each_module(borrowed(roots), [&](PyObject* one, PyObject* /*attributes*/) {
    found = found || one == module.ptr();
    return !found;
  });
  return found;
}

// The plain tensors in attributes of these modules and of those inside them, each module once:
// (module, attribute, tensor).
py::list tensors_in_attributes(const py::list& roots) {
  py::list found;
  look::each_module(borrowed(roots), [&](PyObject* module, PyObject* attributes) {
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(attributes, &at, &name, &value);) {
      if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == THPVariableClass) {
        found.append(py::make_tuple(py::handle(module), py::handle(name), py::handle(value)));
      }
    }
    return true;
  });
  return found;
}

py::list parts_of(py::handle tensor) {
  tensor_of(tensor);
  py::list found;
  look::each_part(tensor.ptr(), [&](PyObject* part) { found.append(py::handle(part)); });
  return found;
}

py::list tensors_in(py::handle value, int depth, bool also_in_objects) {
  py::list found;
  look::each_tensor(value.ptr(), depth, also_in_objects, [&](PyObject* tensor) {
    found.append(py::handle(tensor));
  });
  return found;
}

constexpr int kDeepestVariable = 3;  // a list of tuples of tensors

// Names and values of a record's attributes, also of those in slots; none of what is no record.
py::list fields_of(py::handle object) {
  py::list found;
  if (look::is_record(object.ptr())) {
    look::each_field(object.ptr(), [&](PyObject* name, PyObject* value) {
      found.append(py::make_tuple(py::handle(name), py::handle(value)));
    });
  }
  return found;
}

// Tensors that only this variable keeps. `copies` are further dictionaries that have it.
py::list kept_alone(const py::dict& variables, const py::str& name, Py_ssize_t copies) {
  py::list found;
  PyObject* value = PyDict_GetItemWithError(variables.ptr(), name.ptr());  // borrowed
  if (value != nullptr) {
    look::each_owned_alone(value, 1 + copies, kDeepestVariable, [&](PyObject* tensor) {
      found.append(py::handle(tensor));
    });
  }
  PyErr_Clear();
  return found;
}

// The address of its storage, 0 for none; the storage's bytes; the tensor's own elements, and the
// bytes of each.
py::tuple memory_of(py::handle object) {
  const at::Tensor& tensor = tensor_of(object);
  look::Memory memory = look::memory_of(tensor);
  return py::make_tuple(memory.address, memory.bytes, memory.elements, tensor.itemsize());
}

// The device's kind and index; ("", -1) for a tensor without memory.
py::tuple device_of(py::handle tensor) {
  std::string kind;
  int index = -1;
  look::each_part(tensor.ptr(), [&](PyObject* part) {
    c10::Device device = look::device_of(THPVariable_Unpack(part));
    if (kind.empty() && device.type() != c10::DeviceType::Meta) {
      kind = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
      index = device.index();
    }
  });
  return py::make_tuple(kind, index);
}

// The objects whose type is one of these, and no subclass. There may be a million objects; Python
// takes ten times as long.
py::list exactly_of(const py::list& objects, const py::tuple& types) {
  py::list found;
  for (py::handle object : objects) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    for (py::handle wanted : types) {
      if (type == wanted.ptr()) {
        found.append(object);
      }
    }
  }
  return found;
}

// ------------------------------------------------------------------ phase times

// A stopwatch in Python: an object with these methods.
class PythonStopwatch final : public Stopwatch {
 public:
  explicit PythonStopwatch(py::object device) : device_(std::move(device)) {}

  std::optional<int> device_of(PyObject* tensor) override {
    return device_.attr("device_of")(py::handle(tensor)).cast<std::optional<int>>();
  }

  Event mark(int device, Event again) override {
    auto* old = static_cast<py::object*>(again.get());
    py::object event = device_.attr("mark")(device, old != nullptr ? *old : py::none());
    return event.is_none() ? nullptr : std::make_shared<py::object>(std::move(event));
  }

  bool has_passed(const Event& event) override {
    return py::bool_(device_.attr("has_passed")(*static_cast<py::object*>(event.get())));
  }

  int64_t elapsed_ns(const Event& begin, const Event& end) override {
    return device_
        .attr("elapsed_ns")(*static_cast<py::object*>(begin.get()),
                            *static_cast<py::object*>(end.get()))
        .cast<int64_t>();
  }

 private:
  py::object device_;
};

std::shared_ptr<Stopwatch> stopwatch_of(const py::object& given) {
  if (given.is_none()) {
    return nullptr;
  }
  if (py::isinstance<Stopwatch>(given)) {
    return given.cast<std::shared_ptr<Stopwatch>>();
  }
  return std::make_shared<PythonStopwatch>(given);
}

// The document for the trace.
py::object document_of(const PhaseTimes& times) {
  if (!times.measures()) {
    return py::none();
  }
  py::list phase, device, begin, end, device_ns;
  for (const PhaseTimes::Row& row : times.rows()) {
    phase.append(row.phase);
    device.append(row.device);
    begin.append(row.begin);
    end.append(row.end);
    device_ns.append(row.device_ns);
  }
  py::dict document;
  document["problem"] = times.problem();
  document["missing"] = times.missing();
  document["phase"] = phase;
  document["device"] = device;
  document["begin"] = begin;
  document["end"] = end;
  document["device_ns"] = device_ns;
  return document;
}

// ------------------------------------------------------------------ what is imagined

// Returns how many storages were new to the device.
size_t back(imagined::Device& device, const py::list& tensors) {
  size_t fresh = 0;
  for (py::handle tensor : tensors) {
    fresh += device.back(tensor_of(tensor)) ? 1 : 0;
  }
  return fresh;
}

// Counters under the names of torch.cuda.memory_stats.
py::dict counters_of(const imagined::Device& device) {
  imagined::Device::Counters counted = device.counters();
  py::dict result;
  result["requested_bytes.current"] = counted.requested;
  result["requested_bytes.peak"] = counted.peak_requested;
  result["allocated_bytes.current"] = counted.allocated;
  result["allocated_bytes.peak"] = counted.peak_allocated;
  result["active_bytes.current"] = counted.active;
  result["active_bytes.peak"] = counted.peak_active;
  result["reserved_bytes.current"] = counted.reserved;
  result["reserved_bytes.peak"] = counted.peak_reserved;
  return result;
}

// ------------------------------------------------------------------ fork

void in_forked_child() {
  Recorder::start_afresh_after_fork();
  DeviceTotals::start_afresh_after_fork();
  cpu_allocator::uninstall();
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "pytracer's native core. Import pytracer.data._native instead.";
  pthread_atfork(nullptr, nullptr, &in_forked_child);

  raise_file_errors_as(py::module_::import("pytracer._core").attr("FileError"));

  py::dict built_for;
  built_for["torch"] = PYTRACER_TORCH_VERSION;
  built_for["torch_git"] = PYTRACER_TORCH_GIT_VERSION;
  built_for["cuda"] = PYTRACER_CUDA_VERSION;
  built_for["python"] = PYTRACER_PYTHON_VERSION;
  built_for["compiler"] = PYTRACER_COMPILER;
  m.attr("built_for") = built_for;

  py::tuple device_types(devices::kKinds.size());
  for (const devices::Kind& kind : devices::kKinds) {
    device_types[static_cast<size_t>(kind.type)] = kind.name;
  }
  m.attr("device_types") = device_types;

  py::class_<Session, std::shared_ptr<Session>>(m, "Session")
      .def(
          "begin",
          [](Session& session,
             uint64_t max_events,
             bool ops,
             bool cpu,
             bool device,
             bool stacks,
             bool saved_tensors,
             std::shared_ptr<PhaseTimes> phases) {
            auto detail = ops ? ops::Detail::kOp : ops::Detail::kCategory;
            Wants wants{detail, cpu, device, stacks, saved_tensors};
            return session.begin(max_events, wants, std::move(phases));
          },
          py::arg("max_events"),
          py::arg("ops"),
          py::arg("cpu"),
          py::arg("device"),
          py::arg("stacks"),
          py::arg("saved_tensors"),
          py::arg("phases").none(false))
      .def("count_step", &Session::count_step)
      .def("new_counts", &Session::new_counts)
      .def("own_time", &Session::own_time)
      .def("end", &Session::end)
      .def("read", [](const Session& session) { return to_dict(session.read()); })
      .def("end_and_read", [](Session& session) { return to_dict(session.end_and_read()); })
      .def("stream_to", &Session::stream_to)
      .def("note", &Session::note)
      .def("end_and_write", &Session::end_and_write)
      .def_property_readonly("is_open", &Session::is_open);
  py::class_<Held>(m, "Held")
      .def(py::init<>())
      .def("session", &Held::session)
      .def("count_steps", &Held::count_steps, py::arg("counter"), py::arg("rows") = py::none())
      .def("end", &Held::end);
  m.def("ends_if_it_raises", &ends_if_it_raises);
  m.def("ends_always", &ends_always);
  m.def("after_fork_in_child", &sessions::after_fork_in_child);
  m.def("status", &status);
  m.def("mark_step", [](const std::string& name) { Recorder::get().mark_step(name); });
  m.def("read_clock", [] {
    ClockReading now = read_clock();
    return std::make_pair(now.ticks, now.unix_ns);
  });
  // Recording's own computing since the process began: ticks of short calls, nanoseconds of others.
  m.def("read_own_time", [] {
    OwnTime::Reading now = OwnTime::read();
    return std::make_pair(now.ticks, now.ns);
  });

  m.def("adopt_cpu_tensors", &adopt_cpu_tensors, py::arg("tensors"), py::arg("also_known") = true);
  m.def("exactly_of", &exactly_of);
  m.def("open_device_tracker", &open_device_tracker, py::arg("device"), py::arg("path"));
  m.def(
      "has_device_tracker",
      [](std::string_view device) { return device_tracker(device) != nullptr; },
      py::arg("device") = "cuda");
  m.def("seed_device", &sessions::seed_device);
  m.def(
      "count_totals",
      [](bool cpu, bool device) { return sessions::count_totals({cpu, device}); },
      py::arg("cpu"),
      py::arg("device"));
  bind_step_rows(m);

  m.def("set_listeners", [](const py::object& hooks) {
    moments::set_listeners(hooks);
    Held::set_listener(py::object(hooks.attr("tidy")).ptr());
  });
  m.def("use_moments", &moments::use);
  m.def("mark_modules", &calls::mark_modules);
  m.def("listen_to_operators",
        [](bool on) { on ? ops::install(ops::Detail::kOp) : ops::uninstall(); });
  m.def("quietly", &call_quietly);
  m.def("without_collector", &without_collector);
  m.def("forbid_quiet_passes", &ops::forbid_quiet_passes);
  m.def("leave_out_inner_operators", &reads::leave_out_inner_operators);
  m.def("private_torch", [] {
    py::list checks;
    for (const private_torch::Check& check : private_torch::check()) {
      checks.append(py::make_tuple(check.name, check.purpose, check.problem));
    }
    return checks;
  });
  m.def("locals_of", &locals_of);
  m.def("label_workspaces", &workspaces::label);
  m.def("record_saved", [](const py::list& tensors) {
    for (py::handle tensor : tensors) {
      look::each_part(tensor.ptr(), [](PyObject* part) {
        labels::record_saved(THPVariable_Unpack(part));
        labels::record_shape(THPVariable_Unpack(part));
      });
    }
  });

  m.def("intern_label", &intern_label);
  m.def("intern_text", &intern_text);
  m.def("intern_stack", &intern_stack);
  m.def("recorded_lines", &recorded_lines);
  m.def("expect_generated", &python_stacks::expect_generated);
  m.def("allocates_in_python", &python_stacks::allocates_in_python);
  m.def("tell_of_graphs", &new_graphs::tell);
  m.def("label_of", &label_of);
  m.def("label_tensors", &label_tensors);
  m.def("label_as", &label_as);
  m.def("gradient_of", &gradient_of);
  m.def("attributes_of", &attributes_of);
  m.def("attribute_of", &attribute_of);
  m.def("items_of", &items_of);
  m.def("has_module", &has_module);
  m.def("tensors_in_attributes", &tensors_in_attributes);
  m.def("parts_of", &parts_of);
  m.def("is_parameter",
        [](py::handle it) { return look::is_tensor(it.ptr()) && look::is_parameter(it.ptr()); });
  m.def("tensors_in",
        &tensors_in,
        py::arg("value"),
        py::arg("depth") = 4,
        py::arg("also_in_objects") = false);
  m.def("device_of", &device_of);
  m.def("kept_alone", &kept_alone);
  m.def("memory_of", &memory_of);
  m.def("fields_of", &fields_of);
  py::class_<Hold>(m, "ImaginedHold")
      .def("__bool__", [](const Hold& held) { return held.block != nullptr; })
      .def_property_readonly("let_go", [](const Hold& held) {
        return held.block != nullptr && imagined::is_let_go(*held.block);
      });
  py::class_<imagined::Device>(m, "ImaginedDevice")
      .def(py::init([](bool is_cuda, const py::dict& rules) {
             return std::make_unique<imagined::Device>(
                 is_cuda ? DeviceType::kCuda : DeviceType::kCpu, rules_of(rules));
           }),
           py::arg("is_cuda"),
           py::arg("rules"))
      .def("open", &imagined::Device::open)
      .def("back", &back)
      .def("take_over",
           [](imagined::Device& device, py::handle result, py::handle before) {
             py::object storage = before.attr("untyped_storage")();
             return device.take_over(tensor_of(result), tensor_of(before));
           })
      .def("resized",
           [](imagined::Device& device, py::handle storage) {
             return device.resized(storage_of(storage));
           })
      .def("keep", &imagined::Device::keep, py::arg("amount"), py::arg("label"))
      .def(
          "hold",
          [](imagined::Device& device, py::handle tensor, uint64_t but_of) {
            return Hold{device.hold(tensor_of(tensor), but_of)};
          },
          py::arg("tensor"),
          py::arg("but_of") = imagined::kNoStream)
      .def("take", &imagined::Device::take, py::arg("least"), py::arg("most"))
      .def("trim", &imagined::Device::trim)
      .def("counters", &counters_of)
      .def("bounds",
           [](const imagined::Device& device) {
             imagined::Device::Counters counted = device.counters();
             return std::make_tuple(
                 counted.most_requested, counted.least_reserved, counted.most_reserved);
           })
      .def("close", &imagined::Device::close);
  py::class_<imagined::Guard>(m, "ImaginedGuard").def(py::init<>());
  m.def("take_uses_of_passes", [] {
    std::vector<std::pair<uint64_t, Hold>> uses;
    for (auto& [stream, block] : imagined::take_uses_of_passes()) {
      uses.emplace_back(stream, Hold{std::move(block)});
    }
    return uses;
  });
  m.def("imagined_stream", &imagined::stream);
  m.def("use_imagined_stream", &imagined::use_stream, py::arg("number"));
  m.def("ground", [](py::handle fake, py::handle real) {
    imagined::ground(tensor_of(fake), storage_of(real));
  });
  py::class_<labels::Watched>(m, "Watched")
      .def(py::init<>())
      .def(
          "add",
          [](labels::Watched& watched,
             py::handle tensor,
             py::handle holder,
             const py::tuple& path,
             uint32_t label,
             uint32_t gradient_label,
             bool instead) {
            tensor_of(tensor);
            return watched.add(
                tensor.ptr(), holder.ptr(), path.ptr(), label, gradient_label, instead);
          },
          py::arg("tensor"),
          py::arg("holder"),
          py::arg("path"),
          py::arg("label"),
          py::arg("gradient_label"),
          py::arg("instead") = false)
      .def("label", [](labels::Watched& watched) { return watched.label(); })
      .def("label_gradients", &labels::Watched::label_gradients);
  py::class_<Moments, std::shared_ptr<Moments>>(m, "Moments")
      .def(py::init<>())
      .def_readonly("watched", &Moments::watched)
      .def_readwrite("has_engines", &Moments::has_engines)
      .def("add_reducer",
           [](Moments& moments, py::handle module) { moments.add_reducer(module.ptr()); })
      .def("add_optimizer",
           [](Moments& moments, py::handle optimizer) { moments.add_optimizer(optimizer.ptr()); });
  py::class_<GraphWalks>(m, "GraphWalks")
      .def(py::init<>())
      .def("is_due", &GraphWalks::is_due, py::arg("structure"), py::arg("must") = false)
      .def("stepped", &GraphWalks::stepped);
  m.def("structure_of", [](const py::object& outputs) {
    return graph::look_at(outputs.ptr(), UINT64_MAX).structure;
  });
  py::class_<Stopwatch, std::shared_ptr<Stopwatch>>(m, "Stopwatch");
  m.def("cuda_stopwatch", [] { return device_stopwatch(DeviceType::kCuda); });
  py::class_<PhaseTimes, std::shared_ptr<PhaseTimes>>(m, "PhaseTimes")
      .def(py::init([](const py::object& stopwatch,
                       size_t pending,
                       size_t calls,
                       size_t others,
                       size_t kept) {
             PhaseTimes::Limits limits{pending, calls, others, kept};
             return std::make_shared<PhaseTimes>(stopwatch_of(stopwatch), limits);
           }),
           py::arg("stopwatch"),
           py::arg("pending"),
           py::arg("calls"),
           py::arg("others"),
           py::arg("kept"))
      .def("root_entered", [](PhaseTimes& t, py::handle module) { t.root_entered(module.ptr()); })
      .def("root_left", &PhaseTimes::root_left)
      .def("backward_begins", [](PhaseTimes& t, py::handle out) { t.backward_begins(out.ptr()); })
      .def("backward_ends", &PhaseTimes::backward_ends)
      .def("step_begins", &PhaseTimes::step_begins)
      .def("step_ends", &PhaseTimes::step_ends)
      .def("look", &PhaseTimes::look)
      .def("end_calls", &PhaseTimes::end_calls)
      .def("give_up", &PhaseTimes::give_up)
      .def_property_readonly("waiting", &PhaseTimes::waiting)
      .def("document", &document_of);
}

}  // namespace pytracer
