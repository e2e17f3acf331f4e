// The source of a trace: memory, or a file of any size, read a piece at a time.
#pragma once

#include "trace_file.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pytracer {

class Source {
 public:
  // Messages have `name` in the path's place. `bytes` must outlive the source.
  Source(std::span<const uint8_t> bytes, std::string name);
  // Throws FileError.
  explicit Source(const std::string& path);
  ~Source();
  Source(const Source&) = delete;  // owns a file descriptor that is closed once
  Source& operator=(const Source&) = delete;

  const std::string& name() const { return name_; }

  // The number of bytes at the beginning, or at the last look_again().
  uint64_t size() const { return size_; }

  // The number of bytes now: a recording that goes on adds some.
  uint64_t look_again();

  // The `count` bytes from `at` on, or fewer if the file ends there. Valid until the next call.
  std::span<const uint8_t> read(uint64_t at, size_t count) {
    auto found = look(at, count);
    return found.first(std::min(count, found.size()));
  }

  // The same, and the further bytes behind them that are in memory.
  std::span<const uint8_t> look(uint64_t at, size_t count);

  // The place of the file's next bytes from `at` on: the file may have holes of any size.
  uint64_t next_data(uint64_t at) const;

  // The size without a hole at the end.
  uint64_t size_of_data() const;

  bool is_zero_from(uint64_t at);

 private:
  static constexpr size_t kPiece = size_t{1} << 20;

  void fill(uint64_t at, size_t count);

  std::string name_;
  int fd_ = -1;
  uint64_t size_ = 0;
  std::span<const uint8_t> here_;  // the bytes in memory, from position_ on
  uint64_t position_ = 0;
  std::vector<uint8_t> buffer_;
};

// The file needs more memory than there is.
FileError no_memory_for(const std::string& path);

}  // namespace pytracer
