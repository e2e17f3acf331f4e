// The tables of a trace, each described once: a line per column. These lines make the code that
// brings rows into memory, into a file and back, and the arrays that Python gets.
//
//   column(type, name, filter, value of a row)
//
// The order is that of the column ids in the file: add a column at the end of its table. Earlier
// files lack it, so its line ends in kMayBeMissing, and the column reads as zeros there:
//
//   column(uint16_t, numa_node, kFilterShuffle, row.numa_node, kMayBeMissing)
//
// pytracer/data/schema.py names the same columns for Python.
#pragma once

#include "codec.h"
#include "event.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace pytracer {

// NOLINTNEXTLINE(performance-enum-size): two bytes in the file
enum class Table : uint16_t {
  kMeta = 1,
  kClock = 2,
  kStrings = 3,
  kStacks = 4,
  kPlaces = 5,
  kLabels = 6,
  kThreads = 7,
  kLosses = 8,
  kEvents = 9,
  kScopeBegins = 10,
  kScopeEnds = 11,
  kEnd = 12,
  kFlushes = 13,
};
inline constexpr size_t kTables = 14;  // one more than the largest: indexes arrays by table

// Rows that only files have; event.h has the others.
struct NamedThread {
  uint64_t native_id;
  uint32_t name;  // a row of the string table
};

struct NamedCount {
  uint32_t name;  // a row of the string table
  uint64_t count;
};

struct Total {  // how many rows a finished file has of a table
  uint16_t table;
  uint64_t rows;
};

struct Flush {
  uint32_t chain;  // a checksum over all chunks before: see docs/trace-format.md
};

// Numbers that rise steadily are stored as differences. Numbers whose high bytes seldom change are
// shuffled.
inline constexpr uint8_t kRising = kFilterDelta | kFilterShuffle;

enum class Presence : uint8_t {
  kAlways,
  kMayBeMissing,  // added later: zeros if the file has no such column
};
using enum Presence;

// clang-format off
#define PYTRACER_CLOCK_COLUMNS(column)                               \
  column(uint64_t, ticks,   kRising, row.ticks)                      \
  column(int64_t,  unix_ns, kRising, row.unix_ns)

#define PYTRACER_STACK_COLUMNS(column)                               \
  column(uint32_t, parent,   kRising,        row.parent)             \
  column(uint32_t, file,     kFilterShuffle, row.file)               \
  column(uint32_t, function, kFilterShuffle, row.function)           \
  column(uint32_t, line,     kFilterShuffle, row.line)

#define PYTRACER_PLACE_COLUMNS(column)                               \
  column(uint64_t, stream,       kFilterShuffle, row.stream)         \
  column(uint64_t, pool_high,    kFilterShuffle, row.pool_high)      \
  column(uint64_t, pool_low,     kFilterShuffle, row.pool_low)       \
  column(uint8_t,  device_type,  kFilterNone,    row.device_type)    \
  column(uint8_t,  device_index, kFilterNone,    row.device_index)

#define PYTRACER_LABEL_COLUMNS(column)                               \
  column(uint8_t,  category, kFilterNone,    row.category)           \
  column(uint32_t, role,     kFilterShuffle, row.role)               \
  column(uint32_t, name,     kRising,        row.name)               \
  column(uint32_t, shape,    kFilterShuffle, row.shape)              \
  column(uint32_t, dtype,    kFilterShuffle, row.dtype)

#define PYTRACER_THREAD_COLUMNS(column)                              \
  column(uint64_t, native_id, kFilterShuffle, row.native_id)         \
  column(uint32_t, name,      kFilterShuffle, row.name)

#define PYTRACER_LOSS_COLUMNS(column)                                \
  column(uint32_t, name,  kFilterShuffle, row.name)                  \
  column(uint64_t, count, kFilterShuffle, row.count)

#define PYTRACER_EVENT_COLUMNS(column)                               \
  column(uint64_t, ticks,   kRising,        row.ticks)               \
  column(uint64_t, address, kFilterShuffle, row.address)             \
  column(uint64_t, bytes,   kFilterShuffle, row.bytes)               \
  column(uint8_t,  action,  kFilterNone,    row.action)              \
  column(uint32_t, scope,   kRising,        row.scope)               \
  column(uint16_t, place,   kFilterShuffle, row.place)               \
  column(uint16_t, thread,  kFilterShuffle, row.thread)

