// A session: one stretch of recording, and its hooks.
//
// One set of hooks serves all sessions of the process. The most demanding session decides what is
// hooked, and the hooks go when the last session ends. Beginning and ending are one call each, so
// that no interrupt in Python can leave something half hooked.
#pragma once

#include "../core/recorder.h"
#include "../core/streamer.h"
#include "ops.h"
#include "phase_times.h"

#include <Python.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

namespace pytracer {

class StepRows;

struct Wants {
  ops::Detail detail = ops::Detail::kSteps;
  bool cpu = false;
  bool device = false;  // every accelerator that has a tracker
  bool stacks = false;
  bool saved_tensors = false;
};

// A session's share in each moment (moments.h).
struct Listening {
  std::shared_ptr<PhaseTimes> phases;
  bool by_hooks = false;  // hooks see each save as it happens
  uint64_t calls = 0;     // calls of outermost modules
  uint64_t steps = 0;
  // Read when the first moment began (or recording began), and when the last moment ended.
  OwnTime::Reading from{};
  OwnTime::Reading until{};
  uint64_t waited_before = 0;  // how long the first moment's thread had waited for a core
  int64_t began_ns = 0;        // the first moment, by a steady clock
  pid_t thread = 0;

  // Each counts one call or step. True at powers of two: then the device's memory is read. Calls
  // count for this only in a program that never steps.
  bool called();
  bool stepped();
};

// The GIL must be held for everything here. In a forked child the parent's sessions are over, and
// calls to them do nothing.
class Session {
 public:
  Session() = default;
  ~Session();
  Session(const Session&) = delete;  // it ends once
  Session& operator=(const Session&) = delete;

  // Records from here on. Returns the problem, or ""; with a problem nothing is hooked for it.
  std::string begin(uint64_t max_events, const Wants& wants, std::shared_ptr<PhaseTimes> phases);
  // Ends recording, and unhooks everything that no other session needs. Calling it twice is
  // harmless. A file that was being written stays as it is.
  void end();
  bool is_open() const;

  uint32_t id() const { return id_; }

  // The program says that a step is over. Returns whether to read the device's memory.
  bool count_step() { return listening_->stepped(); }

  // Calls and steps since the last call of this.
  std::pair<uint64_t, uint64_t> new_counts();

  // About the time from the program's first moment to its last, or to now if it had none.
  // Recording's own computing in it, in ticks and in nanoseconds; its length, in ticks; and how
  // long other programs had the core in it, in nanoseconds.
  std::array<uint64_t, 4> own_time() const;

  // The first reads the recording so far, which goes on. The second ends it, and reads it whole.
  Recording read() const;
  Recording end_and_read();
  // Writes to a file from here on; with a root, an anonymous one. Throws FileError.
  void stream_to(const std::string& path,
                 const std::string& meta,
                 const std::optional<std::string>& anonymous_root);
  // Replaces the file's meta document meanwhile.
  void note(const std::string& meta);
  // Ends the session and its file. Throws FileError if something could not be written.
  void end_and_write(const std::string& meta);

 private:
  class Ending;

  uint32_t id_ = 0;  // 0: not begun, or read and forgotten
  bool recording_ = false;
  pid_t owner_ = 0;
  std::shared_ptr<Listening> listening_ = std::make_shared<Listening>();
  std::pair<uint64_t, uint64_t> told_;  // calls and steps at the last new_counts()
  std::unique_ptr<Streamer> streamer_;
};

namespace sessions {

uint32_t open();  // the number of open sessions
// The open sessions. A list stays as it is while somebody goes through it.
using AllListening = std::shared_ptr<const std::vector<std::shared_ptr<Listening>>>;
AllListening listening();

// Around our work at a moment. Own time is counted from the first moment to the last.
class AtMoment {
 public:
  AtMoment();
  ~AtMoment();
  AtMoment(const AtMoment&) = delete;  // it ends once
  AtMoment& operator=(const AtMoment&) = delete;

 private:
  AllListening listening_;
};

// Begins or ends calling the counter after training steps, whether or not anything records. See
// step_counters.h.
void count_steps(PyObject* counter, StepRows* rows);
void count_no_steps(PyObject* counter);

// Whose allocators are counted by steps (core/device_totals.h), whether or not anything records.
struct Counted {
  bool cpu = false;
  bool device = false;
};

// Begins to count them, or ends it if there is none. Returns the problem, or "".
std::string count_totals(Counted devices);
// Sentences about the calls or the device events that cannot be seen; "" for none.
std::string calls_problem();
std::string device_problem();
// Records the blocks that the accelerators' allocators hold already.
void seed_device();
void after_fork_in_child();

}  // namespace sessions

}  // namespace pytracer
