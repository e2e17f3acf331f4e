// The only pybind11 module. It translates and decides nothing: policy lives in Python.
#include "core/anonymous.h"
#include "core/chrome_trace.h"
#include "core/clock.h"
#include "core/harvest.h"
#include "core/lifetimes.h"
#include "core/recorder.h"
#include "core/snapshot.h"
#include "core/trace_file.h"
#include "core/trace_format.h"
#include "torch/calls.h"
#include "torch/cpu_allocator.h"
#include "torch/device_tracker.h"
#include "torch/ensure.h"
#include "torch/frame_locals.h"
#include "torch/labels.h"
#include "torch/look.h"
#include "torch/ops.h"
#include "torch/quietly.h"
#include "torch/session.h"
#include "torch/workspaces.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <pthread.h>
#include <span>
#include <string>
#include <tuple>
#include <unistd.h>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace pytracer {

namespace {

// ------------------------------------------------------------------ columns, to and from numpy

template <class P, class Visit>
void each_place_column(P& places, Visit visit) {
  visit("places.stream", places.stream);
  visit("places.pool_high", places.pool_high);
  visit("places.pool_low", places.pool_low);
  visit("places.device_type", places.device_type);
  visit("places.device_index", places.device_index);
}

// Every numeric column of a recording, under the name it has in Python.
template <class R, class Visit>
void each_column(R& r, Visit visit) {
  visit("clock.ticks", r.clock.ticks);
  visit("clock.unix_ns", r.clock.unix_ns);
  visit("stacks.parent", r.stacks.parent);
  visit("stacks.file", r.stacks.file);
  visit("stacks.function", r.stacks.function);
  visit("stacks.line", r.stacks.line);
  each_place_column(r.places, visit);
  visit("labels.category", r.labels.category);
  visit("labels.role", r.labels.role);
  visit("labels.name", r.labels.name);
  visit("labels.shape", r.labels.shape);
  visit("labels.dtype", r.labels.dtype);
  visit("threads.native_id", r.threads.native_id);
  visit("threads.name", r.threads.name);
  visit("events.ticks", r.events.ticks);
  visit("events.address", r.events.address);
  visit("events.bytes", r.events.bytes);
  visit("events.action", r.events.action);
  visit("events.scope", r.events.scope);
  visit("events.place", r.events.place);
  visit("events.thread", r.events.thread);
  visit("scopes.ticks", r.scope_begins.ticks);
  visit("scopes.parent", r.scope_begins.parent);
  visit("scopes.forward", r.scope_begins.forward);
  visit("scopes.name", r.scope_begins.name);
  visit("scopes.thread", r.scope_begins.thread);
  visit("scopes.kind", r.scope_begins.kind);
  visit("scopes.flags", r.scope_begins.flags);
  visit("scope_ends.ticks", r.scope_ends.ticks);
  visit("scope_ends.scope", r.scope_ends.scope);
  visit("scope_ends.stack", r.scope_ends.stack);
}

// Hands the vector's memory to numpy; nothing is copied.
template <class T>
py::array_t<T> to_array(std::vector<T>&& column) {
  auto* kept = new std::vector<T>(std::move(column));
  py::capsule owner(kept, [](void* held) { delete static_cast<std::vector<T>*>(held); });
  return py::array_t<T>(static_cast<py::ssize_t>(kept->size()), kept->data(), owner);
}

py::dict to_dict(Recording&& recording) {
  py::dict columns;
  each_column(recording,
              [&](const char* name, auto& column) { columns[name] = to_array(std::move(column)); });
  for (std::string& text : recording.strings) {
    make_utf8(text);
  }
  columns["strings"] = py::cast(recording.strings);
  columns["meta"] = py::str(recording.meta);
  py::dict losses;
  for (const auto& [name, count] : recording.losses) {
    losses[py::str(name)] = count;
  }
  columns["losses"] = losses;
  return columns;
}

template <class T>
using Column = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
std::span<const T> view(const Column<T>& column) {
  return {column.data(), static_cast<size_t>(column.size())};
}

template <class T>
std::span<const T> column_of(const py::dict& columns, const char* name, Column<T>& holder) {
  holder = columns[name].cast<Column<T>>();
  return view(holder);
}

// Fills the columns it visits from those of the same name.
auto copy_from(const py::dict& columns) {
  return [&columns](const char* name, auto& column) {
    using T = typename std::decay_t<decltype(column)>::value_type;
    Column<T> holder;
    auto values = column_of<T>(columns, name, holder);
    column.assign(values.begin(), values.end());
  };
}

Recording from_dict(const py::dict& columns) {
  Recording recording;
  each_column(recording, copy_from(columns));
  recording.strings = columns["strings"].cast<std::vector<std::string>>();
  recording.meta = columns["meta"].cast<std::string>();
  for (const auto& [name, count] : columns["losses"].cast<py::dict>()) {
    recording.losses.emplace_back(name.cast<std::string>(), count.cast<uint64_t>());
  }
  return recording;
}

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
  facts["own_ticks"] = OwnTime::total.load();
  facts["ops_installed"] = ops::installed();
  facts["cpu_installed"] = cpu_allocator::installed();
  facts["calls_installed"] = calls::installed();
  facts["calls_problem"] = sessions::calls_problem();
  facts["device_problem"] = sessions::device_problem();
  return facts;
}

