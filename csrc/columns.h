// Columns, to and from numpy; an allocator's rules; and the core's errors as Python's. Both
// extensions include this.
#pragma once

#include "core/allocator_replay.h"
#include "core/harvest.h"
#include "core/trace_file.h"
#include "core/trace_format.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <span>
#include <string>
#include <utility>
#include <vector>

namespace pytracer {

namespace py = pybind11;

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

inline py::dict to_dict(Recording&& recording) {
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
inline auto copy_from(const py::dict& columns) {
  return [&columns](const char* name, auto& column) {
    using T = typename std::decay_t<decltype(column)>::value_type;
    Column<T> holder;
    auto values = column_of<T>(columns, name, holder);
    column.assign(values.begin(), values.end());
  };
}

inline Recording from_dict(const py::dict& columns) {
  Recording recording;
  each_column(recording, copy_from(columns));
  recording.strings = columns["strings"].cast<std::vector<std::string>>();
  recording.meta = columns["meta"].cast<std::string>();
  for (const auto& [name, count] : columns["losses"].cast<py::dict>()) {
    recording.losses.emplace_back(name.cast<std::string>(), count.cast<uint64_t>());
  }
  return recording;
}

// The extensions share one class, `pytracer._core.FileError`.
inline void raise_file_errors_as(const py::object& type) {
  static auto* const file_error = new py::object(type);  // as long as the process
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) {
        std::rethrow_exception(raised);
      }
    } catch (const FileError& error) {
      auto text = [](const char* of_path) {  // which need not be UTF-8
        return py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(of_path));
      };
      py::object value = (*file_error)(text(error.what()));
      value.attr("kind") = static_cast<int>(error.kind());
      value.attr("path") = text(error.path().c_str());
      PyErr_SetObject(file_error->ptr(), value.ptr());
    }
  });
}

// What the dictionary does not name stays as torch has it.
inline AllocatorRules rules_of(const py::dict& rules) {
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

}  // namespace pytracer
