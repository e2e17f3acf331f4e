#include "append_log.h"
#include "check.h"
#include "harvest.h"
#include "recorded.h"
#include "recorder.h"
#include "streamer.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace pytracer {
namespace {

// The example above the recorder, in recorder.h: loss = linear(x).sum(); loss.backward().
TEST(the_example_in_recorder_h) {
  Recorded session;
  Recorder& recorder = Recorder::get();
  recorder.torch_thread_id.store([]() -> uint64_t { return 1; });
  ThreadState& thread = here();
  int module = 0, pass = 0, node = 0;
  recorder.push(thread, ScopeKind::kModule, &module, "linear");
  op("aten::linear", 0, 1, [] { op("aten::addmm", 0, 1, [] { alloc(0x10); }); });
  recorder.pop(thread, &module);
  op("aten::sum", 1, 2, [] { alloc(0x20); });
  recorder.push(thread, ScopeKind::kBackward, &pass, "backward");
  recorder.push_node(thread, &node, "SumBackward0", 1, 1, NodeKind::kPlain);
  recorder.pop(thread, &node);
  recorder.push_node(thread, &node, "AddmmBackward0", 0, 1, NodeKind::kPlain);
  op("aten::mm", -1, -1, [] { alloc(0x30); });
  recorder.pop(thread, &node);
  recorder.pop(thread, &pass);
  Recording trace = session.read();
  const auto& begins = trace.scope_begins;
  std::vector<std::string> names;
  for (uint32_t name : begins.name) {
    names.push_back(trace.strings[name]);
  }
  CHECK(names ==
        std::vector<std::string>(
            {"linear", "aten::linear", "aten::addmm", "aten::sum", "backward", "AddmmBackward0"}));
  CHECK(begins.parent == std::vector<uint32_t>({0, 1, 2, 0, 0, 5}));
  CHECK(begins.forward == std::vector<uint32_t>({0, 0, 0, 0, 0, 3}));
  CHECK(trace.events.scope == std::vector<uint32_t>({3, 4, 6}));
  CHECK(trace.scope_ends.scope == std::vector<uint32_t>({2, 1, 4, 6, 5}));
}

template <class Row>
void check_words(const Row& row) {
  std::array<uint64_t, sizeof(Row) / sizeof(uint64_t)> there;
  std::memcpy(there.data(), &row, sizeof(Row));
  CHECK(words_of(row) == there);
}

TEST(a_rows_words_are_those_that_it_has_in_memory) {
  uint64_t seed = 1;
  auto next = [&seed] { return seed = seed * 6364136223846793005 + 1442695040888963407; };
  for (int i = 0; i < 1000; ++i) {
    uint64_t large = next();
    auto whole = static_cast<uint32_t>(next() >> 32);
    auto half = static_cast<uint16_t>(next() >> 48);
    auto byte = static_cast<uint8_t>(next() >> 56);
    uint64_t another = next();
    uint64_t bytes = another & kMostBytes;
    check_words(Event{large, another, bytes, byte, 1, whole, half, static_cast<uint16_t>(byte)});
    check_words(
        ScopeBegin{large, whole, ~whole, whole * 3, half, static_cast<ScopeKind>(i % 7), byte});
    check_words(ScopeEnd{large, whole, ~whole});
  }
}

TEST(a_log_keeps_rows_in_the_order_of_their_claims) {
  AppendLog<ScopeEnd> log;
  for (uint32_t i = 1; i <= 200000; ++i) {
    CHECK_EQ(log.append({i, i, 0}), uint64_t{i - 1});
  }
  uint64_t next = 1;
  log.read(0, log.size(), [&](const ScopeEnd& row) { CHECK_EQ(row.ticks, next++); });
  CHECK_EQ(next, uint64_t{200001});
}

TEST(threads_append_at_once_and_no_row_is_lost_or_torn) {
  AppendLog<Event> log;
  constexpr uint64_t kRows = 50000;
  std::vector<std::thread> threads;
  for (uint64_t t = 1; t <= 4; ++t) {
    threads.emplace_back([&log, t] {
      for (uint64_t i = 0; i < kRows; ++i) {
        log.append({t * i, t * i, t * i, 0, 1, static_cast<uint32_t>(t), 0, 0});
      }
    });
  }
  // A reader runs along and only ever sees whole rows.
  uint64_t seen = 0;
  std::array<uint64_t, 5> per_thread{};
  while (seen < 4 * kRows) {
    seen = log.read(seen, log.size(), [&](const Event& row) {
      CHECK_EQ(row.ticks, uint64_t{row.address});
      CHECK_EQ(row.ticks, row.scope * per_thread[row.scope]);
      ++per_thread[row.scope];
    });
    log.release_below(seen);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(log.size(), 4 * kRows);
}

TEST(a_full_log_refuses_and_overwrites_nothing) {
  AppendLog<ScopeEnd> log;
  log.set_limit(3);
  for (uint32_t i = 1; i <= 3; ++i) {
    log.append({i, i, 0});
  }
  CHECK_EQ(log.append({4, 4, 0}), AppendLog<ScopeEnd>::kRefused);
  CHECK_EQ(log.size(), uint64_t{3});
}

std::vector<uint64_t> ticks_of(const AppendLog<ScopeEnd>& log) {
  std::vector<uint64_t> ticks;
  uint64_t reached =
      log.read(0, log.size(), [&](const ScopeEnd& row) { ticks.push_back(row.ticks); });
  CHECK_EQ(reached, log.size());
  return ticks;
}

TEST(what_a_full_log_refused_is_no_hole_when_there_is_room_again) {
  AppendLog<ScopeEnd> log;
  log.set_limit(3);
  for (uint32_t i = 1; i <= 5; ++i) {
    log.append({i, i, 0});
  }
  log.set_limit(10);
  log.append({6, 6, 0});
  CHECK_EQ(ticks_of(log), (std::vector<uint64_t>{1, 2, 3, 6}));
}

TEST(a_smaller_limit_hides_no_row_and_keeps_no_memory) {
  AppendLog<ScopeEnd> log;
  uint64_t rows = 3 * log.kChunkRows;
  for (uint64_t i = 1; i <= rows; ++i) {
    log.append({i, 1, 0});
  }
  log.set_limit(10);
  CHECK_EQ(log.append({1, 1, 0}), AppendLog<ScopeEnd>::kRefused);
  CHECK_EQ(ticks_of(log).size(), size_t{rows});
  log.clear();
  CHECK_EQ(log.bytes_held(), uint64_t{0});
}

TEST(limits_that_change_while_threads_append_leave_no_hole) {
  AppendLog<ScopeEnd> log;
  constexpr uint64_t kThreads = 4;
  std::atomic<uint64_t> kept{0};
  std::atomic<uint64_t> running{kThreads};
  std::vector<std::thread> threads;
  log.set_limit(1);  // before any thread appends without a limit
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50000; ++i) {
        kept += log.append({1, 1, 0}) != AppendLog<ScopeEnd>::kRefused ? 1 : 0;
      }
      --running;
    });
  }
  while (running > 0) {
    uint64_t limit = log.size() + 100;
    log.set_limit(limit);
    std::this_thread::yield();
    log.set_limit(limit / 2);
    CHECK(log.size() <= limit + 2 * kThreads);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(ticks_of(log).size(), size_t{kept});
  log.set_limit(log.size() + 1);
  log.append({1, 1, 0});
  CHECK_EQ(ticks_of(log).size(), size_t{kept + 1});
}

