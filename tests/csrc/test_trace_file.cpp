#include "check.h"
#include "samples.h"
#include "trace_file.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace pytracer {
namespace {

using namespace samples;
using Kind = FileError::Kind;
using Status = ReadReport::Status;

// A new directory, gone with its contents at the end of the test.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "pytracer-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }

  ~TempDir() { std::filesystem::remove_all(path_); }

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

Bytes contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes((std::istreambuf_iterator<char>(file)), {});
}

void save(const std::string& path, const Bytes& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

Recording read(const Bytes& bytes, ReadReport& report) {
  return read_recording(std::span<const uint8_t>(bytes), report);
}

Kind kind_of(const Bytes& bytes) {
  ReadReport report;
  try {
    read(bytes, report);
  } catch (const FileError& error) {
    return error.kind();
  }
  check::fail(__FILE__, __LINE__, "no FileError");
  return Kind::kIo;
}

uint64_t lost_rows(const ReadReport& report, std::string_view table) {
  for (const auto& lost : report.lost) {
    if (lost.table == table) {
      return lost.rows;
    }
  }
  return 0;
}

bool notes_speak_of(const ReadReport& report, std::string_view word) {
  for (const std::string& note : report.notes) {
    if (note.find(word) != std::string::npos) {
      return true;
    }
  }
  return false;
}

void check_sample(const Recording& r, size_t count) {
  CHECK_EQ(r.meta, R"({"title": "new"})");
  CHECK_EQ(r.clock.ticks, (std::vector<uint64_t>{1000, 5000}));
  CHECK_EQ(r.clock.unix_ns,
           (std::vector<int64_t>{1'700'000'000'000'000'000, 1'700'000'000'000'001'000}));
  CHECK_EQ(r.strings,
           (std::vector<std::string>{"", "aten::mm", "train.py", "main", "wéight", "lost_alloc"}));
  CHECK_EQ(r.stacks.parent, (std::vector<uint32_t>{0, 0, 1}));
  CHECK_EQ(r.stacks.line, (std::vector<uint32_t>{0, 10, 12}));
  CHECK_EQ(r.places.stream, (std::vector<uint64_t>{0, 7}));
  CHECK_EQ(r.places.device_type, (std::vector<uint8_t>{0, 1}));
  CHECK_EQ(r.places.device_index, (std::vector<uint8_t>{0, 3}));
  CHECK_EQ(r.labels.category, (std::vector<uint8_t>{0, 1}));
  CHECK_EQ(r.labels.name, (std::vector<uint32_t>{0, 4}));
  CHECK_EQ(r.threads.native_id, (std::vector<uint64_t>{0, 12345}));
  CHECK_EQ(r.losses.size(), size_t{1});
  CHECK_EQ(r.losses.at(0).first, "lost_alloc");
  CHECK_EQ(r.losses.at(0).second, 4u);  // the later count
  CHECK_EQ(r.scope_begins.parent, (std::vector<uint32_t>{0, 1}));
  CHECK_EQ(r.scope_begins.kind, (std::vector<uint8_t>{2, 1}));
  CHECK_EQ(r.scope_begins.flags, (std::vector<uint8_t>{0, 1}));  // the ready bit is gone
  CHECK_EQ(r.scope_ends.scope, (std::vector<uint32_t>{2, 1}));
  CHECK_EQ(r.scope_ends.stack, (std::vector<uint32_t>{1, 2}));
  auto expected = events(count);
  CHECK_EQ(r.events.ticks.size(), count);
  for (size_t i = 0; i < std::min(count, r.events.ticks.size()); ++i) {
    CHECK_EQ(r.events.ticks[i], expected[i].ticks);
    CHECK_EQ(r.events.address[i], expected[i].address);
    CHECK_EQ(r.events.bytes[i], static_cast<uint64_t>(expected[i].bytes));
    CHECK_EQ(r.events.action[i], static_cast<uint8_t>(expected[i].action));
    CHECK_EQ(r.events.scope[i], expected[i].scope);
    CHECK_EQ(r.events.place[i], expected[i].place);
    CHECK_EQ(r.events.thread[i], expected[i].thread);
  }
}

// --- Whole files ----------------------------------------------------------------------------

TEST(what_is_written_is_read) {
  for (size_t count : {0, 1, 2, 1000, 65536, 65537, 200000}) {
    ReadReport report;
    Bytes bytes = trace(count);
    check_sample(read(bytes, report), count);
    CHECK_EQ(report.status, Status::kComplete);
    CHECK_EQ(report.good_bytes, bytes.size());
    CHECK_EQ(report.total_bytes, bytes.size());
    CHECK_EQ(report.notes, std::vector<std::string>{});
    CHECK(report.lost.empty());
  }
}

TEST(a_file_holds_what_memory_would) {
  TempDir dir;
  std::string path = dir / "run.pytrace";
  {
    TraceWriter writer(path);
    write_all(writer, 100);
    writer.finish();
    CHECK_EQ(writer.bytes_written(), std::filesystem::file_size(path));
  }
  CHECK(contents(path) == trace(100));
  ReadReport report;
  check_sample(read_recording(path, report), 100);
  CHECK_EQ(report.status, Status::kComplete);
}

TEST(events_shrink_to_a_third) {
  Bytes bytes = trace(65536);
  CHECK(bytes.size() < 65536 * 10);
}

TEST(many_and_long_strings_come_back) {
  std::vector<std::string> strings = {""};
  for (int i = 0; i < 100000; ++i) {
    strings.push_back("name " + std::to_string(i));
  }
  strings.emplace_back(300000, 'x');
  strings.emplace_back((1 << 20) + 5, 'y');
  Bytes bytes;
  TraceWriter writer(&bytes);
  add(writer, strings);
  writer.finish();
  ReadReport report;
  Recording r = read(bytes, report);
  CHECK_EQ(r.strings.size(), strings.size());
  strings.back().resize(1 << 20);  // the writer's limit for one string
  CHECK(r.strings == strings);
  CHECK_EQ(report.status, Status::kComplete);
}

TEST(an_empty_recording_has_its_first_rows) {
  Bytes bytes;
  TraceWriter(&bytes).finish();
  ReadReport report;
  Recording r = read(bytes, report);
  CHECK_EQ(r.strings, std::vector<std::string>{""});
  CHECK_EQ(r.stacks.line.size(), size_t{1});
  CHECK_EQ(r.places.stream.size(), size_t{1});
  CHECK_EQ(r.labels.name.size(), size_t{1});
  CHECK_EQ(r.threads.name.size(), size_t{1});
  CHECK_EQ(report.status, Status::kComplete);
}

TEST(numbers_at_their_limits_come_back) {
  Bytes bytes;
  TraceWriter writer(&bytes);
  add<Event>(writer,
             {{.ticks = UINT64_MAX,
               .address = UINT64_MAX,
               .bytes = (uint64_t{1} << 48) - 1,
               .action = 0,
               .ready = 255,
               .scope = 0,
               .place = 0,
               .thread = 0},
              {}});
  add<ClockReading>(writer, {{UINT64_MAX, INT64_MIN}, {0, INT64_MAX}});
  writer.finish();
  ReadReport report;
  Recording r = read(bytes, report);
  CHECK_EQ(r.events.ticks, (std::vector<uint64_t>{UINT64_MAX, 0}));
  CHECK_EQ(r.events.address, (std::vector<uint64_t>{UINT64_MAX, 0}));
  CHECK_EQ(r.events.bytes, (std::vector<uint64_t>{(uint64_t{1} << 48) - 1, 0}));
  CHECK_EQ(r.clock.unix_ns, (std::vector<int64_t>{INT64_MIN, INT64_MAX}));
}

TEST(nothing_can_be_added_after_the_end) {
  Bytes bytes;
  TraceWriter writer(&bytes);
  writer.finish();
  writer.finish();
  CHECK_THROWS(add(writer, events(1)), std::logic_error, (void)error);
}

// --- Files that are cut ---------------------------------------------------------------------

TEST(an_unfinished_file_is_truncated_and_whole) {
  ReadReport report;
  check_sample(read(trace(1000, false), report), 1000);
  CHECK_EQ(report.status, Status::kTruncated);
  CHECK_EQ(report.good_bytes, report.total_bytes);
}

TEST(every_cut_gives_the_whole_flushes_before_it_in_every_table) {
  Bytes whole = trace(70000);
  auto starts = chunks(whole);
  size_t good = kFileHeader;  // the end of the last whole flush
  size_t flushes = 0;
  for (size_t i = 0; i < starts.size(); ++i) {
    size_t next = i + 1 < starts.size() ? starts[i + 1] : whole.size();
    for (size_t cut : {starts[i], starts[i] + 1, starts[i] + 35, starts[i] + 36, next - 1}) {
      ReadReport report;
      Recording r = read(Bytes(whole.begin(), whole.begin() + static_cast<long>(cut)), report);
      CHECK_EQ(report.status, Status::kTruncated);
      CHECK_EQ(report.good_bytes, good);
      CHECK_EQ(report.total_bytes, cut);
      CHECK_EQ(r.scope_begins.ticks.size(), flushes > 0 ? size_t{2} : size_t{0});
      CHECK_EQ(r.events.ticks.size(), flushes > 0 ? size_t{70000} : size_t{0});
      CHECK_EQ(r.clock.ticks.size(), flushes);
      CHECK_EQ(r.losses.size(), flushes > 0 ? size_t{1} : size_t{0});
      CHECK_EQ(r.meta,
               std::string(flushes == 0   ? ""
                           : flushes == 1 ? R"({"title": "old"})"
                                          : R"({"title": "new"})"));
    }
    if (table_at(whole, starts[i]) == Table::kFlushes) {
      good = next;
      ++flushes;
    }
  }
  CHECK_EQ(flushes, size_t{2});
}

TEST(a_cut_flush_says_how_many_rows_are_lost) {
  Bytes whole = trace(70000);
  size_t second = chunk_of(whole, Table::kEvents, 1);
  ReadReport report;
  Recording r = read(Bytes(whole.begin(), whole.begin() + static_cast<long>(second) + 100), report);
  CHECK_EQ(r.events.ticks.size(), size_t{0});
  CHECK_EQ(lost_rows(report, "events"), 70000u);
  CHECK_EQ(lost_rows(report, "scope_begins"), 2u);
  CHECK(notes_speak_of(report, "behind the last whole flush"));
}

// As version 1.0 wrote it: nothing says which chunks belong together.
Bytes without_flushes(const Bytes& bytes) {
  Bytes old(bytes.begin(), bytes.begin() + kFileHeader);
  old[10] = 0;
  for (size_t at : chunks(bytes)) {
    if (table_at(bytes, at) != Table::kFlushes) {
      Bytes chunk = chunk_at(bytes, at);
      old.insert(old.end(), chunk.begin(), chunk.end());
    }
  }
  repair_checksums(old);
  return old;
}

TEST(scopes_without_their_events_are_cut_from_a_file_without_flushes) {
  Bytes bytes;
  TraceWriter writer(&bytes);
  add<std::string>(writer, {"", "step"});
  add<ScopeBegin>(writer, {{10, 0, 0, 1, 0, ScopeKind::kStep, 0x80}});
  add<ScopeEnd>(writer, {{11, 1, 0}});
  add<Event>(writer,
             {{.ticks = 9,
               .address = 1,
               .bytes = 1,
               .action = 0,
               .ready = 1,
               .scope = 0,
               .place = 0,
               .thread = 0},
              {.ticks = 12,
               .address = 2,
               .bytes = 1,
               .action = 0,
               .ready = 1,
               .scope = 0,
               .place = 0,
               .thread = 0}});
  add<ScopeBegin>(writer, {{20, 0, 0, 1, 0, ScopeKind::kStep, 0x80}});
  add<ScopeEnd>(writer, {{21, 2, 0}});
  ReadReport report;
  Recording r = read(without_flushes(bytes), report);
  CHECK_EQ(report.status, Status::kTruncated);
  CHECK_EQ(r.scope_begins.ticks, std::vector<uint64_t>{10});
  CHECK_EQ(r.scope_ends.ticks, std::vector<uint64_t>{11});
  CHECK_EQ(lost_rows(report, "scope_begins"), 1u);
  CHECK(notes_speak_of(report, "later than the last event"));
}

TEST(a_finished_file_without_flushes_is_read_whole) {
  ReadReport report;
  check_sample(read(without_flushes(trace(100, false)), report), 100);
  CHECK_EQ(report.minor, 0);
  CHECK_EQ(report.good_bytes, report.total_bytes);
}

TEST(zeros_after_a_power_cut_are_a_truncation) {
  Bytes bytes = trace(100, false);
  bytes.resize(bytes.size() + 5000);
  ReadReport report;
  check_sample(read(bytes, report), 100);
  CHECK_EQ(report.status, Status::kTruncated);
}

TEST(a_killed_process_leaves_a_readable_file) {
  TempDir dir;
  std::string path = dir / "killed.pytrace";
  pid_t child = ::fork();
  if (child == 0) {
    TraceWriter writer(path);
    write_all(writer, 1000);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ReadReport report;
  check_sample(read_recording(path, report), 1000);
  CHECK_EQ(report.status, Status::kTruncated);
}

// --- Files that are damaged -----------------------------------------------------------------

TEST(a_damaged_chunk_leaves_blank_rows_and_the_rest) {
  Bytes bytes = trace(3 * 65536);
  bytes[chunk_of(bytes, Table::kEvents, 1) + 1000] ^= 1;
  ReadReport report;
  Recording r = read(bytes, report);
  CHECK_EQ(report.status, Status::kCorrupt);
  CHECK_EQ(lost_rows(report, "events"), 65536u);
  CHECK_EQ(report.lost.size(), size_t{1});
  CHECK_EQ(report.lost.at(0).chunks, 1u);
  CHECK(report.good_bytes < report.total_bytes);
  auto expected = events(3 * 65536);
  CHECK_EQ(r.events.ticks.size(), expected.size());
  CHECK_EQ(r.events.action[65536], static_cast<uint8_t>(Action::kLabel));
  CHECK_EQ(r.events.address[65536], 0u);
  CHECK_EQ(r.events.ticks[65536], expected[65535].ticks);  // time does not jump back
  CHECK_EQ(r.events.ticks[2 * 65536], expected[2 * 65536].ticks);
}

TEST(a_damaged_chunk_header_is_resynchronised) {
  for (size_t offset : {0, 9, 12, 17, 25, 30, 33}) {
    Bytes bytes = trace(100);
    bytes[chunk_of(bytes, Table::kLabels) + offset] ^= 0x40;
    ReadReport report;
    Recording r = read(bytes, report);
    CHECK_EQ(report.status, Status::kCorrupt);
    CHECK_EQ(r.events.ticks.size(), size_t{100});
    CHECK_EQ(lost_rows(report, "labels"), 2u);  // the trailer knows
  }
}

TEST(every_flipped_bit_is_noticed) {
  Bytes whole = trace(60);
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int bit : {0, 3, 7}) {
      Bytes bytes = whole;
      bytes[at] = static_cast<uint8_t>(bytes[at] ^ (1 << bit));
      ReadReport report;
      try {
        read(bytes, report);
        CHECK(report.status != Status::kComplete);
      } catch (const FileError&) {
        CHECK(at < kFileHeader);
      }
    }
  }
}

