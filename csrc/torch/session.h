// A session: one stretch of recording, and all that is hooked for it.
//
// One set of hooks serves all sessions of the process. It is what the most demanding one asks for,
// and gone when the last one ends. Beginning and ending are one call each, so that no interrupt in
// Python can leave something half hooked.
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

struct Wants {
  ops::Detail detail = ops::Detail::kSteps;
  bool cpu = false;
  bool device = false;  // every accelerator that has a tracker
  bool stacks = false;
  bool saved_tensors = false;
};

// What a session is told of at each moment (moments.h).
struct Listening {
  std::shared_ptr<PhaseTimes> phases;
  bool by_hooks = false;  // it sees each save as it happens
  uint64_t calls = 0;     // of outermost modules
  uint64_t steps = 0;
  // As the first moment began and as the last one ended, or as recording began.
  OwnTime::Reading from{};
  OwnTime::Reading until{};
  uint64_t waited_before = 0;  // for a core, by the thread of the first moment
  pid_t thread = 0;

  // Counts one. True at powers of two, when the device's memory is to be read; a program that never
  // steps is read as it calls its model.
  bool called();
  bool stepped();
};

// The GIL must be held for everything here. In a forked child its parent's sessions are over, and
// what is asked of them there does nothing.
class Session {
 public:
  Session() = default;
  ~Session();
  Session(const Session&) = delete;  // it ends once
  Session& operator=(const Session&) = delete;

  // Records from here on. Returns what stands in the way, and then nothing is hooked for it.
  std::string begin(uint64_t max_events, const Wants& wants, std::shared_ptr<PhaseTimes> phases);
  // Records no more, and unhooks what no other session needs. Twice is harmless. A file that was
  // being written stays as far as it came.
  void end();
  bool is_open() const;

  uint32_t id() const { return id_; }

  // The program says that a step is over. Whether the device's memory is to be read.
  bool count_step() { return listening_->stepped(); }

  // Calls and steps since it was last asked.
  std::pair<uint64_t, uint64_t> new_counts();

  // Of the time from the program's first moment to its last, or to now if it had none: what
  // recording computed, in ticks and in nanoseconds; how long it lasted, in ticks; and for how long
  // of it other programs had the core, in nanoseconds.
  std::array<uint64_t, 4> own_time() const;

  // What there is so far; the recording goes on. Or ends it, and reads it whole.
  Recording read() const;
  Recording end_and_read();
  // Writes to a file from here on; with a root, an anonymous one. Throws FileError.
  void stream_to(const std::string& path,
                 const std::string& meta,
                 const std::optional<std::string>& anonymous_root);
  // Ends the session and its file. Throws FileError where something could not be written.
  void end_and_write(const std::string& meta);

 private:
  class Ending;

  uint32_t id_ = 0;  // 0: not begun, or read and forgotten
  bool recording_ = false;
  pid_t owner_ = 0;
  std::shared_ptr<Listening> listening_ = std::make_shared<Listening>();
  std::pair<uint64_t, uint64_t> told_;  // of calls and steps
  std::unique_ptr<Streamer> streamer_;
};

namespace sessions {

uint32_t open();  // how many
// Those that are open. A list stays as it is while somebody goes through it.
using AllListening = std::shared_ptr<const std::vector<std::shared_ptr<Listening>>>;
AllListening listening();

// Around what is done at a moment: from the first to the last one own time is counted.
class AtMoment {
 public:
  AtMoment();
  ~AtMoment();
  AtMoment(const AtMoment&) = delete;  // it ends once
  AtMoment& operator=(const AtMoment&) = delete;

 private:
  AllListening listening_;
};

// Calls the counter after each training step, whether or not anything records; or no more.
void count_steps(PyObject* counter);
void count_no_steps(PyObject* counter);
// What of the program cannot be seen, or nothing.
std::string calls_problem();
std::string device_problem();
// What the accelerators hold already becomes visible.
void seed_device();
void after_fork_in_child();

}  // namespace sessions

}  // namespace pytracer