#if !defined(PYTRACER_SANITIZED)  // sanitizers need the memory
TEST(where_memory_ends_the_log_ends_and_what_it_holds_can_be_read) {
  pid_t child = ::fork();
  if (child == 0) {
    AppendLog<ScopeEnd> log;
    rlimit before{};
    ::getrlimit(RLIMIT_AS, &before);
    log.append({1, 1, 0});
    rlimit little{1 << 20, before.rlim_max};  // less than there is already
    ::setrlimit(RLIMIT_AS, &little);
    uint64_t kept = 1;
    while (log.append({1, 1, 0}) != AppendLog<ScopeEnd>::kRefused) {  // malloc has some left over
      ++kept;
    }
    ::setrlimit(RLIMIT_AS, &before);
    log.set_limit(log.kMostRows);
    bool refused = log.append({1, 1, 0}) == AppendLog<ScopeEnd>::kRefused;
    bool whole = ticks_of(log).size() == kept;
    ::_exit(refused && whole ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
}
#endif

TEST(a_request_larger_than_a_row_can_hold_is_the_most_it_can) {
  Recorded recorded;
  Recorder::get().record(Action::kOom, kCpuPlace, 0, uint64_t{3} << 48);
  Recording r = recorded.read();
  CHECK_EQ(r.events.bytes, std::vector<uint64_t>{kMostBytes});
}

constexpr uint64_t kBlock = 0x4000;

TEST(a_label_is_recorded_again_only_if_the_block_may_be_another) {
  Recorder::Labelled before;
  auto label = [&](uint64_t address = kBlock) {
    uint64_t events = Recorder::get().events.size();
    Recorder::get().record_label(kCpuPlace, address, 1, before);
    return Recorder::get().events.size() > events;
  };
  Recorded recorded;
  alloc(kBlock);
  CHECK(label());
  CHECK(!label());
  release(kBlock);
  alloc(kBlock);
  CHECK(label());
  CHECK(label(kBlock + 0x1000));  // the tensor has moved
  CHECK(!label(kBlock + 0x1000));
  Recorder::get().record(Action::kSeed, kCpuPlace, kBlock + 0x1000, 8);
  CHECK(label(kBlock + 0x1000));
  Recorder::get().record(Action::kSnapshot, kCpuPlace, 0, 0);  // earlier rows do not count
  CHECK(label(kBlock + 0x1000));
  {
    Recorded another;
    CHECK(label(kBlock + 0x1000));
    CHECK(!label(kBlock + 0x1000));
  }
  CHECK(!label(kBlock + 0x1000));
}

TEST(a_label_that_was_refused_is_recorded_as_soon_as_there_is_room) {
  Recorder::Labelled before;
  Recorded small(1);
  alloc(0x4000);
  Recorder::get().record_label(kCpuPlace, 0x4000, 1, before);
  CHECK_EQ(Recorder::get().events.size(), uint64_t{1});
  Recorded large;
  Recorder::get().record_label(kCpuPlace, 0x4000, 1, before);
  CHECK_EQ(Recorder::get().events.size(), uint64_t{2});
}

TEST(an_op_that_allocates_nothing_leaves_no_row) {
  Recorded session;
  op("aten::view", -1, -1, [] {});
  op("aten::add", -1, -1, [] { alloc(0x1000); });
  Recording r = session.read();
  CHECK_EQ(r.scope_begins.name.size(), size_t{1});
  CHECK_EQ(name_of(r, r.events.scope[0]), std::string("aten::add"));
}

TEST(an_event_belongs_to_the_innermost_scope_and_parents_come_first) {
  Recorded session;
  op("outer", -1, -1, [] {
    op("inner", -1, -1, [] { alloc(0x1000); });
    alloc(0x2000);
  });
  alloc(0x3000);
  Recording r = session.read();
  CHECK_EQ(name_of(r, r.events.scope[0]), std::string("inner"));
  CHECK_EQ(name_of(r, r.events.scope[1]), std::string("outer"));
  CHECK_EQ(r.events.scope[2], 0u);
  CHECK_EQ(name_of(r, r.scope_begins.parent[r.events.scope[0] - 1]), std::string("outer"));
  CHECK_EQ(r.scope_ends.scope.size(), size_t{1});
}

TEST(of_nested_operators_the_outermost_and_the_innermost_are_kept) {
  Recorded session;
  op("outermost", -1, -1, [] {
    op("between", -1, -1, [] { op("innermost", -1, -1, [] { alloc(0x1000); }); });
  });
  Recording r = session.read();
  CHECK_EQ(r.scope_begins.name.size(), size_t{2});
  CHECK_EQ(name_of(r, r.events.scope[0]), std::string("innermost"));
  CHECK_EQ(name_of(r, r.scope_begins.parent[r.events.scope[0] - 1]), std::string("outermost"));
}

TEST(a_factory_inside_an_operator_allocates_for_it) {
  Recorded session;
  op("aten::add", -1, -1, [] { op("aten::empty_strided", -1, -1, [] { alloc(0x1000); }); });
  op("aten::empty", -1, -1, [] { alloc(0x2000); });
  Recording r = session.read();
  CHECK_EQ(name_of(r, r.events.scope[0]), std::string("aten::add"));
  CHECK_EQ(name_of(r, r.events.scope[1]), std::string("aten::empty"));
  CHECK_EQ(r.scope_begins.name.size(), size_t{2});
}

TEST(the_outermost_operator_has_the_stack_however_deep_the_allocation_was) {
  Recorded session;
  Recorder::get().take_stack.store([]() -> uint32_t { return 5; });
  op("aten::to", -1, -1, [] {
    op("aten::_to_copy", -1, -1, [] {
      op("aten::empty_strided", -1, -1, [] { alloc(0x1000); });
      op("aten::copy_", -1, -1, [] {});
    });
    op("aten::view", -1, -1, [] {});
  });
  Recorder::get().take_stack.store(nullptr);
  Recording r = session.read();
  CHECK_EQ(r.scope_ends.scope.size(), size_t{1});
  CHECK_EQ(name_of(r, r.scope_ends.scope[0]), std::string("aten::to"));
  CHECK_EQ(r.scope_ends.stack[0], 5u);
}

TEST(a_node_knows_the_op_that_made_it) {
  Recorded session;
  Recorder::get().torch_thread_id.store([]() -> uint64_t { return 7; });
  // A composite op and its inner op see the same number; the inner one makes the node.
  op("aten::linear", 40, 41, [] { op("aten::addmm", 40, 41, [] {}); });
  op("aten::relu", 41, 42, [] {});
  int key = 0;
  Recorder::get().push_node(here(), &key, "AddmmBackward0", 40, 7, NodeKind::kPlain);
  alloc(0x1000);
  Recorder::get().pop(here(), &key);
  Recorder::get().push_node(here(), &key, "FromElsewhere", 41, 8, NodeKind::kPlain);
  alloc(0x2000);
  Recorder::get().pop(here(), &key);
  Recording r = session.read();
  uint32_t known = r.events.scope[0];
  CHECK_EQ(name_of(r, r.scope_begins.forward[known - 1]), std::string("aten::addmm"));
  CHECK_EQ(r.scope_begins.forward[r.events.scope[1] - 1], 0u);
}

TEST(forward_work_inside_a_node_is_marked_as_recomputed) {
  Recorded session;
  int key = 0;
  Recorder::get().push_node(here(), &key, "CheckpointFunctionBackward", 0, 0, NodeKind::kPython);
  op("aten::mm", 5, 6, [] { alloc(0x1000); });
  op("aten::mul", -1, -1, [] { alloc(0x2000); });
  Recorder::get().pop(here(), &key);
  Recorder::get().push_node(here(), &key, "DoubleBackward", 0, 0, NodeKind::kWithGrad);
  op("aten::mm", 6, 7, [] { alloc(0x3000); });
  Recorder::get().pop(here(), &key);
  Recording r = session.read();
  auto recomputed = [&](size_t event) {
    return (r.scope_begins.flags[r.events.scope[event] - 1] & kScopeRecompute) != 0;
  };
  CHECK(recomputed(0));
  CHECK(!recomputed(1));
  CHECK(!recomputed(2));
}

TEST(what_a_plain_node_computes_is_the_nodes) {
  Recorded session;
  int key = 0;
  Recorder::get().push_node(here(), &key, "AddmmBackward0", 0, 0, NodeKind::kPlain);
  op("aten::mm", -1, -1, [] { alloc(0x1000); });
  op("aten::t", -1, -1, [] { op("detach", -1, -1, [] { alloc(0x2000); }); });
  op("c10d::allreduce_", -1, -1, [] { op("aten::empty", -1, -1, [] { alloc(0x3000); }); });
  Recorder::get().pop(here(), &key);
  Recorder::get().push_node(here(), &key, "MyFunctionBackward", 0, 0, NodeKind::kPython);
  op("aten::mm", -1, -1, [] { alloc(0x4000); });
  Recorder::get().pop(here(), &key);
  Recording r = session.read();
  CHECK_EQ(name_of(r, r.events.scope[0]), std::string("AddmmBackward0"));
  CHECK_EQ(r.events.scope[1], r.events.scope[0]);
  CHECK_EQ(name_of(r, r.events.scope[2]), std::string("c10d::allreduce_"));
  CHECK_EQ(name_of(r, r.events.scope[3]), std::string("aten::mm"));
}

// Torch's description of the node that this thread evaluates.
thread_local const char* evaluated = nullptr;
thread_local int times_described = 0;
constexpr NodeSource kEvaluated{[]() -> const void* { return evaluated; },
                                [] {
                                  ++times_described;
                                  return Node{evaluated, 40, 7};
                                }};

TEST(nodes_that_are_asked_for_are_scopes_like_any_other) {
  Recorded session;
  Recorder::get().torch_thread_id.store([]() -> uint64_t { return 7; });
  op("aten::addmm", 40, 41, [] { alloc(0x1000); });
  int key = 0;
  Recorder::get().push(here(), ScopeKind::kBackward, &key, "backward");
  times_described = 0;
  Recorder::get().ask_for_nodes(kEvaluated);
  for (const char* node : {"AddmmBackward0", "AccumulateGrad"}) {
    evaluated = node;
    alloc(0x2000);
    release(0x2000);
  }
  std::thread([] {
    evaluated = "OfTheEnginesThread";
    alloc(0x3000);
  }).join();
  evaluated = nullptr;
  alloc(0x4000);
  Recorder::get().ask_for_no_nodes();
  evaluated = "NobodyAsks";
  alloc(0x5000);
  evaluated = nullptr;
  Recorder::get().pop(here(), &key);
  Recording r = session.read();

  CHECK_EQ(times_described, 2);
  auto scope = [&](size_t event) { return r.events.scope[event]; };
  CHECK_EQ(name_of(r, scope(1)), std::string("AddmmBackward0"));
  CHECK_EQ(scope(2), scope(1));
  CHECK_EQ(name_of(r, scope(3)), std::string("AccumulateGrad"));
  CHECK_EQ(name_of(r, scope(5)), std::string("OfTheEnginesThread"));
  CHECK_EQ(name_of(r, scope(6)), std::string("backward"));
  CHECK_EQ(scope(7), scope(6));
  CHECK_EQ(name_of(r, r.scope_begins.parent[scope(1) - 1]), std::string("backward"));
  CHECK_EQ(name_of(r, r.scope_begins.forward[scope(1) - 1]), std::string("aten::addmm"));
  for (size_t event : {1, 3, 5}) {  // left once each, at their last event or after
    size_t left = 0;
    for (size_t i = 0; i < r.scope_ends.scope.size(); ++i) {
      left += r.scope_ends.scope[i] == scope(event) ? 1 : 0;
    }
    CHECK_EQ(left, size_t{1});
  }
}

TEST(an_allocation_goes_on_where_no_memory_is_left_to_record_it) {
  constexpr NodeSource kNoMemory{[]() -> const void* { return "node"; },
                                 []() -> Node { throw std::bad_alloc(); }};
  Recorded session;
  Recorder::get().ask_for_nodes(kNoMemory);
  alloc(0x1000);
  Recorder::get().ask_for_no_nodes();
  alloc(0x2000);
  Recording r = session.read();
  CHECK_EQ(r.events.address, std::vector<uint64_t>{0x2000});
  CHECK_EQ(r.losses[0].first, std::string("lost_alloc"));
  CHECK_EQ(r.losses[0].second, uint64_t{1});
}

std::shared_ptr<Annotation> annotate(const std::string& name) {
  auto annotation = std::make_shared<Annotation>(name);
  Recorder::get().push_annotation(here(), ScopeKind::kUser, annotation);
  return annotation;
}

void end_elsewhere(ThreadState& owner, std::shared_ptr<Annotation> annotation) {
  std::thread([&owner, annotation = std::move(annotation)] {
    Recorder::get().end_annotation(here(), owner, *annotation);
  }).join();
}

TEST(an_annotation_that_ends_on_another_thread_is_over) {
  Recorded session;
  auto outer = annotate("outer");
  end_elsewhere(here(), annotate("drained by a worker"));
  alloc(0x1000);
  Recorder::get().end_annotation(here(), here(), *outer);
  alloc(0x2000);
  Recording r = session.read();
  CHECK_EQ(name_of(r, r.events.scope[0]), std::string("outer"));
  CHECK_EQ(r.events.scope[1], 0u);
}

TEST(an_annotation_that_ended_elsewhere_has_an_end) {
  Recorded session;
  auto annotation = annotate("all_gather");
  alloc(0x1000);
  end_elsewhere(here(), annotation);
  alloc(0x2000);
  Recording r = session.read();
  CHECK_EQ(r.scope_ends.scope, std::vector<uint32_t>{r.events.scope[0]});
  CHECK_EQ(r.events.scope[1], 0u);
}

TEST(annotations_that_take_turns_end_in_any_order) {
  Recorded session;
  auto first = annotate("first task");
  auto second = annotate("second task");
  Recorder::get().end_annotation(here(), here(), *first);
  alloc(0x1000);
  Recorder::get().end_annotation(here(), here(), *second);
  alloc(0x2000);
  Recording r = session.read();
  CHECK_EQ(name_of(r, r.events.scope[0]), std::string("second task"));
  CHECK_EQ(r.events.scope[1], 0u);
}

TEST(an_annotation_s_name_is_the_recorder_s_own) {
  std::shared_ptr<Annotation> annotation;
  {
    Recorded earlier;
    annotation = annotate(std::string(1 << 20, 'x'));
  }
  Recorded session;
  alloc(0x1000);
  Recording r = session.read();
  CHECK_EQ(name_of(r, r.events.scope[0]), std::string(1 << 20, 'x'));
  Recorder::get().end_annotation(here(), here(), *annotation);
}

TEST(annotations_are_handed_over_between_threads_at_any_moment) {
  Recorded session;
  ThreadState& owner = here();
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::vector<std::shared_ptr<Annotation>> handed_over;
  std::thread worker([&] {
    while (!stop.load()) {
      std::lock_guard lock(mutex);
      for (auto& annotation : handed_over) {
        Recorder::get().end_annotation(here(), owner, *annotation);
      }
      handed_over.clear();
    }
  });
  for (int i = 0; i < 2000; ++i) {
    auto annotation = annotate("number " + std::to_string(i));
    alloc(0x1000);
    std::lock_guard lock(mutex);
    handed_over.push_back(std::move(annotation));
  }
  while (true) {
    std::lock_guard lock(mutex);
    if (handed_over.empty()) {
      break;
    }
  }
  stop.store(true);
  worker.join();
  alloc(0x2000);
  Recording r = session.read();
  CHECK_EQ(r.events.scope.back(), 0u);
}

TEST(a_place_that_no_number_is_left_for_keeps_its_device_and_is_counted) {
  Recorded session;
  Recorder& recorder = Recorder::get();
  uint16_t number = 0;
  for (uint64_t pool = 1; pool <= 70000; ++pool) {
    number = recorder.place({0, pool, 0, DeviceType::kCuda, 1});
  }
  recorder.record(Action::kAlloc, number, 0x1000, 8);
  Recording r = session.read();
  CHECK_EQ(r.places.device_type[r.events.place[0]], static_cast<uint8_t>(DeviceType::kCuda));
  CHECK_EQ(r.places.device_index[r.events.place[0]], uint8_t{1});
  CHECK_EQ(r.losses[0].first, std::string("lost_places"));
  CHECK_EQ(r.losses[0].second, uint64_t{70000 - (Recorder::kMostPlaces - 1)});
}

TEST(names_are_told_apart_though_their_addresses_are_reused) {
  Recorded session;
  char name[8] = "one";
  op(name, -1, -1, [] { alloc(0x1000); });
  std::snprintf(name, sizeof(name), "two");
  op(name, -1, -1, [] { alloc(0x2000); });
  Recording r = session.read();
  CHECK_EQ(name_of(r, r.events.scope[0]), std::string("one"));
  CHECK_EQ(name_of(r, r.events.scope[1]), std::string("two"));
}

TEST(what_exceeds_the_limit_is_counted_by_name) {
  Recorded session(2);
  for (uint64_t i = 0; i < 5; ++i) {
    alloc(0x1000 * (i + 1));
  }
  Recording r = session.read();
  CHECK_EQ(r.events.ticks.size(), size_t{2});
  CHECK_EQ(r.losses.size(), size_t{1});
  CHECK_EQ(r.losses[0].first, std::string("lost_alloc"));
  CHECK_EQ(r.losses[0].second, uint64_t{3});
}

TEST(a_session_inside_a_session_sees_its_own_stretch) {
  Recorded outer;
  alloc(0x1000);
  Recording inside;
  {
    uint32_t inner = Recorder::get().begin_session(Recorder::kNoLimit);
    alloc(0x2000);
    RecordingBuilder builder;
    Harvest(inner).drain_all(builder);
    inside = builder.recording;
    Recorder::get().end_session(inner);
    Recorder::get().forget_session(inner);
  }
  alloc(0x3000);
  Recording whole = outer.read();
  CHECK_EQ(inside.events.address, std::vector<uint64_t>{0x2000});
  CHECK_EQ(whole.events.address, (std::vector<uint64_t>{0x1000, 0x2000, 0x3000}));
}

TEST(a_session_inside_one_that_is_full_has_its_own_room_and_its_own_losses) {
  Recorded outer(2);
  auto five = [] {
    for (uint64_t i = 1; i <= 5; ++i) {
      op("aten::empty", -1, -1, [&] { alloc(i << 12); });
    }
  };
  five();  // two are kept
  Recording whole_inside;
  {
    uint32_t roomy = Recorder::get().begin_session(Recorder::kNoLimit);
    five();
    RecordingBuilder builder;
    Harvest(roomy).drain_all(builder);
    whole_inside = builder.recording;
    Recorder::get().end_session(roomy);
    Recorder::get().forget_session(roomy);
  }
  five();  // the outer one's room is used up
  Recording small_inside;
  {
    uint32_t small = Recorder::get().begin_session(4);
    five();
    RecordingBuilder builder;
    Harvest(small).drain_all(builder);
    small_inside = builder.recording;
    Recorder::get().end_session(small);
    Recorder::get().forget_session(small);
  }
  Recording r = outer.read();
  CHECK_EQ(whole_inside.events.address.size(), size_t{5});
  CHECK(whole_inside.losses.empty());
  CHECK_EQ(name_of(whole_inside, whole_inside.events.scope[4]), std::string("aten::empty"));
  CHECK_EQ(small_inside.events.address.size(), size_t{4});
  CHECK_EQ(small_inside.losses[0].second, uint64_t{1});
  CHECK_EQ(r.events.address.size(), size_t{2 + 5 + 4});
  CHECK_EQ(r.losses[0].first, std::string("lost_alloc"));
  CHECK_EQ(r.losses[0].second, uint64_t{3 + 5 + 1});
}

TEST(scopes_from_before_take_no_room_of_a_session_inside) {
  Recorded outer(10);
  for (int i = 0; i < 10; ++i) {
    Recorder::get().mark_step("before");
  }
  uint32_t inner = Recorder::get().begin_session(5);
  op("aten::empty", -1, -1, [] { alloc(0x1000); });
  RecordingBuilder builder;
  Harvest(inner).drain_all(builder);
  Recorder::get().end_session(inner);
  Recorder::get().forget_session(inner);
  CHECK_EQ(name_of(builder.recording, builder.recording.events.scope[0]),
           std::string("aten::empty"));
  CHECK(builder.recording.losses.empty());
}

TEST(nothing_of_a_recording_leaks_into_the_next) {
  {
    Recorded first;
    op("first", 3, 4, [] { alloc(0x1000); });
  }
  Recorded second;
  op("second", -1, -1, [] { alloc(0x1000); });
  Recording r = second.read();
  CHECK_EQ(r.events.ticks.size(), size_t{1});
  CHECK_EQ(name_of(r, r.events.scope[0]), std::string("second"));
  CHECK_EQ(r.strings.size(), size_t{2});
}

TEST(sessions_start_and_stop_while_threads_record) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&stop, t] {
      for (uint64_t i = 1; !stop.load(); ++i) {
        op("work", static_cast<int64_t>(i), static_cast<int64_t>(i + 1), [&] {
          alloc(i << 8 | static_cast<uint64_t>(t));
          release(i << 8 | static_cast<uint64_t>(t));
        });
      }
    });
  }
  for (int round = 0; round < 20; ++round) {
    Recorded session;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Recording r = session.read();
    for (uint32_t scope : r.events.scope) {
      CHECK(scope <= r.scope_begins.ticks.size());
    }
  }
  stop.store(true);
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// Each thread allocates in an operator, then marks a step, and so on.
class Stepping {
 public:
  Stepping(int threads, int steps, std::chrono::microseconds rest = {}) {
    for (int t = 0; t < threads; ++t) {
      threads_.emplace_back([steps, rest] {
        for (int i = 0; i < steps; ++i) {
          op("work", -1, -1, [] { alloc(1); });
          Recorder::get().mark_step("step");
          if (rest.count() > 0) {
            std::this_thread::sleep_for(rest);
          }
        }
      });
    }
  }

