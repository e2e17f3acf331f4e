#include "streamer.h"

#include "clock.h"

#include <array>
#include <chrono>
#include <csignal>

namespace pytracer {

namespace {

// How much a kill may lose: short enough to matter to nobody, long enough to cost nothing.
constexpr auto kInterval = std::chrono::milliseconds(100);

void add_clock(TraceWriter& writer) {
  std::array<ClockReading, 1> now{read_clock()};
  writer.add(std::span<const ClockReading>(now));
}

}  // namespace

Streamer::Streamer(uint32_t session,
                   const std::string& path,
                   bool overwrite,
                   const std::string& meta,
                   const std::optional<std::string>& anonymous_root)
    : writer_(path, overwrite), harvest_(session) {
  if (anonymous_root) {
    writer_.be_anonymous(*anonymous_root);
  }
  writer_.set_meta(meta);
  add_clock(writer_);
  writer_.end_flush();
  start();
}

// The program's signals are for its own threads: it may block them there and wait for them. Where
// no thread can be had, note() and finish() write.
void Streamer::start() {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread(&Streamer::run, this);
  } catch (const std::exception&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Streamer::~Streamer() {
  stop();
  if (failure_ || is_finished_) {
    return;
  }
  try {
    write_rest();  // the thread may not have written all
    writer_.end_flush();
  } catch (const std::exception&) {  // the file ends where it ends
  }
}

void Streamer::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Streamer::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    wake_.wait_for(lock, kInterval, [this] { return stopping_; });
    write_some();
  }
}

// Runs on a thread where nobody catches. Without memory it tries again the next time.
void Streamer::write_some() noexcept {
  try {
    drain();
    Recorder::get().release_below(harvest_.session(), harvest_.read());
  } catch (...) {
    failure_ = failure_ ? failure_ : std::current_exception();
  }
}

void Streamer::drain() {
  if (failure_) {
    // finish() will raise, so nobody reads these rows. They must not fill the memory meanwhile.
    Nowhere nowhere;
    harvest_.drain(nowhere);
    return;
  }
  uint64_t before = harvest_.events_read();
  bool whole = harvest_.drain(writer_, ticks_now());
  if (harvest_.events_read() != before) {
    add_clock(writer_);
  }
  if (whole) {  // else a row is missing that others may refer to: wait for the next time
    writer_.end_flush();
  }
}

void Streamer::note(const std::string& meta) {
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) {
    write_some();
  }
  if (failure_) {
    return;
  }
  try {
    writer_.set_meta(meta);  // the next flush ends behind it
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void Streamer::finish(const std::string& meta) {
  stop();
  if (failure_) {
    throw_failure();
  }
  is_finished_ = true;
  write_rest();
  writer_.set_meta(meta);
  writer_.finish();
}

void Streamer::throw_failure() {
  try {
    std::rethrow_exception(failure_);
  } catch (const FileError&) {
    throw;
  } catch (const std::exception& error) {
    throw FileError(FileError::Kind::kIo,
                    writer_.path(),
                    std::string("writing ended early: ") + error.what(),
                    "what came before is in the file");
  }
}

void Streamer::write_rest() {
  harvest_.drain_all(writer_);
  add_clock(writer_);
}

}  // namespace pytracer
