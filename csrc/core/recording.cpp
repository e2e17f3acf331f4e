// A recording in memory: building it from rows, and writing it to a file. Neither needs a recorder.
#include "harvest.h"

#include <algorithm>
#include <span>

namespace pytracer {

void RecordingBuilder::add(std::span<const std::string> rows) {
  recording.strings.insert(recording.strings.end(), rows.begin(), rows.end());
}

void RecordingBuilder::add(std::span<const NamedCount> rows) {
  for (const NamedCount& row : rows) {
    const std::string& name = recording.strings[row.name];
    auto known = std::find_if(recording.losses.begin(),
                              recording.losses.end(),
                              [&](const auto& loss) { return loss.first == name; });
    if (known != recording.losses.end()) {
      known->second = row.count;
    } else {
      recording.losses.emplace_back(name, row.count);
    }
  }
}

namespace {

// Counters have their names in the string table; a new name goes behind the others.
void write_losses(TraceWriter& writer, const RecordingView& from) {
  std::vector<std::string> names;
  std::vector<NamedCount> rows;
  for (const auto& [name, count] : from.losses) {
    auto known = std::find(from.strings.begin(), from.strings.end(), name);
    auto number = static_cast<size_t>(known - from.strings.begin());
    if (known == from.strings.end()) {
      number += names.size();
      names.push_back(name);
    }
    rows.push_back({static_cast<uint32_t>(number), count});
  }
  writer.add(std::span<const std::string>(names));
  writer.add(std::span<const NamedCount>(rows));
}

void write_tables(TraceWriter& writer, const RecordingView& from) {
  writer.set_meta(from.meta);
  writer.add_columns(from.clock);
  writer.add(from.strings);
  write_losses(writer, from);
  writer.add_columns(from.stacks);
  writer.add_columns(from.places);
  writer.add_columns(from.labels);
  writer.add_columns(from.threads);
}

// Writes the events in flushes, like those of a recording that is streamed: so a copy of the file
// that is cut short can be read up to its last flush.
class History {
 public:
  History(TraceWriter& writer, const RecordingView& from) : writer_(writer), from_(from) {}

  void write() {
    size_t events = from_.events.ticks.size();
    while (events_ + kMaxRowsPerChunk < events) {
      write_until(events_ + kMaxRowsPerChunk);
    }
    write_scopes(from_.scope_begins.ticks.size(), from_.scope_ends.ticks.size());
    write_events(events);
  }

 private:
  // Scopes and ends up to the time of the last event, and all that the events refer to.
  void write_until(size_t events) {
    const auto& scope = from_.events.scope;
    auto at = [](size_t row) { return static_cast<std::ptrdiff_t>(row); };
    uint32_t used = *std::max_element(scope.begin() + at(events_), scope.begin() + at(events));
    uint64_t now = from_.events.ticks[events - 1];
    const auto& begins = from_.scope_begins;
    size_t scopes = std::min(std::max<size_t>(scopes_, used), begins.ticks.size());
    while (scopes < begins.ticks.size() && begins.ticks[scopes] <= now) {
      ++scopes;
    }
    const auto& ends = from_.scope_ends;
    size_t scope_ends = scope_ends_;
    while (scope_ends < ends.ticks.size() && ends.ticks[scope_ends] <= now &&
           ends.scope[scope_ends] <= scopes) {
      ++scope_ends;
    }
    write_scopes(scopes, scope_ends);
    write_events(events);
    writer_.end_flush();
  }

  // Columns from outside may hold values that no row can: a flag in the ready mark's place, or a
  // size beyond the largest.
  void write_scopes(size_t scopes, size_t scope_ends) {
    auto begins = view_of<RecordingView::ScopeBegins>(from_.scope_begins, scopes_, scopes);
    std::vector<uint8_t> flags(begins.flags.begin(), begins.flags.end());
    for (uint8_t& each : flags) {
      each &= static_cast<uint8_t>(~kScopeReady);
    }
    begins.flags = flags;
    writer_.add_columns(begins);
    writer_.add_columns(
        view_of<RecordingView::ScopeEnds>(from_.scope_ends, scope_ends_, scope_ends));
    scopes_ = scopes;
    scope_ends_ = scope_ends;
  }

  void write_events(size_t to) {
    auto events = view_of<RecordingView::Events>(from_.events, events_, to);
    std::vector<uint64_t> bytes(events.bytes.begin(), events.bytes.end());
    for (uint64_t& each : bytes) {
      each = std::min(each, kMostBytes);
    }
    events.bytes = bytes;
    writer_.add_columns(events);
    events_ = to;
  }

  TraceWriter& writer_;
  const RecordingView& from_;
  size_t scopes_ = 0;  // written
  size_t scope_ends_ = 0;
  size_t events_ = 0;
};

}  // namespace

void write_recording(const RecordingView& from, const std::string& path, bool overwrite) {
  TraceWriter writer(path, overwrite);
  write_tables(writer, from);
  History(writer, from).write();
  writer.finish();
}

}  // namespace pytracer
