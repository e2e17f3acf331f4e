#include "check.h"
#include "lifetimes.h"

namespace pytracer {
namespace {

// Place 0 is the CPU; 1 and 2 are two streams of cuda:0; 3 is cuda:1.
const std::vector<Place> kPlaces = {{0, 0, 0, DeviceType::kCpu, 0},
                                    {0, 0, 0, DeviceType::kCuda, 0},
                                    {7, 0, 0, DeviceType::kCuda, 0},
                                    {0, 0, 0, DeviceType::kCuda, 1}};
constexpr uint16_t kCpu = 0;
constexpr uint16_t kCuda = 1;
constexpr uint16_t kCudaStream7 = 2;
constexpr uint16_t kOtherCuda = 3;

struct Row {
  Action action;
  uint64_t address;
  uint64_t bytes = 0;
  uint16_t place = kCpu;
};

Lifetimes match(const std::vector<Row>& rows) {
  std::vector<uint64_t> address;
  std::vector<uint64_t> bytes;
  std::vector<uint8_t> action;
  std::vector<uint16_t> place;
  for (const Row& row : rows) {
    address.push_back(row.address);
    bytes.push_back(row.bytes);
    action.push_back(static_cast<uint8_t>(row.action));
    place.push_back(row.place);
  }
  return match_lifetimes({address, bytes, action, place}, kPlaces);
}

using Positions = std::vector<RowNumber>;
using enum Action;

// All counters that are not expected must be 0.
void check_counters(const Lifetimes& found,
                    const std::vector<std::pair<std::string_view, uint64_t>>& expected) {
  for (auto [name, count] : found.counters.named()) {
    uint64_t wanted = 0;
    for (auto [expected_name, expected_count] : expected) {
      wanted = expected_name == name ? expected_count : wanted;
    }
    if (count != wanted) {
      check::fail(
          __FILE__,
          __LINE__,
          std::string(name) + " is " + std::to_string(count) + ", not " + std::to_string(wanted));
    }
  }
}

TEST(no_events_no_allocations) {
  Lifetimes found = match({});
  CHECK(found.start.empty());
  check_counters(found, {});
}

TEST(on_the_cpu_use_ends_when_the_bytes_are_reusable) {
  Lifetimes found = match({{kAlloc, 64, 10}, {kFreeCompleted, 64, 10}});
  CHECK_EQ(found.start, Positions{0});
  CHECK_EQ(found.end, Positions{1});
  CHECK_EQ(found.completed, Positions{1});
  CHECK_EQ(found.bytes, std::vector<uint64_t>{10});
  CHECK_EQ(found.allocation_of_event, (Positions{0, 0}));
  check_counters(found, {});
}

TEST(on_cuda_use_ends_before_the_bytes_are_reusable) {
  Lifetimes found = match(
      {{kAlloc, 64, 10, kCuda}, {kFreeRequested, 64, 10, kCuda}, {kFreeCompleted, 64, 10, kCuda}});
  CHECK_EQ(found.end, Positions{1});
  CHECK_EQ(found.completed, Positions{2});
  CHECK_EQ(found.allocation_of_event, (Positions{0, 0, 0}));
  check_counters(found, {});
}

TEST(a_live_block_has_no_end) {
  Lifetimes found = match({{kAlloc, 64, 10}});
  CHECK_EQ(found.end, Positions{-1});
  CHECK_EQ(found.completed, Positions{-1});
}

TEST(an_address_that_comes_again_is_another_allocation) {
  Lifetimes found = match({{kAlloc, 64, 10}, {kFreeCompleted, 64}, {kAlloc, 64, 20}});
  CHECK_EQ(found.start, (Positions{0, 2}));
  CHECK_EQ(found.completed, (Positions{1, -1}));
  check_counters(found, {});
}

TEST(the_same_address_on_two_devices_is_two_blocks) {
  Lifetimes found = match({{kAlloc, 64, 10, kCpu},
                           {kAlloc, 64, 20, kCuda},
                           {kAlloc, 64, 30, kOtherCuda},
                           {kFreeCompleted, 64, 20, kCuda}});
  CHECK_EQ(found.completed, (Positions{-1, 3, -1}));
}

TEST(a_block_may_be_freed_from_another_stream) {
  Lifetimes found = match({{kAlloc, 64, 10, kCuda}, {kFreeCompleted, 64, 10, kCudaStream7}});
  CHECK_EQ(found.completed, Positions{1});
  CHECK_EQ(found.place, std::vector<uint16_t>{kCuda});
}

TEST(an_alloc_at_a_live_address_ends_the_earlier_block) {
  Lifetimes found = match({{kAlloc, 64, 10}, {kAlloc, 64, 20}, {kFreeCompleted, 64}});
  CHECK_EQ(found.end, (Positions{1, 2}));
  CHECK_EQ(found.completed, (Positions{1, 2}));
  CHECK_EQ(found.allocation_of_event, (Positions{0, 1, 1}));
  check_counters(found, {{"implicit_frees", 1}});
}

TEST(an_implicit_free_keeps_the_end_that_was_requested) {
  Lifetimes found =
      match({{kAlloc, 64, 10, kCuda}, {kFreeRequested, 64, 10, kCuda}, {kAlloc, 64, 20, kCuda}});
  CHECK_EQ(found.end, (Positions{1, -1}));
  CHECK_EQ(found.completed, (Positions{2, -1}));
}

TEST(a_free_of_an_unknown_block_is_counted) {
  Lifetimes found = match({{kFreeRequested, 64}, {kFreeCompleted, 64}, {kFreeCompleted, 64}});
  CHECK(found.start.empty());
  CHECK_EQ(found.allocation_of_event, (Positions{-1, -1, -1}));
  check_counters(found, {{"unmatched_free_requests", 1}, {"frees_from_before", 2}});
}

TEST(a_second_free_request_is_counted_and_changes_nothing) {
  Lifetimes found = match({{kAlloc, 64, 10}, {kFreeRequested, 64}, {kFreeRequested, 64}});
  CHECK_EQ(found.end, Positions{1});
  check_counters(found, {{"repeated_free_requests", 1}});
}

TEST(labels_and_saves_find_the_block_at_their_address) {
  Lifetimes found = match({{kAlloc, 64, 10}, {kLabel, 64, 3}, {kSaved, 64, 4}});
  CHECK_EQ(found.allocation_of_event, (Positions{0, 0, 0}));
  check_counters(found, {});
}

TEST(a_label_inside_a_block_finds_it) {
  Lifetimes found = match({{kAlloc, 100, 10},
                           {kAlloc, 200, 10},
                           {kLabel, 109},
                           {kLabel, 110},
                           {kSaved, 205},
                           {kSaved, 99}});
  CHECK_EQ(found.allocation_of_event, (Positions{0, 1, 0, -1, 1, -1}));
  check_counters(found, {{"unmatched_labels", 1}, {"unmatched_saves", 1}});
}

TEST(blocks_that_come_and_go_after_an_inner_label_are_still_found) {
  Lifetimes found = match({{kAlloc, 100, 10},
                           {kLabel, 105},
                           {kAlloc, 300, 10},
                           {kFreeCompleted, 100},
                           {kLabel, 105},
                           {kLabel, 305},
                           {kAlloc, 300, 2},
                           {kLabel, 305},
                           {kLabel, 301}});
  CHECK_EQ(found.allocation_of_event, (Positions{0, 0, 1, 0, -1, 1, 2, -1, 2}));
  check_counters(found, {{"unmatched_labels", 2}, {"implicit_frees", 1}});
}

TEST(a_block_on_its_way_out_can_still_be_labelled) {
  Lifetimes found = match({{kAlloc, 64, 10}, {kFreeRequested, 64}, {kSaved, 64}, {kSaved, 70}});
  CHECK_EQ(found.allocation_of_event, (Positions{0, 0, 0, 0}));
}

TEST(a_label_does_not_cross_devices) {
  Lifetimes found = match({{kAlloc, 64, 10, kCpu}, {kLabel, 64, 1, kCuda}, {kLabel, 65, 1, kCuda}});
  CHECK_EQ(found.allocation_of_event, (Positions{0, -1, -1}));
  check_counters(found, {{"unmatched_labels", 2}});
}

TEST(segments_ooms_and_snapshots_are_not_allocations) {
  Lifetimes found = match({{kSnapshot, 0, 0, kCuda},
                           {kSegmentAlloc, 64, 10, kCuda},
                           {kSegmentFree, 64, 10, kCuda},
                           {kSegmentMap, 64, 10, kCuda},
                           {kSegmentUnmap, 64, 10, kCuda},
                           {kSeedSegment, 64, 10, kCuda},
                           {kOom, 64, 10, kCuda}});
  CHECK(found.start.empty());
  check_counters(found, {});
}

TEST(a_device_starts_at_its_snapshot) {
  Lifetimes found = match({{kAlloc, 64, 10, kCuda},
                           {kAlloc, 64, 10, kOtherCuda},
                           {kSnapshot, 0, 0, kCuda},
                           {kFreeCompleted, 64, 10, kCuda}});
  CHECK_EQ(found.start, Positions{1});
  check_counters(found, {{"before_snapshot", 1}, {"unmatched_frees", 1}});
}

TEST(seeds_were_alive_at_the_snapshot_even_when_written_later) {
  Lifetimes found = match({{kSnapshot, 0, 0, kCuda},
                           {kAlloc, 128, 5, kCuda},
                           {kFreeCompleted, 64, 10, kCuda},
                           {kSeed, 64, 10, kCuda},
                           {kSeed, 256, 20, kCudaStream7}});
  CHECK_EQ(found.start, (Positions{-1, -1, 1}));
  CHECK_EQ(found.completed, (Positions{2, -1, -1}));
  CHECK_EQ(found.place, (std::vector<uint16_t>{kCuda, kCudaStream7, kCuda}));
  CHECK_EQ(found.allocation_of_event, (Positions{-1, 2, 0, 0, 1}));
  check_counters(found, {});
}

TEST(with_a_snapshot_an_alloc_before_the_seed_does_not_make_it_a_duplicate) {
  Lifetimes found = match({{kSnapshot, 0, 0, kCuda},
                           {kFreeCompleted, 64, 10, kCuda},
                           {kAlloc, 64, 5, kCuda},
                           {kSeed, 64, 10, kCuda}});
  CHECK_EQ(found.start, (Positions{-1, 2}));
  CHECK_EQ(found.completed, (Positions{1, -1}));
}

TEST(the_seeds_of_a_trace_inside_this_one_say_nothing_new) {
  Lifetimes found = match({{kSnapshot, 0, 0, kCuda},
                           {kSeed, 64, 10, kCuda},
                           {kAlloc, 128, 20, kCuda},
                           {kSnapshot, 0, 0, kCuda},
                           {kSeed, 64, 10, kCuda},
                           {kSeed, 128, 20, kCuda}});
  CHECK_EQ(found.start, (Positions{-1, 2}));
  check_counters(found, {{"repeated_snapshots", 1}, {"duplicate_seeds", 2}});
}

TEST(a_seed_before_the_snapshot_is_not_one) {
  Lifetimes found = match({{kSeed, 64, 10, kCuda}, {kSnapshot, 0, 0, kCuda}});
  CHECK(found.start.empty());
  check_counters(found, {{"before_snapshot", 1}});
}

TEST(a_snapshot_makes_the_unknown_frees_of_its_own_device_a_surprise_and_no_others) {
  Lifetimes found = match({{kSnapshot, 0, 0, kCuda},
                           {kFreeCompleted, 64, 10, kCuda},
                           {kFreeCompleted, 64, 10, kOtherCuda},
                           {kFreeCompleted, 64}});
  check_counters(found, {{"unmatched_frees", 1}, {"frees_from_before", 2}});
}

TEST(a_second_snapshot_is_counted) {
  Lifetimes found =
      match({{kSnapshot, 0, 0, kCuda}, {kAlloc, 64, 10, kCuda}, {kSnapshot, 0, 0, kCuda}});
  CHECK_EQ(found.start, Positions{1});
  check_counters(found, {{"repeated_snapshots", 1}});
}

TEST(a_cpu_seed_is_of_what_lives_and_not_of_what_was_freed_there) {
  Lifetimes found = match({{kFreeCompleted, 64}, {kAlloc, 64, 10}, {kSeed, 64, 10}});
  CHECK_EQ(found.start, Positions{1});
  check_counters(found, {{"frees_from_before", 1}, {"duplicate_seeds", 1}});
}

TEST(a_cpu_seed_was_alive_before_the_recording) {
  Lifetimes found = match({{kAlloc, 64, 10}, {kSeed, 128, 20}, {kFreeCompleted, 128}});
  CHECK_EQ(found.start, (Positions{-1, 0}));
  CHECK_EQ(found.completed, (Positions{2, -1}));
  check_counters(found, {});
}

TEST(a_cpu_seed_where_another_block_was_freed_begins_there) {
  Lifetimes found = match({{kFreeCompleted, 64},
                           {kSeed, 64, 10},
                           {kAlloc, 128, 5},
                           {kFreeCompleted, 128},
                           {kSeed, 128, 20},
                           {kFreeCompleted, 128}});
  CHECK_EQ(found.start, (Positions{1, 2, 4}));
  CHECK_EQ(found.completed, (Positions{-1, 3, 5}));
  CHECK_EQ(found.bytes, (std::vector<uint64_t>{10, 5, 20}));
  check_counters(found, {{"frees_from_before", 1}});
}

TEST(a_cpu_seed_of_a_block_born_in_the_recording_is_ignored) {
  Lifetimes found = match({{kAlloc, 64, 10}, {kSeed, 64, 10}, {kAlloc, 128, 10}, {kSeed, 128, 10}});
  CHECK_EQ(found.start, (Positions{0, 2}));
  CHECK_EQ(found.allocation_of_event, (Positions{0, -1, 1, -1}));
  check_counters(found, {{"duplicate_seeds", 2}});
}

TEST(a_cpu_seed_before_the_alloc_is_an_earlier_block) {
  Lifetimes found = match({{kSeed, 64, 10}, {kFreeCompleted, 64}, {kAlloc, 64, 20}});
  CHECK_EQ(found.start, (Positions{-1, 2}));
  check_counters(found, {});
}

TEST(two_seeds_of_one_block_are_one) {
  Lifetimes found = match({{kSeed, 64, 10}, {kSeed, 64, 10}});
  CHECK_EQ(found.start, Positions{-1});
  CHECK_EQ(found.allocation_of_event, (Positions{0, -1}));
  check_counters(found, {{"duplicate_seeds", 1}});
}

TEST(rows_of_unknown_actions_and_places_are_counted) {
  Lifetimes found =
      match({{static_cast<Action>(200), 64, 10}, {kAlloc, 64, 10, 9}, {kSeed, 64, 1, 9}});
  CHECK(found.start.empty());
  check_counters(found, {{"unknown_actions", 1}, {"unknown_places", 2}});
}

TEST(columns_must_be_equally_long) {
  std::vector<uint64_t> two(2);
  std::vector<uint8_t> action(1);
  std::vector<uint16_t> place(2);
  CHECK_THROWS(
      match_lifetimes({two, two, action, place}, kPlaces), std::invalid_argument, (void)error);
}

TEST(many_blocks_come_and_go_in_any_order) {
  std::vector<Row> rows;
  constexpr uint64_t kCount = 5000;
  for (uint64_t i = 0; i < kCount; ++i) {
    rows.push_back({kAlloc, (i + 1) * 512, i});
  }
  for (uint64_t i = 0; i < kCount; ++i) {
    rows.push_back({kFreeCompleted, (i * 7919 % kCount + 1) * 512});
  }
  Lifetimes found = match(rows);
  for (uint64_t i = 0; i < kCount; ++i) {
    CHECK_EQ(found.completed[i * 7919 % kCount], static_cast<int64_t>(kCount + i));
  }
  check_counters(found, {});
}

}  // namespace
}  // namespace pytracer
