// The only pybind11 module. It translates and decides nothing: policy lives in Python.
#include "core/chrome_trace.h"
#include "core/clock.h"
#include "core/harvest.h"
#include "core/lifetimes.h"
#include "core/recorder.h"
#include "core/snapshot.h"
#include "core/streamer.h"
#include "core/trace_file.h"
#include "torch/cpu_allocator.h"
#include "torch/device_tracker.h"
#include "torch/interceptors.h"
#include "torch/labels.h"
#include "torch/ops.h"
#include "torch/python_stacks.h"
#include "torch/saved_tensors.h"
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

// What the session has recorded; `end` ends it first, and nothing is added any more.
py::dict read_session(uint32_t session, bool end) {
  RecordingBuilder builder;
  {
    py::gil_scoped_release unlocked;
    Harvest harvest(session);  // while the session is open it knows where it began
    if (end) {
      Recorder::get().end_session(session);
    }
    harvest.drain_all(builder);
  }
  return to_dict(std::move(builder.recording));
}

void clear() {
  Recorder::get().clear();
  if (Recorder::get().sessions() == 0) {
    python_stacks::clear();
    interceptors::forget_all_modules();
  }
}

py::dict status() {
  Recorder& recorder = Recorder::get();
  py::dict facts;
  facts["recording"] = recording.load();
  facts["sessions"] = recorder.sessions();
  facts["events"] = recorder.events.size();
  facts["scopes"] = recorder.scopes.size();
  facts["host_bytes"] = recorder.events.bytes_held() + recorder.scopes.bytes_held() +
                        recorder.scope_ends.bytes_held();
  facts["callback_errors"] = interceptors::callback_errors();
  facts["may_read_gradients"] = interceptors::may_read_gradients();
  facts["passes_not_heard"] = ops::passes_not_heard();
  facts["own_ticks"] = OwnTime::total.load();
  facts["ops_installed"] = ops::installed();
  facts["cpu_installed"] = cpu_allocator::installed();
  return facts;
}

// ------------------------------------------------------------------ labels

uint32_t intern_label(int category,
                      const std::string& role,
                      const std::string& name,
                      const std::string& shape,
                      const std::string& dtype) {
  Recorder& recorder = Recorder::get();
  return recorder.labels.intern({static_cast<uint8_t>(category),
                                 recorder.strings.intern(role),
                                 recorder.strings.intern(name),
                                 recorder.strings.intern(shape),
                                 recorder.strings.intern(dtype)});
}

const at::Tensor& tensor_of(py::handle object) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error("expected a tensor");
  }
  return THPVariable_Unpack(object.ptr());
}

// How many of the tensors had a block to label.
size_t label_tensors(const py::list& tensors, const std::vector<uint32_t>& labels) {
  size_t labelled = 0;
  for (size_t i = 0; i < std::min(tensors.size(), labels.size()); ++i) {
    labelled += labels::record(tensor_of(tensors[i]), labels[i]) ? 1 : 0;
  }
  return labelled;
}

