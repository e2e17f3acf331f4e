// Writes a session to its file while it runs, from a thread of its own.
#pragma once

#include "harvest.h"
#include "trace_file.h"

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace pytracer {

class Streamer {
 public:
  // Throws FileError if the file cannot be made. With a root, the file is anonymous.
  Streamer(uint32_t session,
           const std::string& path,
           bool overwrite,
           const std::string& meta,
           const std::optional<std::string>& anonymous_root = std::nullopt);
  // Without finish(), writes the rows that are left, and no trailer.
  ~Streamer();
  Streamer(const Streamer&) = delete;  // its thread refers to it
  Streamer& operator=(const Streamer&) = delete;

  // Replaces the meta document, for a process that is killed later. Does nothing after a failure.
  void note(const std::string& meta);

  // Writes the rows that are left, and the trailer. Call it when the session has ended. Throws
  // FileError if this or any earlier write failed (the disk was full): nothing is lost silently.
  void finish(const std::string& meta);

 private:
  void start();
  void run();
  void write_some() noexcept;
  void drain();
  [[noreturn]] void throw_failure();
  void write_rest();
  void stop();

  TraceWriter writer_;
  Harvest harvest_;
  std::mutex mutex_;  // the writer and the harvest
  std::condition_variable wake_;
  bool stopping_ = false;
  std::exception_ptr failure_;  // of the first write that failed, or for which there was no memory
  bool is_finished_ = false;
  std::thread thread_;
};

}  // namespace pytracer
