#include "anonymous.h"
#include "codec.h"
#include "trace_file.h"
#include "trace_format.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <system_error>
#include <unistd.h>

namespace pytracer {
namespace {

constexpr size_t kTextPerChunk = size_t{1} << 20;  // keeps chunks, and what a kill loses, small

inline std::span<const uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Columns are numbered from 1 in the order they are added: the order of Recording's members.
class ChunkBuilder {
 public:
  ChunkBuilder(std::vector<uint8_t>& out,
               std::vector<uint8_t>& column,
               std::vector<uint8_t>& scratch,
               Table table,
               uint64_t first_row,
               size_t rows)
      : out_(out), column_(column), scratch_(scratch) {
    out_.assign(kSync.begin(), kSync.end());
    append(out_, static_cast<uint16_t>(table));
    append(out_, uint8_t{0});  // columns, known at the end
    append(out_, uint8_t{0});  // flags
    append(out_, static_cast<uint32_t>(rows));
    append(out_, first_row);
    out_.resize(kChunkHeader);
  }

  template <typename Item, typename Row, typename Get>
  void column(std::span<const Row> rows, uint8_t filter, Get get) {
    column_.resize(rows.size() * sizeof(Item));
    for (size_t i = 0; i < rows.size(); ++i) {
      auto item = static_cast<Item>(get(rows[i]));
      std::memcpy(column_.data() + i * sizeof(Item), &item, sizeof(Item));
    }
    encoded(column_, sizeof(Item), filter);
  }

  void text(std::span<const uint8_t> bytes) { encoded(bytes, kBytesWidth, kFilterNone); }

  // Never compressed, so that a reader may rely on each string costing the file some bytes.
  void string_lengths(std::span<const uint32_t> lengths) {
    auto size = static_cast<uint32_t>(lengths.size_bytes());
    column_header(sizeof(uint32_t), kFilterNone, size);
    out_[out_.size() - kColumnHeader + 3] = static_cast<uint8_t>(Codec::kStored);
    store(out_, out_.size() - 4, size);
    const auto* bytes = reinterpret_cast<const uint8_t*>(lengths.data());
    out_.insert(out_.end(), bytes, bytes + size);
  }

  std::span<const uint8_t> finish() {
    out_[10] = columns_;
    store(out_, 24, static_cast<uint32_t>(out_.size() - kChunkHeader));
    store(out_, 28, crc32(std::span(out_).subspan(kChunkHeader)));
    store(out_, kHeaderCrc, crc32(std::span(out_).first(kHeaderCrc)));
    return out_;
  }

 private:
  void column_header(unsigned width, uint8_t filter, uint32_t raw_size) {
    append(out_, ++columns_);
    append(out_, static_cast<uint8_t>(width));
    append(out_, filter);
    append(out_, uint8_t{0});  // codec, and below the encoded size: filled in afterwards
    append(out_, raw_size);
    append(out_, uint32_t{0});
  }

  void encoded(std::span<const uint8_t> raw, unsigned width, uint8_t filter) {
    size_t header = out_.size();
    column_header(width, filter, static_cast<uint32_t>(raw.size()));
    EncodedColumn column = encode_column(raw, width, filter, scratch_, out_);
    out_[header + 3] = static_cast<uint8_t>(column.codec);
    store(out_, header + 8, static_cast<uint32_t>(column.size));
  }

  std::vector<uint8_t>& out_;
  std::vector<uint8_t>& column_;
  std::vector<uint8_t>& scratch_;
  uint8_t columns_ = 0;
};

FileError write_error(const std::string& path, int error) {
  using Kind = FileError::Kind;
  std::string reason = std::generic_category().message(error);
  switch (error) {
    case EEXIST:
      return {Kind::kExists, path, "the file exists", "choose another name or allow overwriting"};
    case EISDIR:
      return {Kind::kDirectory, path, "this is a directory", "name a file inside it"};
    case ENOENT:
    case ENOTDIR:
      return {Kind::kUnwritable, path, "its directory does not exist", "create the directory"};
    case EACCES:
    case EPERM:
    case EROFS:
      return {Kind::kUnwritable,
              path,
              "may not be written (" + reason + ")",
              "choose a place "
              "where you may write"};
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return {Kind::kDiskFull,
              path,
              "no room to write (" + reason + ")",
              "free some space; what "
              "was recorded until now can be read"};
    default:
      return {Kind::kIo, path, "writing failed (" + reason + ")", "see whether the disk is well"};
  }
}

}  // namespace

FileError::FileError(Kind kind,
                     std::string path,
                     const std::string& what_happened,
                     const std::string& advice)
    : std::runtime_error(path + ": " + what_happened + "; " + advice),
      kind_(kind),
      path_(std::move(path)) {}

TraceWriter::TraceWriter(const std::string& path, bool overwrite) : path_(path) {
  int how = overwrite ? O_TRUNC : O_EXCL;
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | how, 0666);
  if (fd_ < 0) {
    throw write_error(path_, errno);
  }
  write_file_header();
}

