// The extension that reads and writes files. It needs no torch, so that a trace can be read without
// one.
#include "columns.h"
#include "core/allocator_replay.h"
#include "core/anonymous.h"
#include "core/chrome_trace.h"
#include "core/lifetimes.h"
#include "core/live.h"
#include "core/perfetto_trace.h"
#include "core/snapshot.h"
#include "core/snapshot_writer.h"
#include "core/steps.h"
#include "core/trace_file.h"
#include "core/trace_format.h"
#include "core/trace_tail.h"

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pytracer {

namespace {

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

py::tuple read_file(const std::string& path, uint64_t most_memory) {
  ReadReport report;
  Recording recording;
  {
    py::gil_scoped_release unlocked;
    recording = read_recording(path, report, {most_memory});
  }
  return py::make_tuple(to_dict(std::move(recording)), report_of(report));
}

// The columns with valid references, as a file's reader hands them out.
py::dict safe_columns(const py::dict& columns) {
  ViewOfArrays arrays(columns);
  const RecordingView view = arrays.recording();
  Recording recording;
  recording.meta = view.meta;
  recording.strings.assign(view.strings.begin(), view.strings.end());
  recording.losses = view.losses;
  Recording::each_table(
      [](const char*, auto& table, const auto& seen) {
        table.each_column(
            [](const auto&, auto& into, const auto& rows) {
              into.assign(rows.begin(), rows.end());
            },
            table,
            seen);
      },
      recording,
      view);
  Losses losses;
  std::vector<std::string> said;
  Notes notes(said);
  make_safe(recording, losses, notes);
  return to_dict(std::move(recording));
}

void write_file(const std::string& path, const py::dict& columns, bool overwrite) {
  ViewOfArrays arrays(columns);
  const RecordingView recording = arrays.recording();
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
  ViewOfArrays arrays(columns);
  auto places = arrays.table<RecordingView::Places>("places");
  Lifetimes found;
  {
    py::gil_scoped_release unlocked;
    found = match_lifetimes(events, to_places(places));
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

// ------------------------------------------------------------------ the allocator, replayed

// The steps to replay, as views of the dictionary's columns.
struct StepsOfArrays {
  explicit StepsOfArrays(const py::dict& steps)
      : columns{column_of<uint8_t>(steps, "kind", kind),
                column_of<uint32_t>(steps, "block", block),
                column_of<uint64_t>(steps, "bytes", bytes),
                column_of<uint32_t>(steps, "lane", lane)} {
    if (steps.contains("address")) {
      columns.address = column_of<uint64_t>(steps, "address", address);
    }
    for (auto [stream, pool] : steps["lanes"].cast<std::vector<std::pair<uint64_t, uint32_t>>>()) {
      lanes.push_back({stream, pool});
    }
  }

  Column<uint8_t> kind;
  Column<uint32_t> block;
  Column<uint64_t> bytes;
  Column<uint32_t> lane;
  Column<uint64_t> address;
  ReplaySteps columns;
  std::vector<ReplayLane> lanes;
};

py::dict counted(const ReplayResult& found) {
  py::dict result;
  result["peak_reserved"] = found.peak_reserved;
  result["peak_allocated"] = found.peak_allocated;
  result["peak_active"] = found.peak_active;
  result["peak_reserved_step"] = found.peak_reserved_step;
  result["reserved"] = found.reserved;
  result["allocated"] = found.allocated;
  result["active"] = found.active;
  result["largest_free"] = found.largest_free;
  result["largest_free_of_lane"] = found.largest_free_of_lane;
  result["retries"] = found.retries;
  result["device_allocs"] = found.device_allocs;
  result["device_frees"] = found.device_frees;
  result["departed_step"] = found.departed_step;
  result["order_matters"] = found.order_matters;
  result["failed_step"] = found.failed_step;
  result["failed_bytes"] = found.failed_bytes;
  return result;
}

py::dict replay_orders(const py::dict& steps,
                       const py::dict& rules,
                       uint64_t most,
                       bool recorded_is_enough) {
  const StepsOfArrays given(steps);
  const AllocatorRules own_rules = rules_of(rules);
  ReplayOrders found;
  {
    py::gil_scoped_release unlocked;
    found = replay_in_orders(given.columns, given.lanes, own_rules, most, recorded_is_enough);
  }
  py::dict result;
  result["lowest_peak"] = found.lowest_peak;
  result["highest_peak"] = found.highest_peak;
  result["orders"] = found.orders;
  result["failed"] = found.failed;
  result["failure"] = found.failed > 0 ? py::object(counted(found.failure)) : py::none();
  result["are_all"] = found.are_all;
  return result;
}

py::dict replay(const py::dict& steps, const py::dict& rules, bool curves) {
  const StepsOfArrays given(steps);
  const AllocatorRules own_rules = rules_of(rules);
  ReplayResult found;
  {
    py::gil_scoped_release unlocked;
    found = replay_allocator(given.columns, given.lanes, own_rules, curves);
  }
  py::dict result = counted(found);
  result["reserved_after"] = to_array(std::move(found.reserved_after));
  result["active_after"] = to_array(std::move(found.active_after));
  result["largest_free_after"] = to_array(std::move(found.largest_free_after));
  return result;
}

// ------------------------------------------------------------------ memory snapshots

// A snapshot for Python: stacks and strings as in a Trace, and rows of its own.
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

// A SnapshotWriter and the columns it reads. Each call returns the next piece of the file.
class SnapshotOfArrays {
 public:
  SnapshotOfArrays(const py::list& words, uint32_t memo) {
    std::vector<SnapshotWords> all;
    all.reserve(words.size());
    for (py::handle each : words) {
      auto [category, text, label, frames] =
          each.cast<std::tuple<std::string, std::string, std::string, py::list>>();
      SnapshotWords& one = all.emplace_back();
      one.category = std::move(category);
      one.text = std::move(text);
      one.label = std::move(label);
      for (py::handle frame : frames) {
        auto [name, file, line] = frame.cast<std::tuple<std::string, std::string, uint32_t>>();
        one.frames.push_back({std::move(name), std::move(file), line});
      }
    }
    writer_.emplace(std::move(all), memo);
  }

  py::bytes begin() {
    return piece([&](std::string& out) { writer_->begin(out); });
  }

  py::bytes begin_device(const py::dict& tables) {
    columns_.clear();
    SnapshotDevice device = device_of(tables);
    return piece([&](std::string& out) { writer_->begin_device(device, out); });
  }

  py::bytes entries(const Column<uint8_t>& action,
                    const Column<uint32_t>& row,
                    const Column<int64_t>& time_us) {
    SnapshotEntries some{view(action), view(row), view(time_us)};
    return piece([&](std::string& out) { writer_->entries(some, out); });
  }

  py::bytes end_device() {
    return piece([&](std::string& out) { writer_->end_device(out); });
  }

  py::bytes end() {
    return piece([&](std::string& out) { writer_->end(out); });
  }

 private:
  template <class Write>
  static py::bytes piece(Write write) {
    std::string out;
    {
      py::gil_scoped_release unlocked;
      write(out);
    }
    return py::bytes(out);
  }

  SnapshotDevice device_of(const py::dict& device) {
    SnapshotDevice found;
    found.blocks = {keep<uint64_t>(device, "blocks.address"),
                    keep<uint64_t>(device, "blocks.bytes"),
                    keep<uint16_t>(device, "blocks.place")};
    found.events = {keep<uint64_t>(device, "events.address"),
                    keep<uint64_t>(device, "events.bytes"),
                    keep<uint16_t>(device, "events.place")};
    found.words = keep<uint32_t>(device, "words");
    found.places = {keep<uint64_t>(device, "places.stream"),
                    keep<uint64_t>(device, "places.pool_high"),
                    keep<uint64_t>(device, "places.pool_low")};
    return found;
  }

  template <typename T>
  std::span<const T> keep(const py::dict& device, const char* name) {
    auto column = device[name].cast<Column<T>>();
    columns_.push_back(column);
    return view(column);
  }

  std::vector<py::object> columns_;
  std::optional<SnapshotWriter> writer_;
};

// ------------------------------------------------------------------ a recording that goes on

// A trace that is still written: its totals so far, and its rows as they come.
class Follower {
 public:
  Follower(const std::string& path, uint64_t most_memory) : tail_(path, {most_memory}) {}

  // Reads about that many bytes at most. True if there is more to read now.
  bool advance(size_t most_bytes) {
    py::gil_scoped_release unlocked;
    bool more = tail_.advance(most_bytes, [this](Recording& flush) {
      live_.take(flush);
      append_table(rows_.events, flush.events);
      append_table(rows_.scope_begins, flush.scope_begins);
      append_table(rows_.scope_ends, flush.scope_ends);
    });
    if (tail_.state() == TraceTail::State::kComplete && !ended_) {
      ended_ = true;
      live_.end();
    }
    return more;
  }

  py::dict state() const {
    constexpr std::array kStates = {"growing", "complete", "damaged", "replaced"};
    const Recording& tables = live_.tables();
    py::dict state;
    state["state"] = kStates[static_cast<size_t>(tail_.state())];
    state["bytes_read"] = tail_.bytes_read();
    state["events"] = live_.events();
    state["step"] = live_.step();
    state["failed_bytes"] = live_.failed_bytes();
    state["last_ticks"] = live_.last_ticks();
    state["clock_ticks"] = tables.clock.ticks;
    state["clock_unix_ns"] = tables.clock.unix_ns;
    state["losses"] = tables.losses;
    py::list devices;
    for (const LiveDevice& device : live_.devices()) {
      py::dict row;
      row["type"] = device.type;
      row["index"] = device.index;
      row["reserved"] = device.reserved;
      row["now"] = device.now;
      py::dict peak;
      peak["bytes"] = device.peak.bytes;
      peak["ticks"] = device.peak.ticks;
      peak["step"] = device.peak.step;
      row["peak"] = peak;
      devices.append(row);
    }
    state["devices"] = devices;
    state["main"] = live_.main_device();
    return state;
  }

  // For each step from this number on: the number, ticks, peak and end on the main device.
  std::vector<std::tuple<uint64_t, uint64_t, int64_t, int64_t>> steps(uint64_t from) const {
    std::vector<std::tuple<uint64_t, uint64_t, int64_t, int64_t>> rows;
    size_t main = live_.main_device();
    const auto& steps = live_.steps();
    uint64_t first = steps.empty() ? 0 : steps.front().number;
    for (size_t i = from > first ? from - first : 0; i < steps.size(); ++i) {
      int64_t peak = main < steps[i].peaks.size() ? steps[i].peaks[main] : 0;
      int64_t end = main < steps[i].ends.size() ? steps[i].ends[main] : 0;
      rows.emplace_back(steps[i].number, steps[i].ticks, peak, end);
    }
    return rows;
  }

  // The events and scopes since the last call, without the tables to which they refer.
  py::dict take_rows() {
    Recording taken;
    std::swap(taken, rows_);
    return to_dict(std::move(taken));
  }

  // The tables to which rows refer.
  py::dict tables() const { return to_dict(Recording(live_.tables())); }

  const std::string& meta() const { return live_.tables().meta; }

 private:
  TraceTail tail_;
  Live live_;
  Recording rows_;
  bool ended_ = false;
};

std::vector<size_t> step_ends_of(const Column<uint64_t>& optimizers,
                                 const Column<uint8_t>& has_forward) {
  return step_ends(view(optimizers), view(has_forward));
}

// ------------------------------------------------------------------ Chrome trace

// Rows for a writer, and the columns in Python that they view.
class RowsOfArrays {
 public:
  ChromeRows operator()(const py::dict& table) {
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

 private:
  std::span<const int64_t> keep(const py::object& values) {
    return view(columns_.emplace_back(values.cast<Column<int64_t>>()));
  }

  std::vector<Column<int64_t>> columns_;
};

// The next piece of a writer's output.
template <typename Writer>
py::bytes next_piece(Writer& writer, size_t bytes) {
  std::string piece;
  {
    py::gil_scoped_release unlocked;
    piece.reserve(bytes + 4096);
    writer.next(bytes, piece);
  }
  return py::bytes(piece);
}

class ChromeTraceOfArrays {
 public:
  ChromeTraceOfArrays(const std::vector<py::bytes>& texts, const std::vector<py::dict>& tables) {
    std::vector<std::string> copies(texts.begin(), texts.end());
    std::vector<ChromeRows> rows;
    for (const py::dict& table : tables) {
      rows.push_back(rows_of_(table));
    }
    trace_.emplace(copies, std::move(rows));
  }

  py::bytes next(size_t bytes) { return next_piece(*trace_, bytes); }

  uint64_t events() const { return trace_->events(); }

 private:
  RowsOfArrays rows_of_;
  std::optional<ChromeTrace> trace_;
};

class PerfettoTraceOfArrays {
 public:
  using Track = std::tuple<uint64_t, uint64_t, std::string, int32_t, bool, bool, std::string>;

  PerfettoTraceOfArrays(const std::vector<py::bytes>& texts,
                        const std::vector<Track>& tracks,
                        const std::vector<std::pair<py::dict, std::vector<uint64_t>>>& tables,
                        uint32_t sequence) {
    std::vector<std::string> copies(texts.begin(), texts.end());
    for (std::string& text : copies) {
      make_utf8(text);
    }
    std::vector<PerfettoTrack> all;
    for (const auto& [id, parent, name, rank, is_counter, holds_lifetimes, scale] : tracks) {
      all.push_back({id, parent, name, rank, is_counter, holds_lifetimes, scale});
    }
    std::vector<PerfettoRows> rows;
    for (const auto& [table, counters] : tables) {
      rows.push_back({rows_of_(table), counters});
    }
    trace_.emplace(std::move(copies), std::move(all), std::move(rows), sequence);
  }

  py::bytes next(size_t bytes) { return next_piece(*trace_, bytes); }

  uint64_t events() const { return trace_->events(); }

 private:
  RowsOfArrays rows_of_;
  std::optional<PerfettoTrace> trace_;
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

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "pytracer's files, without torch. Import pytracer.data._native instead.";

  auto file_error = py::reinterpret_steal<py::object>(
      PyErr_NewException("pytracer._core.FileError", PyExc_Exception, nullptr));
  m.attr("FileError") = file_error;
  raise_file_errors_as(file_error);

  m.attr("NO_LIMIT") = MemoryLimit::kNone;
  m.def("read_file", &read_file);
  m.def("write_file", &write_file);
  m.def("safe_columns", &safe_columns);
  m.def("without_paths", &without_paths);
  m.def("read_snapshot", &read_snapshot_file);
  m.def("lifetimes", &lifetimes_of);
  m.def("step_ends", &step_ends_of);
  m.def("replay", &replay);
  m.def("replay_orders", &replay_orders);

  py::class_<ChromeTraceOfArrays>(m, "ChromeTrace")
      .def(py::init<const std::vector<py::bytes>&, const std::vector<py::dict>&>())
      .def("next", &ChromeTraceOfArrays::next)
      .def("events", &ChromeTraceOfArrays::events);
  py::class_<SnapshotOfArrays>(m, "SnapshotWriter")
      .def(py::init<const py::list&, uint32_t>())
      .def("begin", &SnapshotOfArrays::begin)
      .def("begin_device", &SnapshotOfArrays::begin_device)
      .def("entries", &SnapshotOfArrays::entries)
      .def("end_device", &SnapshotOfArrays::end_device)
      .def("end", &SnapshotOfArrays::end);
  py::class_<Follower>(m, "Follower")
      .def(py::init<const std::string&, uint64_t>())
      .def("advance", &Follower::advance)
      .def("state", &Follower::state)
      .def("steps", &Follower::steps)
      .def("take_rows", &Follower::take_rows)
      .def("tables", &Follower::tables)
      .def("meta", &Follower::meta);
  py::class_<PerfettoTraceOfArrays>(m, "PerfettoTrace")
      .def(py::init<const std::vector<py::bytes>&,
                    const std::vector<PerfettoTraceOfArrays::Track>&,
                    const std::vector<std::pair<py::dict, std::vector<uint64_t>>>&,
                    uint32_t>())
      .def("next", &PerfettoTraceOfArrays::next)
      .def("events", &PerfettoTraceOfArrays::events);
  m.def("nest_slices", &nest_slices);
  m.def("thin_samples", &thin);
}

}  // namespace pytracer