TEST(a_missing_piece_is_noticed) {
  Bytes bytes = trace(2 * 65536);
  auto begin = bytes.begin() + static_cast<long>(chunk_of(bytes, Table::kEvents, 0));
  auto end = bytes.begin() + static_cast<long>(chunk_of(bytes, Table::kEvents, 1));
  bytes.erase(begin, end);
  ReadReport report;
  Recording r = read(bytes, report);
  CHECK_EQ(report.status, Status::kCorrupt);
  CHECK_EQ(lost_rows(report, "events"), 65536u);
  CHECK_EQ(r.events.ticks.size(), size_t{2 * 65536});
}

TEST(a_repeated_chunk_is_not_read_twice) {
  Bytes bytes = trace(100, false);
  Bytes chunk = chunk_at(bytes, chunk_of(bytes, Table::kEvents));
  insert(bytes, chunk_of(bytes, Table::kFlushes), chunk);
  ReadReport report;
  check_sample(read(bytes, report), 100);
  CHECK_EQ(report.status, Status::kCorrupt);
}

TEST(a_repeated_clock_reading_is_not_read_twice) {
  Bytes bytes = without_flushes(trace(100, false));
  insert(bytes, bytes.size(), chunk_at(bytes, chunk_of(bytes, Table::kClock)));
  ReadReport report;
  check_sample(read(bytes, report), 100);
  CHECK_EQ(report.status, Status::kCorrupt);
}