#define PYTRACER_SCOPE_BEGIN_COLUMNS(column)                         \
  column(uint64_t, ticks,   kRising,        row.ticks)               \
  column(uint32_t, parent,  kRising,        row.parent)              \
  column(uint32_t, forward, kRising,        row.forward)             \
  column(uint32_t, name,    kFilterShuffle, row.name)                \
  column(uint16_t, thread,  kFilterShuffle, row.thread)              \
  column(uint8_t,  kind,    kFilterNone,    row.kind)                \
  column(uint8_t,  flags,   kFilterNone,    row.flags_and_ready & ~kScopeReady)

#define PYTRACER_SCOPE_END_COLUMNS(column)                           \
  column(uint64_t, ticks, kRising,        row.ticks)                 \
  column(uint32_t, scope, kRising,        row.scope)                 \
  column(uint32_t, stack, kFilterShuffle, row.stack)

#define PYTRACER_TOTAL_COLUMNS(column)                               \
  column(uint16_t, table, kFilterNone, row.table)                    \
  column(uint64_t, rows,  kFilterNone, row.rows)

#define PYTRACER_FLUSH_COLUMNS(column)                               \
  column(uint32_t, chain, kFilterNone, row.chain)
// clang-format on

// A column as its line describes it.
template <class T, class OfRow>
struct ColumnSchema {
  using Item = T;

  const char* name;
  uint8_t filter;
  OfRow of_row;
  Presence presence;
};

template <class T, class OfRow>
constexpr auto column_schema(const char* name,
                             uint8_t filter,
                             OfRow of_row,
                             Presence presence = kAlways) {
  return ColumnSchema<T, OfRow>{name, filter, of_row, presence};
}

// A table's columns lie in memory of their own, or in somebody else's.
template <class T>
using Owned = std::vector<T>;
template <class T>
using Viewed = std::span<const T>;

// The table of rows of this type.
template <class Row>
struct TableOf;

#define PYTRACER_COLUMN_MEMBER(type, name, ...) Store<type> name;
#define PYTRACER_COLUMN_COUNT(...) +1
#define PYTRACER_COLUMN_VISIT(type, name, filter, value, ...)                                      \
  visit(column_schema<type>(#name,                                                                 \
                            filter,                                                                \
                            [](const Row& row) { return static_cast<type>(value); } __VA_OPT__(, ) \
                                __VA_ARGS__),                                                      \
        tables.name...);

// A struct of columns. each_column(visit, tables...) calls visit(schema, columns...) per column,
// where the columns are those of the given tables; each may be Owned or Viewed.
#define PYTRACER_TABLE(Name, number, RowType, COLUMNS)                   \
  template <template <class> class Store>                                \
  struct Name {                                                          \
    using Row = RowType;                                                 \
    static constexpr Table kNumber = number;                             \
    static constexpr size_t kColumns = 0 COLUMNS(PYTRACER_COLUMN_COUNT); \
    COLUMNS(PYTRACER_COLUMN_MEMBER)                                      \
    template <class Visit, class... Tables>                              \
    static void each_column(Visit visit, Tables&... tables) {            \
      COLUMNS(PYTRACER_COLUMN_VISIT)                                     \
    }                                                                    \
  };                                                                     \
  template <>                                                            \
  struct TableOf<RowType> {                                              \
    using Columns = Name<Owned>;                                         \
    using View = Name<Viewed>;                                           \
  };

PYTRACER_TABLE(ClockTable, Table::kClock, ClockReading, PYTRACER_CLOCK_COLUMNS)
PYTRACER_TABLE(StackTable, Table::kStacks, StackFrame, PYTRACER_STACK_COLUMNS)
PYTRACER_TABLE(PlaceTable, Table::kPlaces, Place, PYTRACER_PLACE_COLUMNS)
PYTRACER_TABLE(LabelTable, Table::kLabels, Label, PYTRACER_LABEL_COLUMNS)
PYTRACER_TABLE(ThreadTable, Table::kThreads, NamedThread, PYTRACER_THREAD_COLUMNS)
PYTRACER_TABLE(LossTable, Table::kLosses, NamedCount, PYTRACER_LOSS_COLUMNS)
PYTRACER_TABLE(EventTable, Table::kEvents, Event, PYTRACER_EVENT_COLUMNS)
PYTRACER_TABLE(ScopeBeginTable, Table::kScopeBegins, ScopeBegin, PYTRACER_SCOPE_BEGIN_COLUMNS)
PYTRACER_TABLE(ScopeEndTable, Table::kScopeEnds, ScopeEnd, PYTRACER_SCOPE_END_COLUMNS)
PYTRACER_TABLE(TotalTable, Table::kEnd, Total, PYTRACER_TOTAL_COLUMNS)
PYTRACER_TABLE(FlushTable, Table::kFlushes, Flush, PYTRACER_FLUSH_COLUMNS)

