#include "anonymous.h"
#include "codec.h"
#include "trace_file.h"
#include "trace_format.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

namespace pytracer {
namespace {

constexpr size_t kTextPerChunk = size_t{1} << 20;  // keeps chunks small, and the loss by a kill

inline std::span<const uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Numbers columns from 1 in the order in which they are added, that of their lines in
// trace_tables.h.
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

  template <class Row>
  void rows(std::span<const Row> rows) {
    TableOf<Row>::Columns::each_column([&](const auto& schema) {
      using Item = typename std::decay_t<decltype(schema)>::Item;
      column_.resize(rows.size() * sizeof(Item));
      for (size_t i = 0; i < rows.size(); ++i) {
        Item item = schema.of_row(rows[i]);
        std::memcpy(column_.data() + i * sizeof(Item), &item, sizeof(Item));
      }
      encoded(column_, sizeof(Item), schema.filter);
    });
  }

  template <class View>
  void columns(const View& view) {
    View::each_column(
        [&](const auto& schema, const auto& column) {
          const auto* bytes = reinterpret_cast<const uint8_t*>(column.data());
          encoded({bytes, column.size_bytes()}, sizeof(column[0]), schema.filter);
        },
        view);
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

namespace {

// Opens a file that is there and has no bytes: its maker has reserved the name. Else returns -1.
int open_empty(const std::string& path) {
  int file = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe has no reader
  struct stat status{};
  if (file >= 0 &&
      (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size > 0)) {
    ::close(file);
    file = -1;
  }
  errno = EEXIST;
  return file;
}

}  // namespace

TraceWriter::TraceWriter(const std::string& path, bool overwrite) : path_(path) {
  int how = overwrite ? O_TRUNC : O_EXCL;
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | how, 0666);
  if (fd_ < 0 && errno == EEXIST) {
    fd_ = open_empty(path);
  }
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

// One call per chunk, without a buffer of our own: written bytes survive the process.
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
      // Leaves no half chunk behind. If even this fails, the reader copes.
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
  Flush row{chain_};
  uint64_t& flushes = rows_[index_of(Table::kFlushes)];
  ChunkBuilder chunk(chunk_, column_, scratch_, Table::kFlushes, flushes, 1);
  chunk.rows(std::span<const Flush>(&row, 1));
  write_chunk(chunk.finish());
  ++flushes;
  flushed_ = bytes_written();
}

void TraceWriter::finish() {
  if (finished_) {
    return;
  }
  end_flush();
  std::vector<Total> totals;
  for (size_t table = 1; table < kTables; ++table) {
    if (table != index_of(Table::kEnd)) {
      totals.push_back({static_cast<uint16_t>(table), rows_[table]});
    }
  }
  ChunkBuilder chunk(chunk_, column_, scratch_, Table::kEnd, 0, totals.size());
  chunk.rows(std::span<const Total>(totals));
  write_chunk(chunk.finish());
  sync();
  finished_ = true;
  if (fd_ >= 0 && ::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) {
    fail(errno);  // some network disks report only now that they are full
  }
}

// Calls add_part(chunk, from, to) for the rows of each chunk.
template <class Columns, class AddPart>
void TraceWriter::add_chunks(size_t rows, AddPart add_part) {
  require_open();
  uint64_t& first_row = rows_[index_of(Columns::kNumber)];
  for (size_t from = 0; from < rows;) {
    size_t to = std::min(rows, from + kMaxRowsPerChunk);
    ChunkBuilder chunk(chunk_, column_, scratch_, Columns::kNumber, first_row, to - from);
    add_part(chunk, from, to);
    write_chunk(chunk.finish());
    first_row += to - from;
    from = to;
  }
}

template <class Row>
void TraceWriter::add(std::span<const Row> rows) {
  using Columns = typename TableOf<Row>::Columns;
  add_chunks<Columns>(rows.size(), [&](ChunkBuilder& chunk, size_t from, size_t to) {
    chunk.rows(rows.subspan(from, to - from));
  });
}

template <class View>
void TraceWriter::add_columns(const View& columns) {
  add_chunks<View>(rows_in(columns), [&](ChunkBuilder& chunk, size_t from, size_t to) {
    chunk.columns(view_of<View>(columns, from, to));
  });
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
      // No real name is longer than a mebibyte: keeps its beginning.
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

void TraceWriter::add(std::span<const NamedThread> rows) {
  std::vector<NamedThread> numbered(rows.begin(), rows.end());
  if (anonymous_root_) {  // the main thread's id is the process's
    for (size_t i = 0; i < numbered.size(); ++i) {
      numbered[i].native_id = rows_[index_of(Table::kThreads)] + i;
    }
  }
  add<NamedThread>(numbered);
}

template void TraceWriter::add(std::span<const ClockReading> rows);
template void TraceWriter::add(std::span<const StackFrame> rows);
template void TraceWriter::add(std::span<const Place> rows);
template void TraceWriter::add(std::span<const Label> rows);
template void TraceWriter::add(std::span<const NamedCount> rows);
template void TraceWriter::add(std::span<const Event> rows);
template void TraceWriter::add(std::span<const ScopeBegin> rows);
template void TraceWriter::add(std::span<const ScopeEnd> rows);

template void TraceWriter::add_columns(const ClockTable<Viewed>& columns);
template void TraceWriter::add_columns(const StackTable<Viewed>& columns);
template void TraceWriter::add_columns(const PlaceTable<Viewed>& columns);
template void TraceWriter::add_columns(const LabelTable<Viewed>& columns);
template void TraceWriter::add_columns(const ThreadTable<Viewed>& columns);
template void TraceWriter::add_columns(const EventTable<Viewed>& columns);
template void TraceWriter::add_columns(const ScopeBeginTable<Viewed>& columns);
template void TraceWriter::add_columns(const ScopeEndTable<Viewed>& columns);

}  // namespace pytracer