TEST(a_lost_clock_reading_leaves_no_blank_one) {
  Bytes bytes = trace(100);
  size_t at = chunk_of(bytes, Table::kClock);
  take_out(bytes, at, chunk_at(bytes, at).size());
  ReadReport report;
  Recording r = read(bytes, report);
  CHECK_EQ(r.clock.ticks, std::vector<uint64_t>{5000});
  CHECK_EQ(lost_rows(report, "clock"), 1u);
  CHECK_EQ(report.status, Status::kCorrupt);
}

// Another recording: the same tables, other rows.
Bytes foreign_trace() {
  Bytes bytes;
  TraceWriter writer(&bytes);
  writer.set_meta(R"({"title": "foreign"})");
  add<ClockReading>(writer, {{7, 8}});
  add<Event>(writer, events(3));
  writer.end_flush();
  add<ClockReading>(writer, {{9, 10}});
  writer.finish();
  return bytes;
}

TEST(a_chunk_that_is_not_where_it_was_written_is_noticed) {
  Bytes whole = trace(60);
  auto starts = chunks(whole);
  auto check_noticed = [](const Bytes& bytes) {
    ReadReport report;
    read(bytes, report);
    CHECK(report.status != Status::kComplete);
    CHECK(!report.notes.empty());
  };
  Bytes foreign = foreign_trace();
  for (size_t from : starts) {
    Bytes chunk = chunk_at(whole, from);
    Bytes without = whole;
    take_out(without, from, chunk.size());
    check_noticed(without);
    for (size_t to : starts) {
      Bytes repeated = whole;
      insert(repeated, to, chunk);
      check_noticed(repeated);
      if (to > from + chunk.size()) {
        Bytes moved = without;
        insert(moved, to - chunk.size(), chunk);
        check_noticed(moved);
      }
    }
  }
  for (size_t from : chunks(foreign)) {
    for (size_t to : starts) {
      Bytes spliced = whole;
      insert(spliced, to, chunk_at(foreign, from));
      check_noticed(spliced);
    }
  }
}

