// Converts columns to and from numpy, an allocator's rules, and the core's errors to Python's. Both
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

// Hands the vector's memory to numpy without a copy.
template <class T>
py::array_t<T> to_array(std::vector<T>&& column) {
  auto* kept = new std::vector<T>(std::move(column));
  py::capsule owner(kept, [](void* held) { delete static_cast<std::vector<T>*>(held); });
  return py::array_t<T>(static_cast<py::ssize_t>(kept->size()), kept->data(), owner);
}

template <class Schema>
py::str name_in_python(const std::string& table, const Schema& column) {
  return table + "." + column.name;
}

inline py::dict to_dict(Recording&& recording) {
  py::dict columns;
  Recording::each_table(
      [&](const std::string& prefix, auto& table) {
        table.each_column(
            [&](const auto& schema, auto& column) {
              columns[name_in_python(prefix, schema)] = to_array(std::move(column));
            },
            table);
      },
      recording);
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

// Views of columns in Python, valid as long as this object.
class ViewOfArrays {
 public:
  explicit ViewOfArrays(const py::dict& columns) : columns_(columns) {}

  RecordingView recording() {
    RecordingView view;
    view.meta = columns_["meta"].cast<std::string>();
    strings_ = columns_["strings"].cast<std::vector<std::string>>();
    view.strings = strings_;
    for (const auto& [name, count] : columns_["losses"].cast<py::dict>()) {
      view.losses.emplace_back(name.cast<std::string>(), count.cast<uint64_t>());
    }
    RecordingView::each_table(
        [this](const char* name, auto& table) {
          table = this->table<std::decay_t<decltype(table)>>(name);
        },
        view);
    return view;
  }

  template <class View>
  View table(const std::string& name) {
    View view;
    View::each_column(
        [&](const auto& schema, auto& column) {
          using Item = typename std::decay_t<decltype(schema)>::Item;
          auto array = columns_[name_in_python(name, schema)].template cast<Column<Item>>();
          column = pytracer::view(array);
          arrays_.push_back(std::move(array));
        },
        view);
    // Python may hand over columns of unequal lengths.
    View::each_column(
        [&](const auto& schema, const auto& column) {
          if (column.size() != rows_in(view)) {
            throw py::value_error(name + "." + schema.name + " has another length than " + name);
          }
        },
        view);
    return view;
  }

 private:
  py::dict columns_;
  std::vector<py::object> arrays_;
  std::vector<std::string> strings_;
};

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

// Rules that the dictionary does not name stay as in torch.
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
  read("order", result.order);
  return result;
}

}  // namespace pytracer
