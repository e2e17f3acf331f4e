// The .pytrace file: written while recording, readable whenever the process dies.
// docs/trace-format.md describes the bytes.
#pragma once

#include "event.h"
#include "trace_tables.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pytracer {

// A reader of major version N reads every N.x. Within a major version only tables, columns and
// enumerators are added, and old readers skip them.
inline constexpr uint16_t kFormatMajor = 1;
inline constexpr uint16_t kFormatMinor = 1;
inline constexpr size_t kMaxRowsPerChunk = 65536;
inline constexpr size_t kMaxColumnBytes = size_t{256} << 20;  // of one decoded column: long texts

std::string_view table_name(Table table);

// A problem with a file as a whole. what() is one line: the path, the problem, what to do.
class FileError : public std::runtime_error {
 public:
  enum class Kind : uint8_t {
    kMissing,
    kDirectory,
    kNotAFile,  // a pipe, a device
    kUnreadable,
    kEmpty,     // not even a whole file header
    kForeign,   // not a .pytrace
    kDamaged,   // the file header itself
    kNewer,     // a newer major version
    kTooLarge,  // its rows need more memory than a file of its size may take
    kExists,    // and overwriting was not asked for
    kUnwritable,
    kDiskFull,
    kIo,
  };

  FileError(Kind kind,
            std::string path,
            const std::string& what_happened,
            const std::string& advice);

  Kind kind() const { return kind_; }

  const std::string& path() const { return path_; }

 private:
  Kind kind_;
  std::string path_;
};

// Appends rows to a new file. Guarantees:
//   - every call leaves whole chunks in the file
//   - after kill -9 the file can be read up to the last end_flush(), in all tables alike
//   - memory is bounded by one chunk, however long the recording
//   - the writer numbers rows, per table, in the order in which they are added
//   - after a failed write the file ends at its last whole chunk, and every later call throws
//     the same error again
// Write rows before the rows that refer to them (strings before scopes before events). Otherwise a
// killed recording has dangling references, which the reader turns to "none". One thread at a time,
// except bytes_written().
class TraceWriter {
 public:
  // Throws FileError; without `overwrite` also if the file exists.
  explicit TraceWriter(const std::string& path, bool overwrite = false);
  // Appends to `memory` instead of a file: for tests.
  explicit TraceWriter(std::vector<uint8_t>* memory);
  // Closes the file as it is. Without finish() it reads as truncated, by design.
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;  // owns a file descriptor that is closed once
  TraceWriter& operator=(const TraceWriter&) = delete;

  // Before any row: strings are written without paths (see anonymous.h), and threads numbered.
  void be_anonymous(std::string root);

  void set_meta(std::string_view json);  // replaces what was set before
  void add(std::span<const std::string> rows);
  void add(std::span<const NamedThread> rows);
  // Rows of any table of trace_tables.h. A later NamedCount replaces an earlier one of the same
  // name.
  template <class Row>
  void add(std::span<const Row> rows);
  // The same rows as columns, written without a copy.
  template <class View>
  void add_columns(const View& columns);

  // Ends a flush: a reader shows all rows since the last flush, or none of them.
  void end_flush();

  // Ends the last flush, writes the trailer that says "complete", syncs and closes. Later calls do
  // nothing; adding afterwards throws std::logic_error.
  void finish();

  uint64_t bytes_written() const { return bytes_written_.load(std::memory_order_relaxed); }

  const std::string& path() const { return path_; }

 private:
  template <class Columns, class AddPart>
  void add_chunks(size_t rows, AddPart add_part);
  void write_file_header();
  void write_chunk(std::span<const uint8_t> chunk);
  void write_bytes(std::span<const uint8_t> bytes);
  void sync();
  void require_open() const;
  [[noreturn]] void fail(int error);

  std::string path_;
  int fd_ = -1;
  std::vector<uint8_t>* memory_ = nullptr;
  bool finished_ = false;
  std::optional<std::string> anonymous_root_;
  std::optional<FileError> failure_;
  std::array<uint64_t, kTables> rows_{};
  uint32_t chain_ = 0;    // over the chunks written so far: see docs/trace-format.md
  uint64_t flushed_ = 0;  // bytes up to the end of the last flush
  std::atomic<uint64_t> bytes_written_{0};
  std::vector<uint8_t> chunk_;    // the one being built
  std::vector<uint8_t> column_;   // one column of it, gathered from rows
  std::vector<uint8_t> scratch_;  // the same, filtered
};

struct ReadReport {
  enum class Status : uint8_t {
    kComplete,   // finished, and whole
    kTruncated,  // never finished (killed, or still recording): the whole flushes are here
    kCorrupt,    // parts in the middle are damaged or missing; the rest is here
  };

  struct Lost {
    std::string table;
    uint64_t rows = 0;    // known to have been there
    uint64_t chunks = 0;  // present, but unreadable
  };

  Status status = Status::kComplete;
  uint16_t major = 0;
  uint16_t minor = 0;
  uint64_t good_bytes = 0;  // of the file header and of whole chunks
  uint64_t total_bytes = 0;
  uint64_t skipped_chunks = 0;     // whole, but of a kind that this version does not know
  std::vector<Lost> lost;          // only tables that lost something
  std::vector<std::string> notes;  // one sentence each, for people
};

// How much memory the rows of one file may take: see docs/trace-format.md, "Limits". LZ4 decodes a
// byte to up to 255, so without a limit a small file could fill any memory. Recordings need up to
// 14 times their size.
struct MemoryLimit {
  static constexpr uint64_t kLeast = uint64_t{512} << 20;
  static constexpr uint64_t kRatio = 32;
  static constexpr uint64_t kNone = UINT64_MAX;

  uint64_t bytes = 0;  // 0: the default, which grows with the file

  uint64_t of(uint64_t file_size) const {
    return bytes > 0 ? bytes : std::max(kLeast, kRatio * std::min(file_size, kNone / kRatio));
  }
};

// Throws FileError if there is nothing to read, or more than the limit allows; the report has
// damage and truncation. Lost rows in the middle become blank rows, so that all others keep their
// numbers. A blank event is a kLabel of label 0 at address 0. A lost clock reading leaves no row.
// Rows behind the last whole flush are cut.
Recording read_recording(const std::string& path, ReadReport& report, MemoryLimit limit = {});
// The same from memory. Messages have `name` in the path's place.
Recording read_recording(std::span<const uint8_t> bytes,
                         ReadReport& report,
                         const std::string& name = "<memory>",
                         MemoryLimit limit = {});

}  // namespace pytracer