TEST(a_trace_appended_to_another_is_noticed) {
  Bytes bytes = trace(100);
  Bytes other = foreign_trace();
  bytes.insert(bytes.end(), other.begin(), other.end());
  ReadReport report;
  check_sample(read(bytes, report), 100);
  CHECK_EQ(report.status, Status::kCorrupt);
}

TEST(bytes_after_the_end_are_mentioned) {
  Bytes bytes = trace(100);
  bytes.push_back(1);
  ReadReport report;
  check_sample(read(bytes, report), 100);
  CHECK_EQ(report.status, Status::kComplete);
  CHECK(notes_speak_of(report, "after the trace's end"));
}

// --- Files that lie -------------------------------------------------------------------------

TEST(references_into_nothing_become_none) {
  Bytes bytes;
  TraceWriter writer(&bytes);
  add<StackFrame>(writer, {{5, 6, 7, 8}, {1, 0, 0, 1}});
  add<Label>(writer, {{1, 9, 9, 9, 9}});
  add<NamedThread>(writer, {{1, 9}});
  add<NamedCount>(writer, {{9, 1}});
  add<ScopeBegin>(writer, {{1, 1, 5, 9, 9, static_cast<ScopeKind>(200), 0}});
  add<ScopeEnd>(writer, {{2, 2, 9}});
  std::vector<Event> rows = events(2);
  rows[0].scope = 2;
  rows[0].place = 9;
  rows[0].thread = 9;
  rows[0].action = static_cast<uint64_t>(Action::kLabel);
  rows[0].bytes = 1;
  rows[1].action = 200;
  add(writer, rows);
  writer.finish();
  ReadReport report;
  Recording r = read(bytes, report);
  CHECK_EQ(report.status, Status::kComplete);
  CHECK_EQ(r.stacks.parent, (std::vector<uint32_t>{0, 0}));
  CHECK_EQ(r.stacks.file, (std::vector<uint32_t>{0, 0}));
  CHECK_EQ(r.stacks.line, (std::vector<uint32_t>{8, 1}));
  CHECK_EQ(r.labels.dtype, std::vector<uint32_t>{0});
  CHECK_EQ(r.threads.name, std::vector<uint32_t>{0});
  CHECK_EQ(r.losses.at(0).first, "");
  CHECK_EQ(r.scope_begins.parent, std::vector<uint32_t>{0});
  CHECK_EQ(r.scope_begins.forward, std::vector<uint32_t>{0});
  CHECK_EQ(r.scope_begins.kind, std::vector<uint8_t>{static_cast<uint8_t>(ScopeKind::kUser)});
  CHECK_EQ(r.scope_ends.scope, std::vector<uint32_t>{0});
  CHECK_EQ(r.events.scope[0], 0u);
  CHECK_EQ(r.events.place[0], 0);
  CHECK_EQ(r.events.thread[0], 0);
  CHECK_EQ(r.events.bytes[0], 0u);
  CHECK_EQ(r.events.action[1], static_cast<uint8_t>(Action::kLabel));
  CHECK(notes_speak_of(report, "a place"));
  CHECK(notes_speak_of(report, "unknown kind"));
}