// ------------------------------------------------------------------ Python of ours

// What the function returns, None where it fails; only what the program must see is raised.
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

const at::Tensor& tensor_of(py::handle object) {
  if (!look::is_tensor(object.ptr())) {
    throw py::type_error("expected a tensor");
  }
  return THPVariable_Unpack(object.ptr());
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

// Those that have no name.
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

// The pairs of a dictionary, or of a container of torch's own; of anything else none.
py::list items_of(py::handle container) {
  if (PyDict_Check(container.ptr())) {
    return py::reinterpret_steal<py::list>(PyDict_Items(container.ptr()));
  }
  return look::is_of_torch(Py_TYPE(container.ptr())) ? py::list(container.attr("items")())
                                                     : py::list();
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

// The address of its memory, 0 for none; how large that is; and its own elements, and their size.
py::tuple memory_of(py::handle object) {
  const at::Tensor& tensor = tensor_of(object);
  look::Memory memory = look::memory_of(tensor);
  return py::make_tuple(memory.address, memory.bytes, memory.elements, tensor.itemsize());
}

// The device's kind and its index; of a tensor without memory neither.
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

// Those that are of one of the types itself. There may be a million; Python takes ten times as
// long.
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

// ------------------------------------------------------------------ files and lifetimes

py::dict report_of(const ReadReport& report) {
  py::dict facts;
  facts["status"] = report.status == ReadReport::Status::kComplete    ? "complete"
                    : report.status == ReadReport::Status::kTruncated ? "truncated"
                                                                      : "corrupt";
  facts["version"] = std::to_string(report.major) + "." + std::to_string(report.minor);
  facts["good_bytes"] = report.good_bytes;
  facts["total_bytes"] = report.total_bytes;
  facts["skipped_chunks"] = report.skipped_chunks;
  py::dict lost;
  for (const auto& entry : report.lost) {
    lost[py::str(entry.table)] = py::make_tuple(entry.rows, entry.chunks);
  }
  facts["lost"] = lost;
  facts["notes"] = report.notes;
  return facts;
}

py::tuple read_file(const std::string& path) {
  ReadReport report;
  Recording recording;
  {
    py::gil_scoped_release unlocked;
    recording = read_recording(path, report);
  }
  return py::make_tuple(to_dict(std::move(recording)), report_of(report));
}

void write_file(const std::string& path, const py::dict& columns, bool overwrite) {
  Recording recording = from_dict(columns);
  py::gil_scoped_release unlocked;
  write_recording(recording, path, overwrite);
}

py::dict lifetimes_of(const py::dict& columns) {
  Column<uint64_t> address;
  Column<uint64_t> bytes;
  Column<uint8_t> action;
  Column<uint16_t> place;
  EventColumns events{column_of<uint64_t>(columns, "events.address", address),
                      column_of<uint64_t>(columns, "events.bytes", bytes),
                      column_of<uint8_t>(columns, "events.action", action),
                      column_of<uint16_t>(columns, "events.place", place)};
  Recording::Places place_columns;
  each_place_column(place_columns, copy_from(columns));
  Lifetimes found;
  {
    py::gil_scoped_release unlocked;
    found = match_lifetimes(events, to_places(place_columns));
  }
  py::dict result;
  result["start"] = to_array(std::move(found.start));
  result["end"] = to_array(std::move(found.end));
  result["completed"] = to_array(std::move(found.completed));
  result["address"] = to_array(std::move(found.address));
  result["bytes"] = to_array(std::move(found.bytes));
  result["place"] = to_array(std::move(found.place));
  result["allocation_of_event"] = to_array(std::move(found.allocation_of_event));
  py::dict counters;
  for (const auto& [name, count] : found.counters.named()) {
    counters[py::str(std::string(name))] = count;
  }
  result["counters"] = counters;
  return result;
}

// ------------------------------------------------------------------ memory snapshots

// What the stacks and strings of a snapshot are to a Trace as well, and rows of its own.
py::dict read_snapshot_file(const std::string& path) {
  Snapshot found;
  {
    py::gil_scoped_release unlocked;
    found = read_snapshot(path);
  }
  py::dict columns;
  auto add = [&](const char* name, auto& column) { columns[name] = to_array(std::move(column)); };
  add("stacks.parent", found.stacks.parent);
  add("stacks.file", found.stacks.file);
  add("stacks.function", found.stacks.function);
  add("stacks.line", found.stacks.line);
  add("entries.device", found.entries.device);
  add("entries.action", found.entries.action);
  add("entries.address", found.entries.address);
  add("entries.bytes", found.entries.bytes);
  add("entries.stream", found.entries.stream);
  add("entries.pool_high", found.entries.pool_high);
  add("entries.pool_low", found.entries.pool_low);
  add("entries.time_us", found.entries.time_us);
  add("entries.stack", found.entries.stack);
  add("entries.category", found.entries.category);
  add("entries.metadata", found.entries.metadata);
  add("segments.device", found.segments.device);
  add("segments.address", found.segments.address);
  add("segments.bytes", found.segments.bytes);
  add("segments.allocated", found.segments.allocated);
  add("segments.requested", found.segments.requested);
  add("segments.stream", found.segments.stream);
  add("segments.pool_high", found.segments.pool_high);
  add("segments.pool_low", found.segments.pool_low);
  add("segments.expandable", found.segments.expandable);
  add("blocks.segment", found.blocks.segment);
  add("blocks.address", found.blocks.address);
  add("blocks.bytes", found.blocks.bytes);
  add("blocks.requested", found.blocks.requested);
  add("blocks.state", found.blocks.state);
  add("blocks.stack", found.blocks.stack);
  add("annotations.device", found.annotations.device);
  add("annotations.time_us", found.annotations.time_us);
  add("annotations.name", found.annotations.name);
  add("annotations.stage", found.annotations.stage);
  columns["strings"] = py::cast(found.strings);
  columns["devices"] = found.devices;
  columns["settings"] = py::cast(found.settings);
  columns["pytracer"] = py::str(found.pytracer);
  columns["losses"] = py::cast(found.losses);
  return columns;
}

// ------------------------------------------------------------------ Chrome trace

// A ChromeTrace and the columns it reads.
class ChromeTraceOfArrays {
 public:
  ChromeTraceOfArrays(const std::vector<py::bytes>& texts, const std::vector<py::dict>& tables) {
    std::vector<std::string> copies(texts.begin(), texts.end());
    std::vector<ChromeRows> rows;
    for (const py::dict& table : tables) {
      rows.push_back(rows_of(table));
    }
    trace_.emplace(copies, std::move(rows));
  }

  py::bytes next(size_t bytes) {
    std::string chunk;
    {
      py::gil_scoped_release unlocked;
      chunk.reserve(bytes + 4096);
      trace_->next(bytes, chunk);
    }
    return py::bytes(chunk);
  }

  uint64_t events() const { return trace_->events(); }

 private:
  ChromeRows rows_of(const py::dict& table) {
    auto column = [&](const char* name) { return keep(table[name]); };
    ChromeRows rows{static_cast<ChromeRows::Kind>(table["kind"].cast<uint8_t>()),
                    table["category"].cast<std::string>(),
                    table["process"].cast<uint32_t>(),
                    column("begin"),
                    column("end"),
                    column("name"),
                    column("thread"),
                    column("id"),
                    column("from"),
                    column("to"),
                    {}};
    for (py::handle argument : table["arguments"]) {
      auto [name, kind, values] = argument.cast<std::tuple<std::string, uint8_t, py::object>>();
      rows.arguments.push_back(
          {std::move(name), static_cast<ChromeArgument::Kind>(kind), keep(values)});
    }
    return rows;
  }

  std::span<const int64_t> keep(const py::object& values) {
    return view(columns_.emplace_back(values.cast<Column<int64_t>>()));
  }

  std::vector<Column<int64_t>> columns_;
  std::optional<ChromeTrace> trace_;
};

// The ends, clamped so that the slices nest.
py::array_t<int64_t> nest_slices(const Column<int64_t>& thread,
                                 const Column<int64_t>& begin,
                                 const Column<int64_t>& end) {
  auto given = view(end);
  std::vector<int64_t> ends(given.begin(), given.end());
  {
    py::gil_scoped_release unlocked;
    nest(view(thread), view(begin), ends);
  }
  return to_array(std::move(ends));
}

py::array_t<int64_t> thin(const Column<int64_t>& times,
                          const std::vector<Column<int64_t>>& columns,
                          int64_t bucket_ns) {
  std::vector<std::span<const int64_t>> views;
  for (const auto& column : columns) {
    views.push_back(view(column));
  }
  return to_array(thin_samples(view(times), views, bucket_ns));
}

// ------------------------------------------------------------------ fork

void in_forked_child() {
  Recorder::start_afresh_after_fork();
  cpu_allocator::uninstall();
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "pytracer's native core. Import pytracer._native instead.";
  pthread_atfork(nullptr, nullptr, &in_forked_child);

  static py::exception<FileError> file_error(m, "FileError");
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) {
        std::rethrow_exception(raised);
      }
    } catch (const FileError& error) {
      auto text = [](const char* of_path) {  // which need not be UTF-8
        return py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(of_path));
      };
      py::object value = py::reinterpret_borrow<py::object>(file_error.ptr())(text(error.what()));
      value.attr("kind") = static_cast<int>(error.kind());
      value.attr("path") = text(error.path().c_str());
      PyErr_SetObject(file_error.ptr(), value.ptr());
    }
  });

  py::dict built_for;
  built_for["torch"] = PYTRACER_TORCH_VERSION;
  built_for["torch_git"] = PYTRACER_TORCH_GIT_VERSION;
  built_for["cuda"] = PYTRACER_CUDA_VERSION;
  built_for["python"] = PYTRACER_PYTHON_VERSION;
  built_for["compiler"] = PYTRACER_COMPILER;
  m.attr("built_for") = built_for;

  py::class_<Session, std::shared_ptr<Session>>(m, "Session")
      .def(
          "begin",
          [](Session& session,
             uint64_t max_events,
             bool ops,
             bool cpu,
             bool device,
             bool stacks,
             bool saved_tensors) {
            auto detail = ops ? ops::Detail::kOp : ops::Detail::kCategory;
            return session.begin(max_events, {detail, cpu, device, stacks, saved_tensors});
          },
          py::arg("max_events"),
          py::arg("ops"),
          py::arg("cpu"),
          py::arg("device"),
          py::arg("stacks"),
          py::arg("saved_tensors"))
      .def("end", &Session::end)
      .def("read", [](const Session& session) { return to_dict(session.read()); })
      .def("end_and_read", [](Session& session) { return to_dict(session.end_and_read()); })
      .def("stream_to", &Session::stream_to)
      .def("end_and_write", &Session::end_and_write)
      .def_property_readonly("is_open", &Session::is_open);
  py::class_<Held>(m, "Held")
      .def(py::init<>())
      .def("session", &Held::session)
      .def("count_steps", &Held::count_steps)
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

  m.def("adopt_cpu_tensors", &adopt_cpu_tensors, py::arg("tensors"), py::arg("also_known") = true);
  m.def("exactly_of", &exactly_of);
  m.def("has_device_tracker", [] { return device_tracker() != nullptr; });
  m.def("seed_device", &sessions::seed_device);

  m.def(
      "set_listeners",
      [](py::handle name_of_module,
         py::handle before_root,
         py::handle after_root,
         py::handle before_backward,
         py::handle after_backward,
         py::handle before_step,
         py::handle after_step,
         py::handle sessions_over) {
        calls::set_listeners({name_of_module.ptr(),
                              before_root.ptr(),
                              after_root.ptr(),
                              before_backward.ptr(),
                              after_backward.ptr(),
                              before_step.ptr(),
                              after_step.ptr()});
        Held::set_listener(sessions_over.ptr());
      },
      py::arg("name_of_module"),
      py::arg("before_root"),
      py::arg("after_root"),
      py::arg("before_backward"),
      py::arg("after_backward"),
      py::arg("before_step"),
      py::arg("after_step"),
      py::arg("sessions_over"));
  m.def("mark_modules", &calls::mark_modules);
  m.def("listen_to_operators",
        [](bool on) { on ? ops::install(ops::Detail::kOp) : ops::uninstall(); });
  m.def("quietly", &call_quietly);
  m.def("locals_of", &locals_of);
  m.def("label_workspaces", &workspaces::label);
  m.def("record_saved", [](const py::list& tensors) {
    for (py::handle tensor : tensors) {
      look::each_part(tensor.ptr(),
                      [](PyObject* part) { labels::record_saved(THPVariable_Unpack(part)); });
    }
  });

  m.def("intern_label", &intern_label);
  m.def("label_of", &label_of);
  m.def("label_tensors", &label_tensors);
  m.def("label_as", &label_as);
  m.def("gradient_of", &gradient_of);
  m.def("attributes_of", &attributes_of);
  m.def("items_of", &items_of);
  m.def("parts_of", &parts_of);
  m.def("tensors_in",
        &tensors_in,
        py::arg("value"),
        py::arg("depth") = 4,
        py::arg("also_in_objects") = false);
  m.def("device_of", &device_of);
  m.def("memory_of", &memory_of);
  m.def("identity_of", [](const py::object& nested) { return labels::identity_of(nested.ptr()); });
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
      .def("label", &labels::Watched::label)
      .def("label_gradients", &labels::Watched::label_gradients)
      .def("label_gradients_of", &labels::Watched::label_gradients_of);

  m.def("read_file", &read_file);
  m.def("write_file", &write_file);
  m.def("without_paths", &without_paths);
  m.def("read_snapshot", &read_snapshot_file);
  m.def("lifetimes", &lifetimes_of);

  py::class_<ChromeTraceOfArrays>(m, "ChromeTrace")
      .def(py::init<const std::vector<py::bytes>&, const std::vector<py::dict>&>())
      .def("next", &ChromeTraceOfArrays::next)
      .def("events", &ChromeTraceOfArrays::events);
  m.def("nest_slices", &nest_slices);
  m.def("thin_samples", &thin);
}

}  // namespace pytracer
