// Threads that come and go while something records.
#include "check.h"
#include "recorded.h"

#include <atomic>
#include <map>
#include <memory>
#include <pthread.h>
#include <set>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace pytracer {
namespace {

void in_a_thread(auto body) {
  std::thread(body).join();
}

uint64_t native_id() {
  return static_cast<uint64_t>(syscall(SYS_gettid));
}

uint64_t loss(const Recording& r, const std::string& name) {
  for (const auto& [known, count] : r.losses) {
    if (known == name) {
      return count;
    }
  }
  return 0;
}

// Torch's id of each thread.
thread_local uint64_t torch_id = 0;

void identify(uint64_t id) {
  torch_id = id;
  Recorder::get().torch_thread_id.store([]() -> uint64_t { return torch_id; });
}

// An operator of a thread with this id that makes the nodes [first, next).
void forward(uint64_t id, const char* name, int64_t first, int64_t next) {
  identify(id);
  op(name, first, next, [] {});
}

// Allocates in the backward of a node. Returns the name of the op that made it, "" if not known.
std::string made_by(const Recorded& session, uint64_t thread, int64_t number) {
  int key = 0;
  Recorder::get().push_node(here(), &key, "Backward0", number, thread, NodeKind::kPlain);
  alloc(0x1000);
  Recorder::get().pop(here(), &key);
  Recording r = session.read();
  return name_of(r, r.scope_begins.forward[r.events.scope.back() - 1]);
}

TEST(each_thread_has_a_number_of_its_own_and_the_next_one_gets_its_memory) {
  constexpr uint64_t kThreads = 500;
  Recorded session;
  std::map<uint64_t, uint64_t> thread_of;
  std::set<const ThreadState*> states;
  for (uint64_t i = 1; i <= kThreads; ++i) {
    in_a_thread([&] {
      alloc(i << 8);
      thread_of[i << 8] = native_id();
      states.insert(&here());
    });
  }
  Recording r = session.read();
  CHECK_EQ(states.size(), size_t{1});
  CHECK_EQ(r.threads.native_id.size(), size_t{kThreads});
  CHECK_EQ(std::set(r.events.thread.begin(), r.events.thread.end()).size(), size_t{kThreads});
  for (size_t i = 0; i < r.events.thread.size(); ++i) {
    CHECK_EQ(r.threads.native_id[r.events.thread[i]], thread_of[r.events.address[i]]);
  }
}

TEST(threads_that_live_at_once_share_no_memory) {
  constexpr int kThreads = 100;  // more than the recorder keeps memory for
  Recorded session;
  for (int round = 0; round < 2; ++round) {
    std::atomic<int> arrived{0};
    std::vector<std::thread> threads;
    std::vector<const ThreadState*> states(kThreads);
    for (size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        op("aten::ones", -1, -1, [] { alloc(0x1000); });
        states[t] = &here();
        ++arrived;
        while (arrived.load() < kThreads) {
          std::this_thread::yield();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK_EQ(std::set(states.begin(), states.end()).size(), size_t{kThreads});
  }
  CHECK_EQ(session.read().threads.native_id.size(), size_t{2 * kThreads});
}

#ifndef PYTRACER_SANITIZED  // a thread takes far longer there
TEST(threads_beyond_the_numbers_share_one_that_is_nobodys) {
  constexpr size_t kMore = 20;
  Recorded session;
  std::vector<uint64_t> native;
  for (size_t i = 0; i < Recorder::kMostThreads + kMore; ++i) {
    in_a_thread([&] {
      alloc(0x1000);
      native.push_back(native_id());
    });
  }
  Recording r = session.read();
  CHECK_EQ(r.threads.native_id.size(), Recorder::kMostThreads + 1);
  CHECK_EQ(r.threads.native_id.back(), uint64_t{0});
  CHECK_EQ(r.strings[r.threads.name.back()], std::string("all other threads"));
  CHECK_EQ(loss(r, "merged_threads"), uint64_t{kMore});
  size_t wrong = 0;
  for (size_t i = 0; i < native.size(); ++i) {
    uint64_t expected = i < Recorder::kMostThreads ? native[i] : 0;
    wrong += r.threads.native_id[r.events.thread[i]] != expected ? 1 : 0;
  }
  CHECK_EQ(wrong, size_t{0});
}
#endif

TEST(a_recording_has_only_the_threads_that_took_part_in_it) {
  in_a_thread([] { alloc(0x1000); });
  {
    Recorded earlier;
    in_a_thread([] { alloc(0x2000); });
    in_a_thread([] { alloc(0x3000); });
  }
  Recorded session;
  uint64_t native = 0;
  in_a_thread([&] {
    alloc(0x4000);
    native = native_id();
  });
  Recording r = session.read();
  CHECK_EQ(r.threads.native_id, std::vector<uint64_t>{native});
}

// Frees a block when it is destroyed.
struct Holder {
  ~Holder() { release(0x5000); }
};

TEST(what_a_thread_frees_as_it_ends_is_its_own) {
  static pthread_key_t key;
  pthread_key_create(&key, [](void* rounds) {
    release(0x6000);
    auto left = reinterpret_cast<uintptr_t>(rounds) - 1;
    if (left > 0) {
      pthread_setspecific(key, reinterpret_cast<void*>(left));
    }
  });
  Recorded session;
  in_a_thread([] {
    static thread_local Holder before;  // destroyed after what the recorder's first call makes
    pthread_setspecific(key, reinterpret_cast<void*>(2));
    alloc(0x5000);
  });
  in_a_thread([] { alloc(0x7000); });
  pthread_key_delete(key);
  Recording r = session.read();
  CHECK_EQ(r.events.address, (std::vector<uint64_t>{0x5000, 0x5000, 0x6000, 0x6000, 0x7000}));
  CHECK_EQ(r.events.thread, (std::vector<uint16_t>{0, 0, 0, 0, 1}));
}

TEST(nodes_of_a_thread_that_has_ended_know_the_op_that_made_them) {
  Recorded session;
  forward(100, "of main", 40, 41);
  in_a_thread([] { forward(101, "of the first", 40, 42); });
  in_a_thread([] { forward(102, "of the second", 41, 43); });
  CHECK_EQ(made_by(session, 100, 40), std::string("of main"));
  CHECK_EQ(made_by(session, 101, 40), std::string("of the first"));
  CHECK_EQ(made_by(session, 101, 41), std::string("of the first"));
  CHECK_EQ(made_by(session, 102, 41), std::string("of the second"));
  CHECK_EQ(made_by(session, 102, 42), std::string("of the second"));
  for (auto [thread, number] : {std::pair{100, 41}, {101, 39}, {101, 42}, {102, 40}, {103, 40}}) {
    CHECK_EQ(made_by(session, static_cast<uint64_t>(thread), number), std::string());
  }
  CHECK_EQ(loss(session.read(), "forgotten_nodes"), uint64_t{0});
}

TEST(the_thread_that_made_the_first_node_may_end) {
  for (int recording = 0; recording < 3; ++recording) {
    Recorded session;
    const ThreadState* first = nullptr;
    in_a_thread([&first] {
      forward(200, "of the first", 40, 41);
      first = &here();
    });
    in_a_thread([first] {
      CHECK(&here() != first);
      forward(201, "of the second", 40, 41);
    });
    CHECK_EQ(made_by(session, 200, 40), std::string("of the first"));
    CHECK_EQ(made_by(session, 201, 40), std::string("of the second"));
  }
}

TEST(the_nodes_of_the_threads_that_ended_first_are_forgotten_and_that_is_counted) {
  constexpr int64_t kNodes = 1 << 17;
  constexpr uint64_t kThreads = 20;
  Recorded session;
  forward(300, "of main", 0, 1);
  for (uint64_t i = 1; i <= kThreads; ++i) {
    in_a_thread([i] { forward(300 + i, "of a thread", 0, kNodes); });
  }
  uint64_t kept = EndedThreads::kMostWords / (kNodes + 32);
  for (uint64_t i = 1; i <= kThreads; ++i) {
    std::string expected = i > kThreads - kept ? "of a thread" : "";
    CHECK_EQ(made_by(session, 300 + i, kNodes - 1), expected);
  }
  CHECK_EQ(loss(session.read(), "forgotten_nodes"), kThreads - kept);
}

TEST(an_annotation_may_outlive_its_thread) {
  Recorded session;
  ThreadState* owner = nullptr;
  auto annotation = std::make_shared<Annotation>("begun by a thread that ended");
  in_a_thread([&] {
    owner = &here();
    Recorder::get().push_annotation(here(), ScopeKind::kUser, annotation);
    alloc(0x1000);
  });
  in_a_thread([&] {
    CHECK_EQ(owner, &here());
    alloc(0x2000);
    Recorder::get().end_annotation(here(), *owner, *annotation);
    alloc(0x3000);
  });
  Recorder::get().end_annotation(here(), *owner, *annotation);
  Recording r = session.read();
  CHECK_EQ(name_of(r, r.events.scope[0]), annotation->name);
  CHECK_EQ(name_of(r, r.events.scope[1]), std::string());
  CHECK_EQ(name_of(r, r.events.scope[2]), std::string());
}

TEST(threads_come_and_go_while_sessions_begin_and_end) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> starters;
  for (uint64_t s = 1; s <= 3; ++s) {
    starters.emplace_back([&stop, s] {
      for (uint64_t i = 0; !stop.load(); ++i) {
        in_a_thread([id = s << 32 | i] {
          forward(id % 1000 + 1, "aten::mul", 0, 3);
          int key = 0;
          Recorder::get().push_node(here(), &key, "MulBackward0", 1, 1, NodeKind::kPlain);
          alloc(0x1000);
          Recorder::get().pop(here(), &key);
        });
      }
    });
  }
  for (int i = 0; i < 30; ++i) {
    Recorded session;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    Recording r = session.read();
    for (uint16_t thread : r.events.thread) {
      CHECK(thread < r.threads.native_id.size());
    }
  }
  stop.store(true);
  for (std::thread& starter : starters) {
    starter.join();
  }
}

}  // namespace
}  // namespace pytracer