TEST(sizes_that_no_memory_has_are_the_most_there_can_be) {
  for (size_t count : {1, 20000}) {
    std::vector<Event> rows = events(count);
    for (Event& row : rows) {
      row.bytes = kMostBytes;
    }
    Bytes bytes;
    TraceWriter writer(&bytes);
    add(writer, rows);
    writer.finish();
    size_t column = chunk_of(bytes, Table::kEvents) + kChunkHeader;
    while (bytes[column] != 3) {  // their bytes
      column += 12 + load<uint32_t>(bytes, column + 8);
    }
    if (count == 1) {
      CHECK_EQ(bytes[column + 3], 0);  // one number is stored as it is
      std::fill_n(bytes.begin() + static_cast<long>(column) + 12, 8, uint8_t{0xFF});
      repair_checksums(bytes);
    }
    ReadReport report;
    Recording r = read(bytes, report);
    CHECK_EQ(r.events.bytes.at(0), kMostBytes);
    uint64_t sum = 0;
    for (uint64_t each : r.events.bytes) {
      sum += each;
    }
    CHECK(sum <= uint64_t{1} << 62);
    CHECK(notes_speak_of(report, "larger than can be"));
  }
}

TEST(texts_are_made_utf8) {
  Bytes bytes;
  TraceWriter writer(&bytes);
  add<std::string>(writer,
                   {"fine",
                    "a\xFF"
                    "b",
                    "\xC0\x80",
                    "\xED\xA0\x80",
                    "\xF0\x9F\x98",
                    "日本"});
  writer.finish();
  ReadReport report;
  Recording r = read(bytes, report);
  const std::string bad = "\xEF\xBF\xBD";
  CHECK_EQ(r.strings,
           (std::vector<std::string>{
               "fine", "a" + bad + "b", bad + bad, bad + bad + bad, bad + bad + bad, "日本"}));
  CHECK(notes_speak_of(report, "UTF-8"));
}