  ~Stepping() {
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  Stepping(const Stepping&) = delete;  // joins its threads once
  Stepping& operator=(const Stepping&) = delete;

 private:
  std::vector<std::thread> threads_;
};

// Every event's operator is in the recording, and every event that came before a mark.
void check_consistent(const Recording& r) {
  std::map<uint16_t, int64_t> events_after_marks;
  for (size_t i = 0; i < r.events.ticks.size(); ++i) {
    CHECK(r.events.scope[i] > 0 && r.events.scope[i] <= r.scope_begins.ticks.size());
    ++events_after_marks[r.events.thread[i]];
  }
  for (uint32_t scope : r.scope_ends.scope) {
    CHECK(scope > 0 && scope <= r.scope_begins.ticks.size());
  }
  for (size_t i = 0; i < r.scope_begins.ticks.size(); ++i) {
    if (r.scope_begins.kind[i] == static_cast<uint8_t>(ScopeKind::kStep)) {
      --events_after_marks[r.scope_begins.thread[i]];
    }
  }
  for (const auto& [thread, count] : events_after_marks) {
    CHECK(count == 0 || count == 1);
  }
}

TEST(what_is_read_up_to_an_instant_is_consistent_while_threads_record) {
  Recorded session;
  Harvest harvest(session.id());
  RecordingBuilder so_far;
  int whole = 0;
  constexpr size_t kSteps = 10000;
  Stepping stepping(3, kSteps, std::chrono::microseconds(1));
  while (so_far.recording.events.ticks.size() < 3 * kSteps) {
    if (harvest.drain(so_far, ticks_now())) {
      check_consistent(so_far.recording);
      ++whole;
    }
  }
  CHECK(whole > 50);
}

TEST(a_row_waits_for_no_clock_that_runs_ahead) {
  Recorded session;
  Harvest harvest(session.id());
  RecordingBuilder so_far;
  uint64_t now = ticks_now();
  Recorder::get().events.append({.ticks = UINT64_MAX,
                                 .address = 1,
                                 .bytes = 1,
                                 .action = 0,
                                 .ready = 1,
                                 .scope = 0,
                                 .place = 0,
                                 .thread = 0});
  alloc(2);
  CHECK(harvest.drain(so_far, now));
  CHECK_EQ(so_far.recording.events.address.size(), size_t{0});
  CHECK(harvest.drain(so_far, now));
  CHECK_EQ(so_far.recording.events.address, (std::vector<uint64_t>{1, 2}));
}

TEST(a_streamed_file_that_ends_anywhere_is_consistent) {
  const std::string path = "cut.pytrace";
  {
    Recorded session;
    Streamer streamer(session.id(), path, true, "{}");
    Stepping(2, 1000, std::chrono::microseconds(300));
  }
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  size_t most = 0;
  for (size_t tenth = 1; tenth <= 10; ++tenth) {
    ReadReport report;
    Recording r = read_recording(
        {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size() * tenth / 10}, report);
    CHECK_EQ(report.status, ReadReport::Status::kTruncated);
    check_consistent(r);
    most = std::max(most, r.events.ticks.size());
  }
  CHECK(most > 0);
  std::remove(path.c_str());
}

// As after a Ctrl-C right after the begin: the streamer's thread may not have run at all.
TEST(a_streamed_file_that_nobody_finishes_has_all_that_was_recorded) {
  const std::string path = "unfinished.pytrace";
  for (int i = 0; i < 50; ++i) {
    {
      Recorded session;
      Streamer streamer(session.id(), path, true, "{}");
      op("aten::empty", -1, -1, [] { alloc(0x1000); });
    }
    ReadReport report;
    Recording r = read_recording(path, report);
    CHECK_EQ(report.status, ReadReport::Status::kTruncated);
    CHECK_EQ(r.events.ticks.size(), size_t{1});
  }
  std::remove(path.c_str());
}

TEST(a_saved_file_that_ends_anywhere_is_consistent) {
  const std::string path = "saved.pytrace";
  Recorded session;
  Stepping(2, 2 * kMaxRowsPerChunk);
  Recording before = session.read();
  write_recording(view_of(before), path, true);
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  size_t half = 0;
  for (size_t tenth = 1; tenth < 10; ++tenth) {
    ReadReport report;
    Recording r = read_recording(
        {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size() * tenth / 10}, report);
    check_consistent(r);
    half += !r.events.ticks.empty() && r.events.ticks.size() < before.events.ticks.size() ? 1 : 0;
  }
  CHECK(half > 3);
  std::remove(path.c_str());
}

TEST(a_streamed_file_says_what_memory_says) {
  const std::string path = "streamed.pytrace";
  Recording in_memory;
  {
    Recorded session;
    Streamer streamer(session.id(), path, true, "{}");
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 3; ++t) {
      threads.emplace_back([t] {
        for (uint64_t i = 1; i < 20000; ++i) {
          op(i % 2 == 0 ? "even" : "odd", -1, -1, [&] { alloc(i << 8 | t); });
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    streamer.finish("{\"done\": true}");
  }
  ReadReport report;
  Recording r = read_recording(path, report);
  CHECK_EQ(report.status, ReadReport::Status::kComplete);
  CHECK_EQ(r.events.ticks.size(), size_t{3 * 19999});
  CHECK_EQ(r.meta, std::string("{\"done\": true}"));
  for (size_t i = 0; i < r.events.ticks.size(); ++i) {
    bool even = (r.events.address[i] >> 8) % 2 == 0;
    CHECK_EQ(name_of(r, r.events.scope[i]), std::string(even ? "even" : "odd"));
  }
  std::remove(path.c_str());
}

TEST(a_recording_written_to_a_file_is_read_back_equal) {
  const std::string path = "written.pytrace";
  Recorded session(7);
  for (uint64_t i = 1; i < 10; ++i) {
    op("aten::empty", -1, -1, [&] { alloc(i << 4, i); });
  }
  Recording before = session.read();
  before.meta = "{}";
  write_recording(view_of(before), path, true);
  ReadReport report;
  Recording after = read_recording(path, report);
  CHECK_EQ(report.status, ReadReport::Status::kComplete);
  CHECK_EQ(after.events.address, before.events.address);
  CHECK_EQ(after.events.bytes, before.events.bytes);
  CHECK_EQ(after.scope_begins.name, before.scope_begins.name);
  CHECK_EQ(after.strings, before.strings);
  CHECK_EQ(after.losses.size(), size_t{2});
  std::remove(path.c_str());
}

}  // namespace
}  // namespace pytracer