size_t adopt_cpu_tensors(const py::list& tensors, bool also_known) {
  size_t adopted = 0;
  for (py::handle object : tensors) {
    adopted += labels::adopt_cpu(tensor_of(object), also_known);
  }
  return adopted;
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

// A forked child leaves its parent's streamer where it lies: its thread does not exist there, its
// mutex may be locked for ever, glibc waits for ever to destroy a condition variable that somebody
// waits for, and the file is its parent's.
struct DeleteUnlessForked {
  pid_t owner = getpid();

  void operator()(Streamer* streamer) const {
    if (getpid() == owner) {
      delete streamer;
    }
  }
};

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

  m.def("begin_session",
        [](uint64_t max_events) { return Recorder::get().begin_session(max_events); });
  m.def("end_session", [](uint32_t session) {
    py::gil_scoped_release unlocked;
    Recorder::get().end_session(session);
  });
  m.def("read_session", [](uint32_t session) { return read_session(session, false); });
  m.def("end_and_read_session", [](uint32_t session) { return read_session(session, true); });
  m.def("clear", &clear);
  m.def("status", &status);
  m.def("mark_step", [](const std::string& name) { Recorder::get().mark_step(name); });
  m.def("read_clock", [] {
    ClockReading now = read_clock();
    return std::make_pair(now.ticks, now.unix_ns);
  });

  py::enum_<ops::Detail>(m, "Detail")
      .value("category", ops::Detail::kCategory)
      .value("op", ops::Detail::kOp);
  m.def("install_ops", &ops::install);
  m.def("uninstall_ops", &ops::uninstall);
  m.def("install_cpu", &cpu_allocator::install);
  m.def("uninstall_cpu", &cpu_allocator::uninstall);
  m.def("adopt_cpu_tensors", &adopt_cpu_tensors, py::arg("tensors"), py::arg("also_known") = true);
  m.def("exactly_of", &exactly_of);
  m.def("install_stacks", &python_stacks::install);
  m.def("uninstall_stacks", &python_stacks::uninstall);

  m.def("has_device_tracker", [] { return device_tracker() != nullptr; });
  m.def("device_ready", [] { return device_tracker() != nullptr && device_tracker()->ready(); });
  m.def("attach_device", [] { return device_tracker()->attach(); });
  m.def("seed_device", [] {
    py::gil_scoped_release unlocked;
    device_tracker()->seed();
  });

  auto stand_in = [](PyObject* (*make)(PyObject*)) {
    return [make](py::handle original) {
      return py::reinterpret_steal<py::object>(make(original.ptr()));
    };
  };
  m.def("make_module_call", stand_in(&interceptors::make_module_call));
  m.def("make_engine_call", stand_in(&interceptors::make_engine_call));
  m.def("make_step_code_call", stand_in(&interceptors::make_step_code_call));
  m.def(
      "set_callbacks",
      [](const py::object& name_of_module,
         const py::object& before_root,
         const py::object& after_root,
         const py::object& before_backward,
         const py::object& after_backward,
         const py::object& before_step,
         const py::object& after_step) {
        auto or_null = [](const py::object& object) {
          return object.is_none() ? nullptr : object.ptr();
        };
        interceptors::set_callbacks({or_null(name_of_module),
                                     or_null(before_root),
                                     or_null(after_root),
                                     or_null(before_backward),
                                     or_null(after_backward),
                                     or_null(before_step),
                                     or_null(after_step)});
      },
      py::arg("name_of_module") = py::none(),
      py::arg("before_root") = py::none(),
      py::arg("after_root") = py::none(),
      py::arg("before_backward") = py::none(),
      py::arg("after_backward") = py::none(),
      py::arg("before_step") = py::none(),
      py::arg("after_step") = py::none());
  m.def("mark_modules", &interceptors::mark_modules);
  m.def("forget_module", &interceptors::forget_module);
  m.def("count_callback_error", &interceptors::count_error);
  m.def("label_workspaces", &workspaces::label);
  m.def("record_saved", [](const py::list& tensors) {
    for (py::handle tensor : tensors) {
      labels::record_saved(tensor_of(tensor));
    }
  });
  m.def("saved_tensor_hooks", [] {
    return py::make_tuple(py::reinterpret_steal<py::object>(saved_tensors::pack_hook()),
                          py::reinterpret_steal<py::object>(saved_tensors::unpack_hook()));
  });

  m.def("intern_label", &intern_label);
  m.def("label_tensors", &label_tensors);
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

  py::class_<Streamer, std::unique_ptr<Streamer, DeleteUnlessForked>>(m, "Streamer")
      .def(py::init<uint32_t, const std::string&, bool, const std::string&>())
      .def("finish", &Streamer::finish, py::call_guard<py::gil_scoped_release>());
  m.def("read_file", &read_file);
  m.def("write_file", &write_file);
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