TEST(unknown_tables_flags_and_columns_are_skipped) {
  for (size_t offset : {8, 11}) {
    Bytes bytes = trace(100);
    bytes[chunk_of(bytes, Table::kClock) + offset] = 77;
    repair_checksums(bytes);
    ReadReport report;
    Recording r = read(bytes, report);
    CHECK_EQ(report.skipped_chunks, 1u);
    CHECK_EQ(r.events.ticks.size(), size_t{100});
    CHECK(notes_speak_of(report, "newer pytracer"));
  }
  Bytes bytes = trace(100, false);
  size_t at = chunk_of(bytes, Table::kScopeEnds);
  // One more column, with a number that nobody knows.
  size_t end = at + kChunkHeader + load<uint32_t>(bytes, at + 24);
  Bytes column = {99, 1, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 5, 6};
  bytes.insert(bytes.begin() + static_cast<long>(end), column.begin(), column.end());
  ++bytes[at + 10];
  store(bytes, at + 24, load<uint32_t>(bytes, at + 24) + static_cast<uint32_t>(column.size()));
  repair_checksums(bytes);
  ReadReport report;
  check_sample(read(bytes, report), 100);
  CHECK(notes_speak_of(report, "column 99"));
}

TEST(absurd_sizes_cost_nothing) {
  Bytes whole = trace(100);
  size_t at = chunk_of(whole, Table::kEvents);
  size_t strings = chunk_of(whole, Table::kStrings);
  auto refuse = [&](size_t offset, auto value) {
    Bytes bytes = whole;
    store(bytes, offset, value);
    repair_checksums(bytes);
    ReadReport report;
    Recording r = read(bytes, report);
    CHECK_EQ(report.status, Status::kCorrupt);
    CHECK(r.events.ticks.capacity() < 100000);
    CHECK(r.strings.capacity() < 100000);
  };
  refuse(at + 12, uint32_t{0xFFFFFFFF});                               // rows
  refuse(at + 12, uint32_t{65536});                                    // rows, within the limit
  refuse(at + 16, uint64_t{1} << 47);                                  // first row
  refuse(at + 16, UINT64_MAX);                                         //
  refuse(at + 24, uint32_t{0xFFFFFFFF});                               // payload
  refuse(at + kChunkHeader + 4, uint32_t{0xFFFFFFFF});                 // a column, decoded
  refuse(at + kChunkHeader + 8, uint32_t{0xFFFFFFFF});                 // a column, encoded
  refuse(strings + kChunkHeader + 12, uint32_t{0xFFFFFFFF});           // a string
  refuse(strings + kChunkHeader + 12 + 24 + 4, uint32_t{0x0FFFFFFF});  // all strings
}

