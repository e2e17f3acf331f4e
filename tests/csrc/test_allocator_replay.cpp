#include "allocator_replay.h"
#include "check.h"

#include <random>

namespace pytracer {
namespace {

constexpr uint64_t kMiB = 1 << 20;

struct Step {
  ReplayStep kind;
  uint32_t block = 0;
  uint64_t bytes = 0;
  uint32_t lane = 0;
  uint64_t address = 0;
};

const std::vector<ReplayLane> kLanes = {{0, 0}, {7, 0}, {0, 1}};

ReplayResult replay(const std::vector<Step>& steps,
                    const AllocatorRules& rules,
                    bool with_addresses = false) {
  std::vector<uint8_t> kind;
  std::vector<uint32_t> block;
  std::vector<uint64_t> bytes;
  std::vector<uint32_t> lane;
  std::vector<uint64_t> address;
  for (const Step& step : steps) {
    kind.push_back(static_cast<uint8_t>(step.kind));
    block.push_back(step.block);
    bytes.push_back(step.bytes);
    lane.push_back(step.lane);
    if (with_addresses) {
      address.push_back(step.address);
    }
  }
  return replay_allocator({kind, block, bytes, lane, address}, kLanes, rules, true);
}

using enum ReplayStep;

TEST(a_freed_block_serves_again) {
  ReplayResult found = replay({{kAlloc, 0, 40 * kMiB}, {kFreeCompleted, 0}, {kAlloc, 1, 40 * kMiB}},
                              AllocatorRules{});
  CHECK(found.peak_reserved == 40 * kMiB);
  CHECK(found.device_allocs == 1);
}

TEST(a_retry_completes_a_free_only_once) {
  AllocatorRules rules;
  rules.limit = 80 * kMiB;
  ReplayResult found = replay({{kAlloc, 0, 40 * kMiB},
                               {kFreeRequested, 0},
                               {kAlloc, 1, 60 * kMiB},
                               {kFreeCompleted, 0},
                               {kFreeCompleted, 1}},
                              rules);
  CHECK(found.retries == 1);
  CHECK(found.failed_step == -1);
  CHECK(found.active == 0);
}

TEST(a_recorded_segment_decides_where_a_block_lies) {
  const std::vector<Step> steps = {{kGiven, 9, 20 * kMiB, 0, 4096},
                                   {kAlloc, 0, 2 * kMiB, 0, 4096},
                                   {kAlloc, 1, 2 * kMiB, 0, 4096 + 2 * kMiB},
                                   {kAlloc, 2, 2 * kMiB, 0, 5}};
  CHECK(replay({steps.begin(), steps.end() - 1}, AllocatorRules{}, true).departed_step == -1);
  CHECK(replay(steps, AllocatorRules{}, true).departed_step == 3);
}

// Under the sanitizers this is what finds a block that is used after it was given back.
TEST(on_random_streams_nothing_is_lost) {
  std::mt19937 random(0);  // NOLINT: the same stream each time
  auto below = [&](uint64_t bound) { return random() % bound; };
  for (int round = 0; round < 300; ++round) {
    AllocatorRules rules;
    rules.expandable_segments = below(2) == 0;
    rules.max_split_size = below(2) == 0 ? 32 * kMiB : AllocatorRules::kNone;
    rules.gc_threshold = below(3) == 0 ? 0.5 : 0.0;
    rules.limit = below(2) == 0 ? 200 * kMiB : AllocatorRules::kNone;
    rules.capacity = below(2) == 0 ? 256 * kMiB : AllocatorRules::kNone;
    std::vector<Step> steps;
    for (uint32_t i = 0; i < 200; ++i) {
      const auto kind = static_cast<ReplayStep>(below(8) < 4 ? 0 : below(kReplaySteps));
      const bool takes = kind == kAlloc || kind == kAttempt;
      const auto block = static_cast<uint32_t>(takes ? i : below(i + 1));
      const uint64_t address = below(4) == 0 ? random() : below(200) * kMiB;
      const auto lane = static_cast<uint32_t>(below(3));
      steps.push_back({kind, block, 1 + below(60 * kMiB), lane, address});
    }
    ReplayResult found = replay(steps, rules, below(2) == 0);
    CHECK(found.allocated <= found.active);
    CHECK(found.active <= found.reserved);
    CHECK(found.reserved <= found.peak_reserved);
    for (size_t i = 0; i < found.reserved_after.size(); ++i) {
      CHECK(found.active_after[i] + found.largest_free_after[i] <= found.reserved_after[i]);
    }
  }
}

}  // namespace
}  // namespace pytracer
