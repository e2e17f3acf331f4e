// Each column has one line, in trace_tables.h. These tests visit all of them, so a new line is
// tested as well.
#include "check.h"
#include "codec.h"
#include "harvest.h"
#include "samples.h"
#include "trace_chunk.h"
#include "trace_file.h"

#include <cstdio>
#include <set>
#include <string>

using namespace pytracer;

namespace {

// A row as a later version may have it, and the table before and after the column was added.
struct Later {
  uint64_t ticks;
  uint16_t numa_node;
};

struct Earlier {
  uint64_t ticks;
};

#define EARLIER_COLUMNS(column) column(uint64_t, ticks, kRising, row.ticks)
#define LATER_COLUMNS(column)                 \
  column(uint64_t, ticks, kRising, row.ticks) \
      column(uint16_t, numa_node, kFilterShuffle, row.numa_node, kMayBeMissing)

}  // namespace

namespace pytracer {

PYTRACER_TABLE(EarlierTable, Table::kEvents, Earlier, EARLIER_COLUMNS)
PYTRACER_TABLE(LaterTable, Table::kEvents, Later, LATER_COLUMNS)

}  // namespace pytracer

namespace {

constexpr size_t kRows = 3;

// Every column of every table, and in each last row a 1: a reference to a row that is there.
Recording with_all_columns() {
  Recording recording;
  recording.meta = "{}";
  recording.strings = {"", "a", "b"};
  Recording::each_table(
      [](const char*, auto& table) {
        table.each_column([](const auto&, auto& column) { column = {0, 0, 1}; }, table);
      },
      recording);
  return recording;
}

// The columns' headers and bytes, as in a chunk.
template <class Columns>
std::vector<uint8_t> payload_of(const Columns& table) {
  std::vector<uint8_t> payload, scratch;
  uint8_t id = 0;
  Columns::each_column(
      [&](const auto& schema, const auto& column) {
        std::span raw(reinterpret_cast<const uint8_t*>(column.data()),
                      column.size() * sizeof(column[0]));
        std::vector<uint8_t> bytes;
        auto encoded = encode_column(raw, sizeof(column[0]), schema.filter, scratch, bytes);
        payload.push_back(++id);
        payload.push_back(sizeof(column[0]));
        payload.push_back(schema.filter);
        payload.push_back(static_cast<uint8_t>(encoded.codec));
        append(payload, static_cast<uint32_t>(raw.size()));
        append(payload, static_cast<uint32_t>(bytes.size()));
        payload.insert(payload.end(), bytes.begin(), bytes.end());
      },
      table);
  return payload;
}

template <class Columns>
bool decode(uint8_t columns, const std::vector<uint8_t>& payload, Columns& table) {
  ChunkHeader header{};
  header.columns = columns;
  ChunkColumns chunk;
  return chunk.parse(header, payload) && chunk.decode_group(kRows, table);
}

}  // namespace

TEST(every_column_comes_back_from_a_file) {
  const std::string path = "tables.pytrace";
  Recording before = with_all_columns();
  write_recording(view_of(before), path, true);
  ReadReport report;
  Recording after = read_recording(path, report);
  CHECK(report.status == ReadReport::Status::kComplete);
  CHECK(report.notes.empty());
  size_t columns = 0;
  Recording::each_table(
      [&](const char*, auto& was, auto& is) {
        was.each_column(
            [&](const auto&, auto& wrote, auto& read) {
              CHECK(wrote == read);
              ++columns;
            },
            was,
            is);
      },
      before,
      after);
  CHECK(columns > 30);
  std::remove(path.c_str());
}

TEST(names_of_columns_differ) {
  std::set<std::string> names;
  size_t columns = 0;
  Recording recording;
  Recording::each_table(
      [&](const std::string& prefix, auto& table) {
        table.each_column(
            [&](const auto& schema, auto&) {
              names.insert(prefix + "." + schema.name);
              ++columns;
            },
            table);
      },
      recording);
  CHECK_EQ(names.size(), columns);
}

TEST(rows_and_columns_of_the_same_events_are_the_same_bytes) {
  std::vector<Event> rows = samples::events(kMaxRowsPerChunk + 7);
  Recording::Events columns;
  append_rows(columns, std::span<const Event>(rows));
  samples::Bytes from_rows, from_columns;
  TraceWriter(&from_rows).add(std::span<const Event>(rows));
  TraceWriter(&from_columns)
      .add_columns(view_of<RecordingView::Events>(columns, 0, rows_in(columns)));
  CHECK(from_rows == from_columns);
}

TEST(a_column_that_an_older_file_lacks_is_zeros) {
  EarlierTable<Owned> old;
  old.ticks = {5, 7, 11};
  LaterTable<Owned> read;
  CHECK(decode(1, payload_of(old), read));
  CHECK(read.ticks == old.ticks);
  CHECK(read.numa_node == std::vector<uint16_t>(kRows, 0));
}

TEST(a_column_that_was_added_comes_back) {
  LaterTable<Owned> wrote;
  std::vector<Later> rows = {{5, 1}, {7, 0}, {11, 2}};
  append_rows(wrote, std::span<const Later>(rows));
  LaterTable<Owned> read;
  CHECK(decode(2, payload_of(wrote), read));
  CHECK(read.ticks == wrote.ticks);
  CHECK(read.numa_node == wrote.numa_node);
}

TEST(a_column_that_was_always_there_may_not_be_missing) {
  EarlierTable<Owned> read;
  CHECK(!decode(0, {}, read));
}