TEST(a_meta_document_that_nests_without_end_is_refused) {
  for (const std::string& deep : {std::string(100000, '['), std::string(65, '{') + "}"}) {
    Bytes bytes;
    TraceWriter writer(&bytes);
    writer.set_meta(R"({"title": "\\\"[[["})");
    writer.set_meta(deep);
    writer.finish();
    ReadReport report;
    Recording r = read(bytes, report);
    CHECK_EQ(r.meta, R"({"title": "\\\"[[["})");
    CHECK_EQ(report.status, Status::kCorrupt);
  }
}

// --- Files that cannot be read or written -----------------------------------------------------

TEST(each_kind_of_foreign_file_has_its_error) {
  Bytes whole = trace(10);
  CHECK_EQ(kind_of({}), Kind::kEmpty);
  CHECK_EQ(kind_of(Bytes(whole.begin(), whole.begin() + 5)), Kind::kEmpty);
  CHECK_EQ(kind_of(Bytes(whole.begin(), whole.begin() + 15)), Kind::kEmpty);
  CHECK_EQ(kind_of(Bytes(100, 'x')), Kind::kForeign);
  Bytes text_mode = whole;
  text_mode.erase(text_mode.begin() + 4);  // CR LF became LF
  CHECK_EQ(kind_of(text_mode), Kind::kDamaged);
  Bytes flipped = whole;
  flipped[10] ^= 1;
  CHECK_EQ(kind_of(flipped), Kind::kDamaged);
  Bytes newer = whole;
  newer[8] = 2;
  repair_checksums(newer);
  CHECK_EQ(kind_of(newer), Kind::kNewer);
}

TEST(a_newer_minor_version_is_read) {
  Bytes bytes = trace(100);
  bytes[10] = 7;
  repair_checksums(bytes);
  ReadReport report;
  check_sample(read(bytes, report), 100);
  CHECK_EQ(report.minor, 7);
}

Kind read_kind(const std::string& path) {
  ReadReport report;
  try {
    read_recording(path, report);
  } catch (const FileError& error) {
    CHECK_EQ(error.path(), path);
    CHECK(std::string(error.what()).find(path) == 0);
    return error.kind();
  }
  check::fail(__FILE__, __LINE__, "no FileError for " + path);
  return Kind::kIo;
}

Kind write_kind(const std::string& path, bool overwrite) {
  try {
    TraceWriter writer(path, overwrite);
  } catch (const FileError& error) {
    return error.kind();
  }
  check::fail(__FILE__, __LINE__, "no FileError for " + path);
  return Kind::kIo;
}

TEST(each_unreadable_path_has_its_error) {
  TempDir dir;
  CHECK_EQ(read_kind(dir / "nothing"), Kind::kMissing);
  CHECK_EQ(read_kind(dir / ""), Kind::kDirectory);
  CHECK_EQ(read_kind("/dev/zero"), Kind::kNotAFile);
  ::mkfifo((dir / "pipe").c_str(), 0600);
  CHECK_EQ(read_kind(dir / "pipe"), Kind::kNotAFile);
  if (::geteuid() != 0) {  // root may read everything
    save(dir / "secret", trace(1));
    ::chmod((dir / "secret").c_str(), 0);
    CHECK_EQ(read_kind(dir / "secret"), Kind::kUnreadable);
  }
}

