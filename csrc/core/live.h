// The totals of a recording that goes on: what is in use now, peaks, steps, growth. All are exact.
// The memory for this does not grow with the recording.
//
// What the bytes are for is not asked here: pytracer/analysis/facts/ has the rules, and the watcher
// applies them to the last whole step.
#pragma once

#include "event.h"
#include "steps.h"
#include "trace_file.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <vector>

namespace pytracer {

struct LivePeak {
  int64_t bytes = 0;
  uint64_t ticks = 0;
  uint64_t step = 0;
};

struct LiveDevice {
  uint8_t type;
  uint8_t index;
  int64_t reserved = 0;
  int64_t now = 0;
  LivePeak peak;  // of the whole recording
};

struct LiveStep {
  uint64_t number;
  uint64_t ticks;              // when it ended
  std::vector<int64_t> peaks;  // per device
  std::vector<int64_t> ends;
};

class Live {
 public:
  void take(Recording& flush);

  // The recording is over, and the last optimizer step ended the last step.
  void end();

  // The unfinished step counts, too.
  std::vector<LiveDevice> devices() const;

  // The last steps; older ones are dropped.
  const std::deque<LiveStep>& steps() const { return steps_; }

  uint64_t step() const { return step_; }

  // The position of the device that matters most: a GPU before the CPU, then the highest.
  size_t main_device() const;

  const Recording& tables() const { return tables_; }  // the small ones; no events, no scopes

  uint64_t events() const { return events_; }

  uint64_t last_ticks() const { return last_ticks_; }

  uint64_t failed_bytes() const { return failed_bytes_; }  // of the last allocation that failed

 private:
  struct Block {
    int64_t bytes;
    uint32_t device;
  };

  struct Scope {
    uint64_t ticks = 0;
    uint32_t number = 0;
    uint16_t thread = 0;
    bool in_module = false;
    bool in_pass = false;
  };

  struct Mark {
    enum Kind : uint8_t { kForward, kOptimizer, kStep };

    uint64_t ticks;
    Kind kind;
    uint64_t about;  // when the forward began; the optimizer
  };

  struct Device {
    LiveDevice shown;
    LivePeak until;   // of the step, up to the last optimizer's step that may have ended it
    int64_t end = 0;  // the bytes at that moment
    LivePeak since;   // the peak since then
  };

  void take_tables(Recording& flush);
  void take_scopes(const Recording& flush);
  void add_scope(const Recording::ScopeBegins& rows, size_t row);
  const Scope* find_scope(uint32_t number) const;
  bool begins_forward(const Scope* scope) const;
  void choose_main_thread(ScopeKind kind, const Scope& scope);
  void apply(const Mark& mark);
  void may_end(uint64_t ticks);
  void close();
  void take_event(const Recording::Events& rows, size_t row);
  void make(const Recording::Events& rows, size_t row);
  void let_go(uint64_t address, uint64_t ticks);
  void change(uint32_t device, int64_t bytes, uint64_t ticks);
  uint32_t device_of(uint16_t place);
  void start_device(uint32_t device);

  static constexpr size_t kRecent = size_t{1} << 14;  // scopes that are kept, open or not
  static constexpr size_t kMostOpen = size_t{1} << 14;
  static constexpr size_t kMostSteps = 4096;

  Recording tables_;
  std::vector<Scope> recent_ = std::vector<Scope>(kRecent);
  std::map<uint32_t, Scope> contexts_;       // older ones that are open and no operators
  std::map<uint32_t, uint64_t> optimizers_;  // open steps of optimizers, and their names
  std::vector<Mark> marks_;
  uint32_t scopes_ = 0;
  int main_thread_rank_ = 0;
  uint16_t main_thread_ = 0;

  std::vector<Device> devices_;
  std::unordered_map<uint64_t, Block> live_;  // by address
  bool marked_steps_ = false;
  bool may_have_ended_ =
      false;                // an optimizer has stepped; whether the step has ended is not known
  uint64_t end_ticks_ = 0;  // when it stepped
  StepEnds step_ends_;
  uint64_t step_ = 0;
  std::deque<LiveStep> steps_;
  uint64_t events_ = 0;
  uint64_t last_ticks_ = 0;
  uint64_t failed_bytes_ = 0;
};

}  // namespace pytracer