// A whole recording. A reader makes an Owned one; a writer takes a Viewed one.
template <template <class> class Store>
struct RecordingOf {
  using Clock = ClockTable<Store>;
  using Stacks = StackTable<Store>;
  using Places = PlaceTable<Store>;
  using Labels = LabelTable<Store>;
  using Threads = ThreadTable<Store>;
  using Events = EventTable<Store>;
  using ScopeBegins = ScopeBeginTable<Store>;
  using ScopeEnds = ScopeEndTable<Store>;

  std::string meta;  // a JSON document, empty if there was none
  Clock clock;
  Store<std::string> strings;  // valid UTF-8
  Stacks stacks;
  Places places;
  Labels labels;
  Threads threads;
  std::vector<std::pair<std::string, uint64_t>> losses;
  Events events;
  ScopeBegins scope_begins;
  ScopeEnds scope_ends;

  // Calls visit(name, tables...) for each table of numbers; the name is the one in Python.
  template <class Visit, class... Recordings>
  static void each_table(Visit visit, Recordings&... recordings) {
    visit("clock", recordings.clock...);
    visit("stacks", recordings.stacks...);
    visit("places", recordings.places...);
    visit("labels", recordings.labels...);
    visit("threads", recordings.threads...);
    visit("events", recordings.events...);
    visit("scopes", recordings.scope_begins...);
    visit("scope_ends", recordings.scope_ends...);
  }
};

// A whole file, decoded. Each table's columns are equally long. Every reference between tables is
// valid, or 0: code may index without checking. strings, stacks, places, labels and threads have
// at least their row 0.
using Recording = RecordingOf<Owned>;
using RecordingView = RecordingOf<Viewed>;

// Appends rows to the columns of their table.
template <class Columns, class Row>
void append_rows(Columns& table, std::span<const Row> rows) {
  Columns::each_column(
      [rows](const auto& schema, auto& column) {
        for (const Row& row : rows) {
          column.push_back(schema.of_row(row));
        }
      },
      table);
}

// Appends all rows of one table to another.
template <class Table>
void append_table(Table& to, const Table& from) {
  Table::each_column(
      [](const auto&, auto& into, const auto& rows) {
        into.insert(into.end(), rows.begin(), rows.end());
      },
      to,
      from);
}

// Some rows of a table.
template <class View, class Table>
View view_of(const Table& table, size_t from, size_t to) {
  View part;
  View::each_column(
      [=](const auto&, auto& some, const auto& all) {
        some = std::span(all).subspan(from, to - from);
      },
      part,
      table);
  return part;
}

// How many rows a table has.
template <class Table>
size_t rows_in(const Table& table) {
  size_t rows = 0;
  Table::each_column([&](const auto&, const auto& column) { rows = column.size(); }, table);
  return rows;
}

// The rows of a place table.
template <template <class> class Store>
std::vector<Place> to_places(const PlaceTable<Store>& columns) {
  std::vector<Place> places;
  places.reserve(columns.stream.size());
  for (size_t i = 0; i < columns.stream.size(); ++i) {
    places.push_back({columns.stream[i],
                      columns.pool_high[i],
                      columns.pool_low[i],
                      static_cast<DeviceType>(columns.device_type[i]),
                      columns.device_index[i]});
  }
  return places;
}

// A view of all of it, valid as long as the recording stays as it is.
inline RecordingView view_of(const Recording& recording) {
  RecordingView view;
  view.meta = recording.meta;
  view.strings = recording.strings;
  view.losses = recording.losses;
  RecordingView::each_table(
      [](const char*, auto& seen, const auto& table) {
        seen = view_of<std::decay_t<decltype(seen)>>(table, 0, rows_in(table));
      },
      view,
      recording);
  return view;
}

}  // namespace pytracer
