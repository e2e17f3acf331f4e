// Reads a session's rows as they appear and hands them to a sink: a TraceWriter (a file) or a
// RecordingBuilder (memory). The same code feeds both, so both hold the same.
//
// A row comes after the rows that it refers to. So the sizes of the referring logs are read first
// and those of the tables last; writing goes the other way round.
//
// The rows up to an instant are consistent, whatever the threads did meanwhile. A thread reads a
// row's ticks before it claims the row's position, and it claims a scope before it reads the ticks
// of a row that refers to the scope. So the rows up to an instant include every scope that they
// refer to, and every event before a step's mark or a scope's end.
#pragma once

#include "recorder.h"
#include "trace_file.h"

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace pytracer {

// The sink that keeps everything.
class RecordingBuilder {
 public:
  void add(std::span<const std::string> rows);
  void add(std::span<const NamedCount> rows);

  template <class Row>
  void add(std::span<const Row> rows) {
    Recording::each_table(
        [rows](const char*, auto& table) {
          if constexpr (std::is_same_v<typename std::decay_t<decltype(table)>::Row, Row>) {
            append_rows(table, rows);
          }
        },
        recording);
  }

  Recording recording;
};

// The sink that keeps nothing.
struct Nowhere {
  template <class Row>
  void add(std::span<const Row> /*rows*/) {}
};

class Harvest {
 public:
  explicit Harvest(uint32_t session)
      : session_(session),
        start_(Recorder::get().start_of(session)),
        lost_before_(Recorder::get().losses_before(session)),
        read_(start_) {}

  static constexpr uint64_t kAll = UINT64_MAX;

  // Reads all rows up to the instant (in ticks) that are whole by now. Returns whether all were.
  template <class Sink>
  bool drain(Sink& sink, uint64_t until = kAll);

  // Drains until every row that exists now has been read. Rows take nanoseconds to become whole,
  // but a thread may sleep in the middle of one. So this gives up in the end, and the recording
  // says so.
  template <class Sink>
  void drain_all(Sink& sink) {
    auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (!drain(sink)) {
      if (std::chrono::steady_clock::now() > deadline) {
        add_unfinished(sink);
        return;
      }
    }
  }

  const Recorder::Positions& read() const { return read_; }

  uint64_t events_read() const { return read_.events - start_.events; }

  uint32_t session() const { return session_; }

 private:
  // The rows to read now lie below `to`. Rows below `overdue` were there the last time already:
  // they are read whatever their clock says.
  struct Stretch {
    uint64_t overdue;
    uint64_t to;
  };

  template <class Row, class Sink, class Change, class IsLater>
  bool copy(const AppendLog<Row>& log,
            uint64_t& from,
            Stretch stretch,
            Sink& sink,
            Change change,
            IsLater is_later);
  template <class Sink>
  void drain_tables(Sink& sink);
  template <class Sink>
  void add_unfinished(Sink& sink);

  // Scopes are numbered from the start of this session's stretch.
  uint32_t own_number(uint32_t scope) const {
    return scope > start_.scopes ? static_cast<uint32_t>(scope - start_.scopes) : 0;
  }

  uint32_t session_;
  Recorder::Positions start_;
  Recorder::Losses lost_before_;
  Recorder::Positions read_;
  Recorder::Positions seen_;  // the claimed positions at the last drain
  size_t strings_ = 0;
  size_t stacks_ = 0;
  size_t places_ = 0;
  size_t labels_ = 0;
  size_t threads_ = 0;
  Recorder::Losses losses_{};
};

// Writes a recording in memory to a finished file. Throws FileError.
void write_recording(const RecordingView& recording, const std::string& path, bool overwrite);

extern template bool Harvest::drain(TraceWriter& sink, uint64_t until);
extern template bool Harvest::drain(RecordingBuilder& sink, uint64_t until);
extern template bool Harvest::drain(Nowhere& sink, uint64_t until);
extern template void Harvest::add_unfinished(TraceWriter& sink);
extern template void Harvest::add_unfinished(RecordingBuilder& sink);

}  // namespace pytracer