TraceWriter::TraceWriter(std::vector<uint8_t>* memory) : path_("<memory>"), memory_(memory) {
  write_file_header();
}

TraceWriter::~TraceWriter() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void TraceWriter::write_file_header() {
  chunk_.assign(kMagic.begin(), kMagic.end());
  append(chunk_, kFormatMajor);
  append(chunk_, kFormatMinor);
  append(chunk_, crc32(chunk_));
  flushed_ = chunk_.size();
  try {
    write_bytes(chunk_);
  } catch (...) {
    ::close(fd_);  // the destructor does not run for a constructor that throws
    throw;
  }
}

void TraceWriter::require_open() const {
  if (failure_) {
    throw FileError(*failure_);
  }
  if (finished_) {
    throw std::logic_error("the trace is finished: nothing can be added");
  }
}

void TraceWriter::fail(int error) {
  failure_ = write_error(path_, error);
  throw FileError(*failure_);
}

void TraceWriter::write_chunk(std::span<const uint8_t> chunk) {
  write_bytes(chunk);
  chain_ = crc32(chunk.subspan(kHeaderCrc, sizeof(uint32_t)), chain_);
}

// One call per chunk, without a buffer of our own: what is written survives the process.
void TraceWriter::write_bytes(std::span<const uint8_t> bytes) {
  uint64_t before = bytes_written();
  if (memory_ != nullptr) {
    memory_->insert(memory_->end(), bytes.begin(), bytes.end());
  }
  for (size_t done = 0; memory_ == nullptr && done < bytes.size();) {
    ssize_t wrote = ::write(fd_, bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) {
      continue;
    }
    if (wrote <= 0) {
      int error = wrote < 0 ? errno : ENOSPC;
      // Leave no half chunk behind. When even this fails, the reader copes.
      [[maybe_unused]] int ignored = ::ftruncate(fd_, static_cast<off_t>(before));
      fail(error);
    }
    done += static_cast<size_t>(wrote);
  }
  bytes_written_.store(before + bytes.size(), std::memory_order_relaxed);
}

void TraceWriter::sync() {
  // Special files cannot be synced and need not be.
  if (fd_ >= 0 && ::fsync(fd_) != 0 && errno != EINVAL && errno != EROFS && errno != ENOTSUP) {
    fail(errno);
  }
}

void TraceWriter::end_flush() {
  require_open();
  if (bytes_written() == flushed_) {
    return;
  }
  std::span<const uint32_t> row(&chain_, 1);
  uint64_t& flushes = rows_[index_of(Table::kFlushes)];
  ChunkBuilder chunk(chunk_, column_, scratch_, Table::kFlushes, flushes, row.size());
  chunk.column<uint32_t>(row, kFilterNone, [](uint32_t chain) { return chain; });
  write_chunk(chunk.finish());
  ++flushes;
  flushed_ = bytes_written();
}

void TraceWriter::finish() {
  if (finished_) {
    return;
  }
  end_flush();
  std::vector<size_t> tables;
  for (size_t table = 1; table < kTables; ++table) {
    if (table != index_of(Table::kEnd)) {
      tables.push_back(table);
    }
  }
  std::span<const size_t> rows(tables);
  ChunkBuilder chunk(chunk_, column_, scratch_, Table::kEnd, 0, rows.size());
  chunk.column<uint16_t>(rows, kFilterNone, [](size_t table) { return table; });
  chunk.column<uint64_t>(rows, kFilterNone, [this](size_t table) { return rows_[table]; });
  write_chunk(chunk.finish());
  sync();
  finished_ = true;
  if (fd_ >= 0 && ::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) {
    fail(errno);  // some network disks tell only now that they are full
  }
}

