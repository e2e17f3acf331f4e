// The steps of a recorder that is always on, for Python.
#pragma once

#include "core/clock.h"
#include "core/step_rows.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace pytracer {

// Rows that go into memory of Python's, such as a map of a file.
class MappedStepRows : public StepRows {
 public:
  MappedStepRows() : StepRows(unix_now_ns()) {}

  // The buffer is held until this is called again. None holds nothing.
  void write_to_buffer(const pybind11::object& buffer) {
    write_to({});
    held_.reset();
    if (!buffer.is_none()) {
      held_ = std::make_unique<pybind11::buffer_info>(
          pybind11::reinterpret_borrow<pybind11::buffer>(buffer).request(true));
      auto bytes = static_cast<size_t>(held_->size * held_->itemsize);
      write_to({static_cast<std::byte*>(held_->ptr), bytes});
    }
  }

  // A tuple for each device of the last step.
  pybind11::list last_in_python() const {
    pybind11::list rows;
    for (const auto& [row, found] : last()) {
      rows.append(pybind11::make_tuple(found,
                                       row.step,
                                       row.unix_ns,
                                       row.duration_ns,
                                       row.looked_at != 0,
                                       std::make_pair(row.device_type, row.device_index),
                                       row.now,
                                       row.peak,
                                       row.reserved_peak,
                                       row.largest,
                                       row.requests,
                                       row.failed));
    }
    return rows;
  }

 private:
  std::unique_ptr<pybind11::buffer_info> held_;
};

inline void bind_step_rows(pybind11::module_& m) {
  namespace py = pybind11;
  py::enum_<Why>(m, "Why")
      .value("NOTHING", Why::kNothing)
      .value("FIRST", Why::kFirst)
      .value("DEPARTS", Why::kDeparts)
      .value("GROWS", Why::kGrows)
      .value("DUE", Why::kDue)
      .def_property_readonly("steps",
                             [](Why why) { return Looks::kSteps[static_cast<size_t>(why)]; });
  py::class_<Looks>(m, "Looks")
      .def(py::init<>())
      .def_property_readonly("wanted", &Looks::wanted)
      .def("saw",
           [](Looks& looks, uint64_t step, std::pair<int, int> device, int64_t peak, int64_t now) {
             auto [type, index] = device;
             size_t slot = DeviceTotals::slot_of(DeviceType(type), static_cast<uint8_t>(index));
             return looks.saw(step, slot, peak, now);
           })
      .def("looked", &Looks::looked);
  py::class_<StepRows>(m, "PlainStepRows");
  py::class_<MappedStepRows, StepRows>(m, "StepRows")
      .def(py::init<>())
      .def_readonly("looks", &MappedStepRows::looks)
      .def_readwrite("is_looking", &MappedStepRows::is_looking)
      .def_readwrite("is_awaited", &MappedStepRows::is_awaited)
      .def_readwrite("every", &MappedStepRows::every)
      .def_readwrite("asks_from", &MappedStepRows::asks_from)
      .def("set_limit",
           [](MappedStepRows& rows, std::pair<int, int> device, int64_t bytes) {
             auto [type, index] = device;
             rows.set_limit(DeviceType(type), static_cast<uint8_t>(index), bytes);
           })
      .def("write_to", &MappedStepRows::write_to_buffer)
      .def("write_last", &MappedStepRows::write_last)
      .def("end_step", [](MappedStepRows& rows) { return rows.end_step(unix_now_ns()); })
      .def_property_readonly("written", &MappedStepRows::written)
      .def_property_readonly("steps", &MappedStepRows::steps)
      .def_property_readonly("last", &MappedStepRows::last_in_python);
}

}  // namespace pytracer
