// What reads and writes files, for Python. It needs no torch, so that a trace can be looked at
// where there is none.
#include "columns.h"
#include "core/allocator_replay.h"
#include "core/anonymous.h"
#include "core/chrome_trace.h"
#include "core/lifetimes.h"
#include "core/snapshot.h"
#include "core/trace_file.h"
#include "core/trace_format.h"

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
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

// ------------------------------------------------------------------ the allocator, replayed

AllocatorRules rules_of(const py::dict& rules) {
  AllocatorRules result;
  auto read = [&](const char* name, auto& field) {
    if (rules.contains(name)) {
      field = rules[name].cast<std::decay_t<decltype(field)>>();
    }
  };
  read("max_split_size", result.max_split_size);
  read("max_non_split_rounding", result.max_non_split_rounding);
  read("roundup_divisions", result.roundup_divisions);
  read("gc_threshold", result.gc_threshold);
  read("expandable_segments", result.expandable_segments);
  read("large_segment_size", result.large_segment_size);
  read("limit", result.limit);
  read("capacity", result.capacity);
  return result;
}

py::dict replay(const py::dict& steps, const py::dict& rules, bool curves) {
  Column<uint8_t> kind;
  Column<uint32_t> block;
  Column<uint64_t> bytes;
  Column<uint32_t> lane;
  ReplaySteps columns{column_of<uint8_t>(steps, "kind", kind),
                      column_of<uint32_t>(steps, "block", block),
                      column_of<uint64_t>(steps, "bytes", bytes),
                      column_of<uint32_t>(steps, "lane", lane)};
  std::vector<ReplayLane> lanes;
  for (auto [stream, pool] : steps["lanes"].cast<std::vector<std::pair<uint64_t, uint32_t>>>()) {
    lanes.push_back({stream, pool});
  }
  const AllocatorRules given = rules_of(rules);
  ReplayResult found;
  {
    py::gil_scoped_release unlocked;
    found = replay_allocator(columns, lanes, given, curves);
  }
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
  result["failed_step"] = found.failed_step;
  result["failed_bytes"] = found.failed_bytes;
  result["reserved_after"] = to_array(std::move(found.reserved_after));
  result["active_after"] = to_array(std::move(found.active_after));
  result["largest_free_after"] = to_array(std::move(found.largest_free_after));
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

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "pytracer's files, without torch. Import pytracer._native instead.";

  auto file_error = py::reinterpret_steal<py::object>(
      PyErr_NewException("pytracer._core.FileError", PyExc_Exception, nullptr));
  m.attr("FileError") = file_error;
  raise_file_errors_as(file_error);

  m.def("read_file", &read_file);
  m.def("write_file", &write_file);
  m.def("without_paths", &without_paths);
  m.def("read_snapshot", &read_snapshot_file);
  m.def("lifetimes", &lifetimes_of);
  m.def("replay", &replay);

  py::class_<ChromeTraceOfArrays>(m, "ChromeTrace")
      .def(py::init<const std::vector<py::bytes>&, const std::vector<py::dict>&>())
      .def("next", &ChromeTraceOfArrays::next)
      .def("events", &ChromeTraceOfArrays::events);
  m.def("nest_slices", &nest_slices);
  m.def("thin_samples", &thin);
}

}  // namespace pytracer