template <typename Row, typename Columns>
void TraceWriter::add_rows(Table table, std::span<const Row> rows, Columns columns) {
  require_open();
  uint64_t& first_row = rows_[index_of(table)];
  while (!rows.empty()) {
    auto part = rows.first(std::min(rows.size(), kMaxRowsPerChunk));
    ChunkBuilder chunk(chunk_, column_, scratch_, table, first_row, part.size());
    columns(chunk, part);
    write_chunk(chunk.finish());
    first_row += part.size();
    rows = rows.subspan(part.size());
  }
}

void TraceWriter::be_anonymous(std::string root) {
  anonymous_root_ = std::move(root);
}

void TraceWriter::set_meta(std::string_view json) {
  require_open();
  if (json.size() > kMaxColumnBytes) {
    throw std::length_error("the trace's meta document is larger than the format allows");
  }
  ChunkBuilder chunk(chunk_, column_, scratch_, Table::kMeta, 0, 1);
  chunk.text(as_bytes(json));
  write_chunk(chunk.finish());
  rows_[index_of(Table::kMeta)] = 1;
}

void TraceWriter::add(std::span<const std::string> rows) {
  require_open();
  uint64_t& first_row = rows_[index_of(Table::kStrings)];
  std::vector<uint8_t> text;
  std::vector<uint32_t> lengths;
  std::string shorter;
  for (size_t i = 0; i < rows.size();) {
    text.clear();
    lengths.clear();
    while (i < rows.size() && lengths.size() < kMaxRowsPerChunk && text.size() < kTextPerChunk) {
      // A name of more than a mebibyte is nobody's name: keep its beginning.
      std::string_view row = std::string_view(rows[i++]).substr(0, kTextPerChunk);
      if (anonymous_root_) {
        row = shorter = without_paths(row, *anonymous_root_);
      }
      text.insert(text.end(), row.begin(), row.end());
      lengths.push_back(static_cast<uint32_t>(row.size()));
    }
    ChunkBuilder chunk(chunk_, column_, scratch_, Table::kStrings, first_row, lengths.size());
    chunk.string_lengths(lengths);
    chunk.text(text);
    write_chunk(chunk.finish());
    first_row += lengths.size();
  }
}

// Filters: what rises steadily is stored as differences; whatever has high bytes that seldom
// change is shuffled.
constexpr uint8_t kRising = kFilterDelta | kFilterShuffle;

void TraceWriter::add(std::span<const ClockReading> rows) {
  add_rows(Table::kClock, rows, [](ChunkBuilder& chunk, std::span<const ClockReading> part) {
    chunk.column<uint64_t>(part, kRising, [](const auto& row) { return row.ticks; });
    chunk.column<int64_t>(part, kRising, [](const auto& row) { return row.unix_ns; });
  });
}

void TraceWriter::add(std::span<const StackFrame> rows) {
  add_rows(Table::kStacks, rows, [](ChunkBuilder& chunk, std::span<const StackFrame> part) {
    chunk.column<uint32_t>(part, kRising, [](const auto& row) { return row.parent; });
    chunk.column<uint32_t>(part, kFilterShuffle, [](const auto& row) { return row.file; });
    chunk.column<uint32_t>(part, kFilterShuffle, [](const auto& row) { return row.function; });
    chunk.column<uint32_t>(part, kFilterShuffle, [](const auto& row) { return row.line; });
  });
}

void TraceWriter::add(std::span<const Place> rows) {
  add_rows(Table::kPlaces, rows, [](ChunkBuilder& chunk, std::span<const Place> part) {
    chunk.column<uint64_t>(part, kFilterShuffle, [](const auto& row) { return row.stream; });
    chunk.column<uint64_t>(part, kFilterShuffle, [](const auto& row) { return row.pool_high; });
    chunk.column<uint64_t>(part, kFilterShuffle, [](const auto& row) { return row.pool_low; });
    chunk.column<uint8_t>(part, kFilterNone, [](const auto& row) { return row.device_type; });
    chunk.column<uint8_t>(part, kFilterNone, [](const auto& row) { return row.device_index; });
  });
}

