// What a trace is read from: a file, a piece at a time and however large, or memory.
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
  // `name` stands for the path in messages. `bytes` must outlive the source.
  Source(std::span<const uint8_t> bytes, std::string name);
  // Throws FileError.
  explicit Source(const std::string& path);
  ~Source();
  Source(const Source&) = delete;  // owns a file descriptor that is closed once
  Source& operator=(const Source&) = delete;

  const std::string& name() const { return name_; }

  // As many bytes as there were at the beginning, or when it was last asked how many there are.
  uint64_t size() const { return size_; }

  // How many bytes there are now: a recording that goes on adds some.
  uint64_t look_again();

  // The `count` bytes from `at` on, or fewer where the file ends. Valid until the next call.
  std::span<const uint8_t> read(uint64_t at, size_t count) {
    auto found = look(at, count);
    return found.first(std::min(count, found.size()));
  }

  // The same, and what else is in memory behind them.
  std::span<const uint8_t> look(uint64_t at, size_t count);

  // From `at` on, where the file's next bytes are: it may have holes of any size.
  uint64_t next_data(uint64_t at) const;

  // Without a hole at the end.
  uint64_t size_of_data() const;

  bool is_zero_from(uint64_t at);

 private:
  static constexpr size_t kPiece = size_t{1} << 20;

  void fill(uint64_t at, size_t count);

  std::string name_;
  int fd_ = -1;
  uint64_t size_ = 0;
  std::span<const uint8_t> here_;  // what is in memory, from position_ on
  uint64_t position_ = 0;
  std::vector<uint8_t> buffer_;
};

// There is less memory than the file needs.
FileError no_memory_for(const std::string& path);

}  // namespace pytracer