// A sanitizer's own memory is beyond any such limit.
#if !defined(PYTRACER_SANITIZED)
// Runs in a child that may take no more memory than this.
int with_little_memory(int (*body)(const std::string& path), const std::string& path) {
  pid_t child = ::fork();
  if (child == 0) {
    rlimit limit{1 << 30, 1 << 30};
    ::setrlimit(RLIMIT_AS, &limit);
    ::_exit(body(path));
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

TEST(a_file_of_any_size_is_read_in_little_memory) {
  TempDir dir;
  constexpr off_t kHuge = off_t{50} << 30;
  save(dir / "foreign", Bytes(100, 'x'));
  save(dir / "trace", trace(1000));
  save(dir / "unfinished", trace(1000, false));
  for (const char* name : {"foreign", "trace", "unfinished"}) {
    CHECK_EQ(::truncate((dir / name).c_str(), kHuge), 0);
  }
  auto kind = [](const std::string& path) { return static_cast<int>(read_kind(path)); };
  CHECK_EQ(with_little_memory(kind, dir / "foreign"), static_cast<int>(Kind::kForeign));
  auto status = [](const std::string& path) {
    ReadReport report;
    check_sample(read_recording(path, report), 1000);
    return static_cast<int>(report.status);
  };
  CHECK_EQ(with_little_memory(status, dir / "trace"), static_cast<int>(Status::kComplete));
  CHECK_EQ(with_little_memory(status, dir / "unfinished"), static_cast<int>(Status::kTruncated));
}
#endif

TEST(each_unwritable_path_has_its_error) {
  TempDir dir;
  save(dir / "old", {1, 2, 3});
  CHECK_EQ(write_kind(dir / "old", false), Kind::kExists);
  CHECK_EQ(contents(dir / "old"), (Bytes{1, 2, 3}));
  CHECK_EQ(write_kind(dir / "", true), Kind::kDirectory);
  CHECK_EQ(write_kind(dir / "no/such/place", true), Kind::kUnwritable);
}

TEST(overwriting_is_possible) {
  TempDir dir;
  save(dir / "old", Bytes(100000, 1));
  TraceWriter(dir / "old", true).finish();
  ReadReport report;
  read_recording(dir / "old", report);
  CHECK_EQ(report.status, Status::kComplete);
}

TEST(a_full_disk_is_reported_again_and_again) {
  CHECK_EQ(write_kind("/dev/full", true), Kind::kDiskFull);
  // A limit on file sizes acts like a disk that fills up in the middle of a chunk.
  TempDir dir;
  std::string path = dir / "full.pytrace";
  pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit limit{20000, 20000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int errors = 0;
    TraceWriter writer(path);
    for (int i = 0; i < 50; ++i) {
      try {
        write_all(writer, 1000);
      } catch (const FileError& error) {
        errors += error.kind() == Kind::kDiskFull;
      }
    }
    ::_exit(errors);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) > 10);
  ReadReport report;
  Recording r = read_recording(path, report);
  CHECK(r.events.ticks.size() >= 1000);
  CHECK_EQ(report.status, Status::kTruncated);
  CHECK_EQ(report.good_bytes, report.total_bytes);  // no half chunk at the end
}

TEST(progress_can_be_watched_from_another_thread) {
  Bytes bytes;
  TraceWriter writer(&bytes);
  std::atomic<bool> done{false};
  check::run_threads(2, [&](int number) {
    if (number == 0) {
      for (int i = 0; i < 50; ++i) {
        add(writer, events(100));
      }
      done = true;
      return;
    }
    uint64_t last = 0;
    while (!done) {
      uint64_t now = writer.bytes_written();
      CHECK(now >= last);
      last = now;
    }
  });
  CHECK_EQ(writer.bytes_written(), bytes.size());
}

TEST(many_threads_may_read_one_trace) {
  Bytes bytes = trace(10000);
  check::run_threads(4, [&](int) {
    ReadReport report;
    check_sample(read(bytes, report), 10000);
  });
}

}  // namespace
}  // namespace pytracer
