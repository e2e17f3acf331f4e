// Follows a trace while it is written, and hands out each flush as soon as the file has it.
#pragma once

#include "trace_chunk.h"
#include "trace_file.h"
#include "trace_source.h"

#include <array>
#include <cstdint>
#include <functional>
#include <string>

namespace pytracer {

// Guarantees:
//   - it hands out rows once, in their order, and only those of whole flushes
//   - it waits for a chunk that is being written, and never reads a part of one
//   - memory is bounded by one flush and one piece of the file, however long the recording
// It does not check references: in a damaged file, rows of other tables may be missing.
class TraceTail {
 public:
  // The rows of one flush, and of no other.
  using TakeFlush = std::function<void(Recording& rows)>;

  enum class State : uint8_t {
    kGrowing,   // or the recording was killed: a file cannot tell
    kComplete,  // its end was read
    kDamaged,   // the bytes that follow cannot be read
    kReplaced,  // the file is shorter than the part already read: it is another recording's now
  };

  // Throws FileError if it is no trace; an empty file is a trace that has not begun.
  explicit TraceTail(const std::string& path, MemoryLimit limit = {});

  // Reads up to about that many bytes. True if there is more to read now. Throws FileError if the
  // rows so far have taken more memory than the file may take, like a reader of the whole file.
  bool advance(size_t most_bytes, const TakeFlush& take);

  State state() const { return state_; }

  uint64_t bytes_read() const { return at_; }

 private:
  bool begin();
  bool take_chunk(const TakeFlush& take);
  bool wait_or_give_up();
  void take_memory(uint64_t bytes);
  bool decode(const ChunkHeader& header);
  template <typename Group>
  bool decode_next(const ChunkHeader& header, Group& group);
  bool decode_losses(const ChunkHeader& header);

  Source source_;
  MemoryLimit limit_;
  uint64_t memory_ = 0;  // of all rows so far
  uint64_t at_ = 0;      // the beginning of the next chunk
  State state_ = State::kGrowing;
  uint64_t unsound_since_ = 0;  // the file's size when a whole chunk did not read well
  uint16_t minor_ = 0;
  std::array<uint64_t, kTables> rows_{};
  ChunkColumns columns_;
  Recording flush_;                   // the flush that is being read
  std::vector<std::string> strings_;  // names of losses
};

}  // namespace pytracer
