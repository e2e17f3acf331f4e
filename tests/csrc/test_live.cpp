#include "check.h"
#include "live.h"
#include "perfetto_trace.h"
#include "samples.h"
#include "snapshot_writer.h"
#include "trace_tail.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

namespace pytracer {
namespace {

using samples::Bytes;

Bytes sample(size_t events) {
  Bytes bytes;
  TraceWriter writer(&bytes);
  samples::write_all(writer, events);
  writer.finish();
  return bytes;
}

// A file that grows.
class Growing {
 public:
  explicit Growing(const std::string& name)
      : path_((std::filesystem::temp_directory_path() / name).string()) {
    std::filesystem::remove(path_);
    std::ofstream(path_, std::ios::binary).flush();
  }

  ~Growing() { std::filesystem::remove(path_); }

  Growing(const Growing&) = delete;  // it owns the file
  Growing& operator=(const Growing&) = delete;

  void add(std::span<const uint8_t> bytes) {
    std::ofstream file(path_, std::ios::binary | std::ios::app);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(a_tail_hands_out_each_row_once_however_the_file_grows) {
  Bytes whole = sample(500);
  for (size_t piece : {size_t{1}, size_t{13}, size_t{4000}, whole.size()}) {
    Growing file("pytracer_growing.pytrace");
    TraceTail tail(file.path());
    size_t events = 0;
    size_t flushes = 0;
    for (size_t at = 0; at < whole.size(); at += piece) {
      file.add(std::span(whole).subspan(at, std::min(piece, whole.size() - at)));
      while (tail.advance(64, [&](Recording& rows) {
        events += rows.events.ticks.size();
        ++flushes;
      })) {
      }
    }
    CHECK_EQ(tail.bytes_read(), whole.size());
    CHECK(tail.state() == TraceTail::State::kComplete);
    ReadReport report;
    CHECK_EQ(events, read_recording(whole, report).events.ticks.size());
    CHECK(flushes > 2);
  }
}

TEST(a_tail_and_what_it_feeds_survive_any_damage) {
  Bytes whole = sample(300);
  std::minstd_rand random(7);
  for (int round = 0; round < 300; ++round) {
    Bytes damaged = whole;
    for (int i = 0; i < 3; ++i) {
      damaged[samples::kFileHeader + random() % (whole.size() - samples::kFileHeader)] ^=
          static_cast<uint8_t>(1 + random() % 255);
    }
    Growing file("pytracer_damaged.pytrace");
    file.add(damaged);
    TraceTail tail(file.path());
    Live live;
    while (tail.advance(1 << 20, [&](Recording& rows) { live.take(rows); })) {
    }
    live.end();
    for (const LiveDevice& device : live.devices()) {
      CHECK(device.peak.bytes >= 0);
    }
  }
}

TEST(rows_that_refer_to_nothing_are_taken_all_the_same) {
  std::minstd_rand random(11);
  auto any = [&](uint64_t most) { return random() % 4 == 0 ? random() : random() % most; };
  for (int round = 0; round < 200; ++round) {
    Recording rows;
    rows.strings = {"", "model", "aten::mm", "aten::empty"};
    for (int i = 0; i < 200; ++i) {
      rows.scope_begins.ticks.push_back(any(1000));
      rows.scope_begins.parent.push_back(static_cast<uint32_t>(any(200)));
      rows.scope_begins.forward.push_back(static_cast<uint32_t>(any(200)));
      rows.scope_begins.name.push_back(static_cast<uint32_t>(any(9)));
      rows.scope_begins.thread.push_back(static_cast<uint16_t>(any(3)));
      rows.scope_begins.kind.push_back(static_cast<uint8_t>(any(8)));
      rows.scope_begins.flags.push_back(static_cast<uint8_t>(any(4)));
      rows.scope_ends.ticks.push_back(any(1000));
      rows.scope_ends.scope.push_back(static_cast<uint32_t>(any(200)));
      rows.scope_ends.stack.push_back(static_cast<uint32_t>(any(9)));
      rows.events.ticks.push_back(any(1000));
      rows.events.address.push_back(any(20) * 64);
      rows.events.bytes.push_back(any(4096));
      rows.events.action.push_back(static_cast<uint8_t>(any(kActions + 1)));
      rows.events.scope.push_back(static_cast<uint32_t>(any(200)));
      rows.events.place.push_back(static_cast<uint16_t>(any(3)));
      rows.events.thread.push_back(static_cast<uint16_t>(any(3)));
    }
    Live live;
    live.take(rows);
    live.take(rows);
    for (const LiveDevice& device : live.devices()) {
      CHECK(device.now >= 0);
      CHECK(device.peak.bytes >= device.now);
    }
    live.end();
  }
}

TEST(the_end_of_a_step_is_known_as_soon_as_a_forward_shows_it) {
  StepEnds steps;
  CHECK(!steps.end());
  CHECK(!steps.stepped(1));
  CHECK(!steps.forward());  // a second optimizer may still follow
  CHECK(steps.stepped(1));
  CHECK(steps.forward());
  CHECK(!steps.stepped(1));
  CHECK(steps.end());
}

TEST(two_optimizers_that_take_turns_make_one_step) {
  std::vector<uint64_t> turns{1, 2, 1, 2, 1, 2};
  std::vector<uint8_t> forwards{0, 1, 1, 1, 1, 1};
  CHECK(step_ends(turns, forwards) == (std::vector<size_t>{1, 3, 5}));
  turns.push_back(1);  // the last iteration was cut short
  forwards.push_back(1);
  CHECK(step_ends(turns, forwards) == (std::vector<size_t>{1, 3, 5}));
  CHECK(step_ends({}, {}).empty());
}

TEST(a_block_counts_until_its_allocator_has_it_back) {
  Recording rows;
  rows.places = {{0}, {0}, {0}, {1}, {0}};
  auto add = [&](uint64_t tick, Action action, uint64_t address, uint64_t bytes) {
    rows.events.ticks.push_back(tick);
    rows.events.address.push_back(address);
    rows.events.bytes.push_back(bytes);
    rows.events.action.push_back(static_cast<uint8_t>(action));
    rows.events.scope.push_back(0);
    rows.events.place.push_back(0);
    rows.events.thread.push_back(0);
  };
  add(1, Action::kAlloc, 64, 100);
  add(2, Action::kFreeRequested, 64, 100);
  add(3, Action::kAlloc, 128, 10);
  add(4, Action::kFreeCompleted, 64, 100);
  Live live;
  live.take(rows);
  LiveDevice device = live.devices().at(0);
  CHECK_EQ(device.peak.bytes, 110);
  CHECK_EQ(device.peak.ticks, uint64_t{3});
  CHECK_EQ(device.now, 10);
}

TEST(a_snapshots_entries_that_point_nowhere_are_refused) {
  std::vector<uint8_t> action{0};
  std::vector<uint32_t> row{5};
  std::vector<int64_t> time{1};
  SnapshotWriter writer({}, 0);
  std::string out;
  writer.begin_device({}, out);
  CHECK_THROWS(
      writer.entries({action, row, time}, out), std::out_of_range, CHECK(*error.what() != 0));
  CHECK_THROWS(
      writer.entries({action, row, {}}, out), std::invalid_argument, CHECK(*error.what() != 0));
}

TEST(perfetto_rows_of_different_lengths_are_refused) {
  std::vector<int64_t> two{1, 2};
  std::vector<int64_t> one{1};
  ChromeRows rows{.kind = ChromeRows::Kind::kInstant,
                  .category = "x",
                  .process = 1,
                  .begin = two,
                  .end = {},
                  .name = one,
                  .thread = two,
                  .id = {},
                  .from = {},
                  .to = {},
                  .arguments = {}};
  std::vector<PerfettoRows> tables{{rows, {}}};
  CHECK_THROWS(
      PerfettoTrace({""}, {}, tables, 1), std::invalid_argument, CHECK(*error.what() != 0));
}

}  // namespace
}  // namespace pytracer
