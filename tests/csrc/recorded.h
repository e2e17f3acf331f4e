// A recording made by hand: what hooks would call, and what a session has of it.
#pragma once

#include "check.h"
#include "harvest.h"
#include "recorder.h"

#include <cstdint>
#include <string>

namespace pytracer {

// A session of the process's one recorder, and what it recorded.
class Recorded {
 public:
  explicit Recorded(uint64_t max_events = Recorder::kNoLimit)
      : id_(Recorder::get().begin_session(max_events)) {}

  ~Recorded() {
    Recorder::get().end_session(id_);
    Recorder::get().forget_session(id_);
  }

  Recording read() const {
    RecordingBuilder builder;
    Harvest harvest(id_);
    harvest.drain_all(builder);
    for (const auto& [name, count] : builder.recording.losses) {
      CHECK(name != "lost_unfinished_rows");
    }
    return builder.recording;
  }

  uint32_t id() const { return id_; }

 private:
  uint32_t id_;
};

inline ThreadState& here() {
  return Recorder::this_thread();
}

inline void op(const char* name, int64_t sequence, int64_t next_sequence, auto body) {
  int key = 0;
  Recorder::get().push(here(), ScopeKind::kOp, &key, name, sequence);
  body();
  Recorder::get().pop(here(), &key, next_sequence);
}

inline void alloc(uint64_t address, uint64_t bytes = 8) {
  Recorder::get().record(Action::kAlloc, kCpuPlace, address, bytes);
}

inline void release(uint64_t address) {
  Recorder::get().record(Action::kFreeCompleted, kCpuPlace, address, 0);
}

inline std::string name_of(const Recording& r, uint32_t scope) {
  return scope == 0 ? "" : r.strings[r.scope_begins.name[scope - 1]];
}

}  // namespace pytracer