void TraceWriter::add(std::span<const Label> rows) {
  add_rows(Table::kLabels, rows, [](ChunkBuilder& chunk, std::span<const Label> part) {
    chunk.column<uint8_t>(part, kFilterNone, [](const auto& row) { return row.category; });
    chunk.column<uint32_t>(part, kFilterShuffle, [](const auto& row) { return row.role; });
    chunk.column<uint32_t>(part, kRising, [](const auto& row) { return row.name; });
    chunk.column<uint32_t>(part, kFilterShuffle, [](const auto& row) { return row.shape; });
    chunk.column<uint32_t>(part, kFilterShuffle, [](const auto& row) { return row.dtype; });
  });
}

void TraceWriter::add(std::span<const NamedThread> rows) {
  std::vector<NamedThread> numbered;
  if (anonymous_root_) {  // the main thread's id is the process's
    numbered.assign(rows.begin(), rows.end());
    for (size_t i = 0; i < numbered.size(); ++i) {
      numbered[i].native_id = rows_[index_of(Table::kThreads)] + i;
    }
    rows = numbered;
  }
  add_rows(Table::kThreads, rows, [](ChunkBuilder& chunk, std::span<const NamedThread> part) {
    chunk.column<uint64_t>(part, kFilterShuffle, [](const auto& row) { return row.native_id; });
    chunk.column<uint32_t>(part, kFilterShuffle, [](const auto& row) { return row.name; });
  });
}

void TraceWriter::add(std::span<const NamedCount> rows) {
  add_rows(Table::kLosses, rows, [](ChunkBuilder& chunk, std::span<const NamedCount> part) {
    chunk.column<uint32_t>(part, kFilterShuffle, [](const auto& row) { return row.name; });
    chunk.column<uint64_t>(part, kFilterShuffle, [](const auto& row) { return row.count; });
  });
}

void TraceWriter::add(std::span<const Event> rows) {
  add_rows(Table::kEvents, rows, [](ChunkBuilder& chunk, std::span<const Event> part) {
    chunk.column<uint64_t>(part, kRising, [](const auto& row) { return row.ticks; });
    chunk.column<uint64_t>(part, kFilterShuffle, [](const auto& row) { return row.address; });
    chunk.column<uint64_t>(part, kFilterShuffle, [](const auto& row) { return row.bytes; });
    chunk.column<uint8_t>(part, kFilterNone, [](const auto& row) { return row.action; });
    chunk.column<uint32_t>(part, kRising, [](const auto& row) { return row.scope; });
    chunk.column<uint16_t>(part, kFilterShuffle, [](const auto& row) { return row.place; });
    chunk.column<uint16_t>(part, kFilterShuffle, [](const auto& row) { return row.thread; });
  });
}

void TraceWriter::add(std::span<const ScopeBegin> rows) {
  add_rows(Table::kScopeBegins, rows, [](ChunkBuilder& chunk, std::span<const ScopeBegin> part) {
    chunk.column<uint64_t>(part, kRising, [](const auto& row) { return row.ticks; });
    chunk.column<uint32_t>(part, kRising, [](const auto& row) { return row.parent; });
    chunk.column<uint32_t>(part, kRising, [](const auto& row) { return row.forward; });
    chunk.column<uint32_t>(part, kFilterShuffle, [](const auto& row) { return row.name; });
    chunk.column<uint16_t>(part, kFilterShuffle, [](const auto& row) { return row.thread; });
    chunk.column<uint8_t>(part, kFilterNone, [](const auto& row) { return row.kind; });
    chunk.column<uint8_t>(
        part, kFilterNone, [](const auto& row) { return row.flags_and_ready & 0x7F; });
  });
}

void TraceWriter::add(std::span<const ScopeEnd> rows) {
  add_rows(Table::kScopeEnds, rows, [](ChunkBuilder& chunk, std::span<const ScopeEnd> part) {
    chunk.column<uint64_t>(part, kRising, [](const auto& row) { return row.ticks; });
    chunk.column<uint32_t>(part, kRising, [](const auto& row) { return row.scope; });
    chunk.column<uint32_t>(part, kFilterShuffle, [](const auto& row) { return row.stack; });
  });
}

}  // namespace pytracer
