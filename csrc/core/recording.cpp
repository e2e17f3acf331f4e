// A recording in memory: made of rows, and written to a file. No recorder is needed for either.
#include "harvest.h"

#include <algorithm>
#include <span>

namespace pytracer {

void RecordingBuilder::add(std::span<const std::string> rows) {
  recording.strings.insert(recording.strings.end(), rows.begin(), rows.end());
}

void RecordingBuilder::add(std::span<const StackFrame> rows) {
  for (const StackFrame& row : rows) {
    recording.stacks.parent.push_back(row.parent);
    recording.stacks.file.push_back(row.file);
    recording.stacks.function.push_back(row.function);
    recording.stacks.line.push_back(row.line);
  }
}

void RecordingBuilder::add(std::span<const Place> rows) {
  for (const Place& row : rows) {
    recording.places.stream.push_back(row.stream);
    recording.places.pool_high.push_back(row.pool_high);
    recording.places.pool_low.push_back(row.pool_low);
    recording.places.device_type.push_back(static_cast<uint8_t>(row.device_type));
    recording.places.device_index.push_back(row.device_index);
  }
}

void RecordingBuilder::add(std::span<const Label> rows) {
  for (const Label& row : rows) {
    recording.labels.category.push_back(row.category);
    recording.labels.role.push_back(row.role);
    recording.labels.name.push_back(row.name);
    recording.labels.shape.push_back(row.shape);
    recording.labels.dtype.push_back(row.dtype);
  }
}

void RecordingBuilder::add(std::span<const NamedThread> rows) {
  for (const NamedThread& row : rows) {
    recording.threads.native_id.push_back(row.native_id);
    recording.threads.name.push_back(row.name);
  }
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

void RecordingBuilder::add(std::span<const Event> rows) {
  auto& to = recording.events;
  for (const Event& row : rows) {
    to.ticks.push_back(row.ticks);
    to.address.push_back(row.address);
    to.bytes.push_back(row.bytes);
    to.action.push_back(static_cast<uint8_t>(row.action));
    to.scope.push_back(row.scope);
    to.place.push_back(row.place);
    to.thread.push_back(row.thread);
  }
}

void RecordingBuilder::add(std::span<const ScopeBegin> rows) {
  auto& to = recording.scope_begins;
  for (const ScopeBegin& row : rows) {
    to.ticks.push_back(row.ticks);
    to.parent.push_back(row.parent);
    to.forward.push_back(row.forward);
    to.name.push_back(row.name);
    to.thread.push_back(row.thread);
    to.kind.push_back(static_cast<uint8_t>(row.kind));
    to.flags.push_back(row.flags_and_ready & static_cast<uint8_t>(~kScopeReady));
  }
}

void RecordingBuilder::add(std::span<const ScopeEnd> rows) {
  for (const ScopeEnd& row : rows) {
    recording.scope_ends.ticks.push_back(row.ticks);
    recording.scope_ends.scope.push_back(row.scope);
    recording.scope_ends.stack.push_back(row.stack);
  }
}

namespace {

// Rows are built and written a chunk at a time: no second copy of a long recording.
template <class MakeRow>
void write_rows(TraceWriter& writer, size_t from, size_t to, MakeRow make_row) {
  using Row = decltype(make_row(size_t{0}));
  std::vector<Row> batch;
  while (from < to) {
    batch.clear();
    for (size_t end = std::min(to, from + kMaxRowsPerChunk); from < end; ++from) {
      batch.push_back(make_row(from));
    }
    writer.add(std::span<const Row>(batch));
  }
}

// Counters are named in the string table; a name that is not there yet is added behind it.
void write_losses(TraceWriter& writer, const Recording& from) {
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

void write_tables(TraceWriter& writer, const Recording& from) {
  writer.set_meta(from.meta);
  write_rows(writer, 0, from.clock.ticks.size(), [&](size_t i) {
    return ClockReading{from.clock.ticks[i], from.clock.unix_ns[i]};
  });
  write_rows(writer, 0, from.strings.size(), [&](size_t i) { return from.strings[i]; });
  write_losses(writer, from);
  write_rows(writer, 0, from.stacks.parent.size(), [&](size_t i) {
    return StackFrame{
        from.stacks.parent[i], from.stacks.file[i], from.stacks.function[i], from.stacks.line[i]};
  });
  std::vector<Place> places = to_places(from.places);
  write_rows(writer, 0, places.size(), [&](size_t i) { return places[i]; });
  write_rows(writer, 0, from.labels.category.size(), [&](size_t i) {
    return Label{from.labels.category[i],
                 from.labels.role[i],
                 from.labels.name[i],
                 from.labels.shape[i],
                 from.labels.dtype[i]};
  });
  write_rows(writer, 0, from.threads.native_id.size(), [&](size_t i) {
    return NamedThread{from.threads.native_id[i], from.threads.name[i]};
  });
}

// What happened, in flushes like those of a recording that is streamed: a copy of the file that is
// cut short can be read as far as one.
class History {
 public:
  History(TraceWriter& writer, const Recording& from) : writer_(writer), from_(from) {}

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

  void write_scopes(size_t scopes, size_t scope_ends) {
    const auto& begins = from_.scope_begins;
    write_rows(writer_, scopes_, scopes, [&](size_t i) {
      return ScopeBegin{begins.ticks[i],
                        begins.parent[i],
                        begins.forward[i],
                        begins.name[i],
                        begins.thread[i],
                        static_cast<ScopeKind>(begins.kind[i]),
                        static_cast<uint8_t>(begins.flags[i] | kScopeReady)};
    });
    const auto& ends = from_.scope_ends;
    write_rows(writer_, scope_ends_, scope_ends, [&](size_t i) {
      return ScopeEnd{ends.ticks[i], ends.scope[i], ends.stack[i]};
    });
    scopes_ = scopes;
    scope_ends_ = scope_ends;
  }

  void write_events(size_t to) {
    const auto& events = from_.events;
    write_rows(writer_, events_, to, [&](size_t i) {
      return Event{events.ticks[i],
                   events.address[i],
                   std::min(events.bytes[i], kMostBytes),
                   events.action[i],
                   1,
                   events.scope[i],
                   events.place[i],
                   events.thread[i]};
    });
    events_ = to;
  }

  TraceWriter& writer_;
  const Recording& from_;
  size_t scopes_ = 0;  // written
  size_t scope_ends_ = 0;
  size_t events_ = 0;
};

}  // namespace

void write_recording(const Recording& from, const std::string& path, bool overwrite) {
  TraceWriter writer(path, overwrite);
  write_tables(writer, from);
  History(writer, from).write();
  writer.finish();
}

}  // namespace pytracer
