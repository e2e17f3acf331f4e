#include "trace_file.h"

#include "codec.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <set>
#include <sys/stat.h>
#include <system_error>
#include <tuple>
#include <unistd.h>
#include <unordered_map>

namespace pytracer {
namespace {

// --- What the bytes look like: docs/trace-format.md ---------------------------------------------

// Like PNG's: the first byte is no text, and a transfer that rewrites line ends breaks it.
constexpr std::array<uint8_t, 8> kMagic = {0x89, 'P', 'Y', 'T', '\r', '\n', 0x1A, '\n'};
// Where a chunk may begin. Random bytes: a payload holds them by chance once in 2^64 positions.
constexpr std::array<uint8_t, 8> kSync = {0xC4, 0x7E, 0x91, 0x0D, 0xF3, 0x5A, 0x0A, 0xE8};
constexpr size_t kFileHeader = 16;
constexpr size_t kChunkHeader = 36;
constexpr size_t kColumnHeader = 12;
constexpr unsigned kBytesWidth = 0;  // a column that is one text, not one item per row
constexpr uint64_t kMaxRow = uint64_t{1} << 48;
constexpr size_t kTextPerChunk = size_t{1} << 20;  // keeps chunks, and what a kill loses, small

constexpr std::array<std::string_view, kTables> kTableNames = {"none",
                                                               "meta",
                                                               "clock",
                                                               "strings",
                                                               "stacks",
                                                               "places",
                                                               "labels",
                                                               "threads",
                                                               "losses",
                                                               "events",
                                                               "scope_begins",
                                                               "scope_ends",
                                                               "end"};

constexpr size_t index_of(Table table) {
  return static_cast<size_t>(table);
}

template <typename Item>
void append(std::vector<uint8_t>& out, Item item) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&item);
  out.insert(out.end(), bytes, bytes + sizeof(item));
}

template <typename Item>
void store(std::vector<uint8_t>& out, size_t at, Item item) {
  std::memcpy(out.data() + at, &item, sizeof(item));
}

template <typename Item>
Item load(std::span<const uint8_t> bytes, size_t at) {
  Item item;
  std::memcpy(&item, bytes.data() + at, sizeof(item));
  return item;
}

std::span<const uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// --- Building one chunk -------------------------------------------------------------------------

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
    store(out_, 32, crc32(std::span(out_).first(32)));
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

}  // namespace

std::string_view table_name(Table table) {
  return index_of(table) < kTables ? kTableNames[index_of(table)] : "unknown";
}

FileError::FileError(Kind kind,
                     std::string path,
                     const std::string& what_happened,
                     const std::string& advice)
    : std::runtime_error(path + ": " + what_happened + "; " + advice),
      kind_(kind),
      path_(std::move(path)) {}

// --- TraceWriter --------------------------------------------------------------------------------

namespace {

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

void TraceWriter::flush() {
  require_open();
  sync();
}

void TraceWriter::finish() {
  if (finished_) {
    return;
  }
  require_open();
  std::array<size_t, index_of(Table::kEnd) - 1> tables;
  for (size_t i = 0; i < tables.size(); ++i) {
    tables[i] = i + 1;
  }
  std::span<const size_t> rows(tables);
  ChunkBuilder chunk(chunk_, column_, scratch_, Table::kEnd, 0, rows.size());
  chunk.column<uint16_t>(rows, kFilterNone, [](size_t table) { return table; });
  chunk.column<uint64_t>(rows, kFilterNone, [this](size_t table) { return rows_[table]; });
  write_bytes(chunk.finish());
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
    write_bytes(chunk.finish());
    first_row += part.size();
    rows = rows.subspan(part.size());
  }
}

template <typename Text>
void TraceWriter::add_strings(std::span<const Text> rows) {
  require_open();
  uint64_t& first_row = rows_[index_of(Table::kStrings)];
  std::vector<uint8_t> text;
  std::vector<uint32_t> lengths;
  for (size_t i = 0; i < rows.size();) {
    text.clear();
    lengths.clear();
    while (i < rows.size() && lengths.size() < kMaxRowsPerChunk && text.size() < kTextPerChunk) {
      // A name of more than a mebibyte is nobody's name: keep its beginning.
      std::string_view row = std::string_view(rows[i++]).substr(0, kTextPerChunk);
      text.insert(text.end(), row.begin(), row.end());
      lengths.push_back(static_cast<uint32_t>(row.size()));
    }
    ChunkBuilder chunk(chunk_, column_, scratch_, Table::kStrings, first_row, lengths.size());
    chunk.string_lengths(lengths);
    chunk.text(text);
    write_bytes(chunk.finish());
    first_row += lengths.size();
  }
}

void TraceWriter::set_meta(std::string_view json) {
  require_open();
  if (json.size() > kMaxColumnBytes) {
    throw std::length_error("the trace's meta document is larger than the format allows");
  }
  ChunkBuilder chunk(chunk_, column_, scratch_, Table::kMeta, 0, 1);
  chunk.text(as_bytes(json));
  write_bytes(chunk.finish());
  rows_[index_of(Table::kMeta)] = 1;
}

void TraceWriter::add(std::span<const std::string_view> rows) {
  add_strings(rows);
}

void TraceWriter::add(std::span<const std::string> rows) {
  add_strings(rows);
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

// --- Reader -------------------------------------------------------------------------------------

namespace {

// The columns of each table, in the order of their ids.
auto columns_of(Recording::Clock& t) {
  return std::tie(t.ticks, t.unix_ns);
}

auto columns_of(Recording::Stacks& t) {
  return std::tie(t.parent, t.file, t.function, t.line);
}

auto columns_of(Recording::Places& t) {
  return std::tie(t.stream, t.pool_high, t.pool_low, t.device_type, t.device_index);
}

auto columns_of(Recording::Labels& t) {
  return std::tie(t.category, t.role, t.name, t.shape, t.dtype);
}

auto columns_of(Recording::Threads& t) {
  return std::tie(t.native_id, t.name);
}

auto columns_of(Recording::Events& t) {
  return std::tie(t.ticks, t.address, t.bytes, t.action, t.scope, t.place, t.thread);
}

auto columns_of(Recording::ScopeBegins& t) {
  return std::tie(t.ticks, t.parent, t.forward, t.name, t.thread, t.kind, t.flags);
}

auto columns_of(Recording::ScopeEnds& t) {
  return std::tie(t.ticks, t.scope, t.stack);
}

struct Losses {
  std::vector<uint32_t> name;
  std::vector<uint64_t> count;
};

auto columns_of(Losses& t) {
  return std::tie(t.name, t.count);
}

struct Totals {
  std::vector<uint16_t> table;
  std::vector<uint64_t> rows;
};

auto columns_of(Totals& t) {
  return std::tie(t.table, t.rows);
}

template <typename Group>
size_t rows_in(Group& group) {
  return std::get<0>(columns_of(group)).size();
}

template <typename Group>
void resize(Group& group, size_t rows) {
  std::apply([rows](auto&... column) { (column.resize(rows), ...); }, columns_of(group));
}

template <typename Group>
size_t row_bytes(Group& group) {
  return std::apply(
      [](auto&... column) {
        return (sizeof(typename std::remove_reference_t<decltype(column)>::value_type) + ...);
      },
      columns_of(group));
}

// Rows in the place of lost ones, which change nothing for whoever reads on.
void blank(Recording::Events& events, size_t from) {
  uint64_t before = from > 0 ? events.ticks[from - 1] : 0;
  std::fill(events.ticks.begin() + static_cast<std::ptrdiff_t>(from), events.ticks.end(), before);
  std::fill(events.action.begin() + static_cast<std::ptrdiff_t>(from),
            events.action.end(),
            static_cast<uint8_t>(Action::kLabel));
}

void blank(Recording::ScopeBegins& scopes, size_t from) {
  uint64_t before = from > 0 ? scopes.ticks[from - 1] : 0;
  std::fill(scopes.ticks.begin() + static_cast<std::ptrdiff_t>(from), scopes.ticks.end(), before);
  std::fill(scopes.kind.begin() + static_cast<std::ptrdiff_t>(from),
            scopes.kind.end(),
            static_cast<uint8_t>(ScopeKind::kUser));
}

void blank(Recording::ScopeEnds& scopes, size_t from) {
  uint64_t before = from > 0 ? scopes.ticks[from - 1] : 0;
  std::fill(scopes.ticks.begin() + static_cast<std::ptrdiff_t>(from), scopes.ticks.end(), before);
}

template <typename Group>
void blank(Group&, size_t) {}  // zeros mean "none" already

struct Column {
  uint8_t id;
  uint8_t width;
  uint8_t filter;
  Codec codec;
  size_t raw_size;
  std::span<const uint8_t> encoded;
};

struct ChunkHeader {
  Table table;
  uint8_t columns;
  uint8_t flags;
  uint32_t rows;
  uint64_t first_row;
  uint32_t payload_size;
  uint32_t payload_crc;
};

// The header at `at`, if there is a sound one.
std::optional<ChunkHeader> header_at(std::span<const uint8_t> bytes, size_t at) {
  if (bytes.size() - at < kChunkHeader) {
    return std::nullopt;
  }
  auto raw = bytes.subspan(at, kChunkHeader);
  if (!std::equal(kSync.begin(), kSync.end(), raw.begin()) ||
      load<uint32_t>(raw, 32) != crc32(raw.first(32))) {
    return std::nullopt;
  }
  ChunkHeader header{static_cast<Table>(load<uint16_t>(raw, 8)),
                     raw[10],
                     raw[11],
                     load<uint32_t>(raw, 12),
                     load<uint64_t>(raw, 16),
                     load<uint32_t>(raw, 24),
                     load<uint32_t>(raw, 28)};
  if (header.rows > kMaxRowsPerChunk || header.first_row > kMaxRow) {
    return std::nullopt;
  }
  return header;
}

// Where the next sound header is, or the end.
size_t find_header(std::span<const uint8_t> bytes, size_t from) {
  while (from < bytes.size()) {
    auto start = bytes.begin() + static_cast<std::ptrdiff_t>(from);
    auto found = std::search(start, bytes.end(), kSync.begin(), kSync.end());
    from = static_cast<size_t>(found - bytes.begin());
    if (from == bytes.size() || header_at(bytes, from)) {
      return from;
    }
    ++from;
  }
  return bytes.size();
}

// How long the UTF-8 sequence at the text's start is; 0 when it is not one.
size_t utf8_length(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  if (byte(0) < 0x80) {
    return 1;
  }
  size_t length = byte(0) >= 0xF0 ? 4 : byte(0) >= 0xE0 ? 3 : 2;
  if (byte(0) < 0xC2 || byte(0) > 0xF4 || text.size() < length) {
    return 0;
  }
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) {
      return 0;
    }
  }
  // Overlong forms, surrogates and what lies beyond Unicode.
  bool bad = (byte(0) == 0xE0 && byte(1) < 0xA0) || (byte(0) == 0xED && byte(1) > 0x9F) ||
             (byte(0) == 0xF0 && byte(1) < 0x90) || (byte(0) == 0xF4 && byte(1) > 0x8F);
  return bad ? 0 : length;
}

// Replaces what is not UTF-8. True when there was such.
bool make_utf8(std::string& text) {
  std::string repaired;
  size_t good = 0;  // copied up to here
  bool changed = false;
  for (size_t at = 0; at < text.size();) {
    size_t length = utf8_length(std::string_view(text).substr(at));
    if (length == 0) {
      repaired.append(text, good, at - good).append("\xEF\xBF\xBD");
      good = ++at;
      changed = true;
    }
    at += length;
  }
  if (changed) {
    text = repaired.append(text, good);
  }
  return changed;
}

class Reader {
 public:
  Reader(std::span<const uint8_t> bytes, ReadReport& report, const std::string& name)
      : bytes_(bytes), report_(report), name_(name), blank_budget_(bytes.size() * kLz4MaxRatio) {}

  Recording read();

 private:
  void read_file_header();
  void reserve_events();
  void read_chunks();
  bool read_chunk_at(size_t& at);
  void take_tail(size_t at);
  void take(const ChunkHeader& header, std::span<const uint8_t> payload);
  bool parse_columns(const ChunkHeader& header, std::span<const uint8_t> payload);
  bool take_rows(const ChunkHeader& header);
  template <typename Group>
  bool take_group(const ChunkHeader& header, Group& group, bool numbered = true);
  template <typename Item>
  bool decode(uint8_t id, size_t rows, std::vector<Item>& column);
  bool take_meta();
  bool take_text(uint8_t id, std::string& text);
  bool take_strings(const ChunkHeader& header);
  const Column* column(uint8_t id) const;
  bool fits(const ChunkHeader& header, size_t rows_here, size_t bytes_per_row);
  void check_totals();
  void check_references();
  void fold_losses();
  void repair_text();
  void add_first_rows();
  void check_kinds();
  void check_actions();
  template <typename Item>
  void clamp(std::vector<Item>& ids, size_t limit, std::string_view what);
  template <typename Item>
  void clamp_to_earlier(std::vector<Item>& ids, size_t first_number, std::string_view what);
  void note_count(size_t outside, std::string_view what);
  void note_once(const std::string& text);
  void corrupt(const std::string& text);
  size_t rows_read(size_t table);

  std::span<const uint8_t> bytes_;
  ReadReport& report_;
  const std::string& name_;
  Recording out_;
  Losses losses_;
  Totals totals_;
  bool ended_ = false;
  // Blank rows and checksums cost work that the file did not pay for in bytes; both are limited
  // by its size.
  size_t blank_budget_;
  size_t checked_ = 0;
  std::array<uint64_t, kTables> expected_{};  // rows that the headers speak of
  std::array<ReadReport::Lost, kTables> lost_{};
  std::vector<Column> columns_;  // of the chunk at hand
  std::vector<uint8_t> scratch_;
  std::set<std::string> noted_;
};

constexpr size_t kMaxNotes = 100;

void Reader::note_once(const std::string& text) {
  if (report_.notes.size() > kMaxNotes || !noted_.insert(text).second) {
    return;
  }
  report_.notes.push_back(report_.notes.size() < kMaxNotes ? text : "more notes were left out");
}

void Reader::corrupt(const std::string& text) {
  report_.status = ReadReport::Status::kCorrupt;
  note_once(text);
}

Recording Reader::read() {
  report_ = {};
  report_.total_bytes = bytes_.size();
  read_file_header();
  reserve_events();
  read_chunks();
  check_totals();
  repair_text();
  add_first_rows();
  check_references();
  fold_losses();
  return std::move(out_);
}

void Reader::read_file_header() {
  using Kind = FileError::Kind;
  const std::string elsewhere = "name a file that pytracer wrote";
  size_t known = std::min(bytes_.size(), kMagic.size());
  if (bytes_.empty()) {
    throw FileError(Kind::kEmpty, name_, "the file is empty", "record again");
  }
  if (!std::equal(
          kMagic.begin(), kMagic.begin() + static_cast<std::ptrdiff_t>(known), bytes_.begin())) {
    bool ours = known > 4 && std::equal(kMagic.begin(), kMagic.begin() + 4, bytes_.begin());
    if (ours) {
      throw FileError(Kind::kDamaged,
                      name_,
                      "line ends were rewritten in this trace",
                      "transfer it again as a binary file");
    }
    throw FileError(Kind::kForeign, name_, "this is not a pytracer trace", elsewhere);
  }
  if (bytes_.size() < kFileHeader) {
    throw FileError(
        Kind::kEmpty, name_, "the recording died before anything was written", "record again");
  }
  if (load<uint32_t>(bytes_, 12) != crc32(bytes_.first(12))) {
    throw FileError(
        Kind::kDamaged, name_, "the trace's header is damaged", "use another copy of the file");
  }
  report_.major = load<uint16_t>(bytes_, 8);
  report_.minor = load<uint16_t>(bytes_, 10);
  if (report_.major != kFormatMajor) {
    throw FileError(Kind::kNewer,
                    name_,
                    "the trace has format " + std::to_string(report_.major) +
                        ", this version reads format " + std::to_string(kFormatMajor),
                    "update pytracer");
  }
  report_.good_bytes = kFileHeader;
}

// Growing a column of millions of rows step by step would move them all again and again.
void Reader::reserve_events() {
  size_t rows = 0;
  for (size_t at = kFileHeader; at < bytes_.size();) {
    auto header = header_at(bytes_, at);
    if (!header || header->payload_size > bytes_.size() - at - kChunkHeader) {
      break;
    }
    if (header->table == Table::kEvents) {
      // A chunk may claim more than its bytes can hold.
      size_t most = header->payload_size * kLz4MaxRatio / row_bytes(out_.events);
      rows += std::min<size_t>(header->rows, most);
    }
    at += kChunkHeader + header->payload_size;
  }
  std::apply([rows](auto&... column) { (column.reserve(rows), ...); }, columns_of(out_.events));
}

void Reader::read_chunks() {
  size_t at = kFileHeader;
  while (at < bytes_.size() && !ended_) {
    if (read_chunk_at(at)) {
      continue;
    }
    size_t next = find_header(bytes_, at + 1);
    if (next == bytes_.size()) {
      take_tail(at);
      return;
    }
    corrupt(std::to_string(next - at) + " bytes from offset " + std::to_string(at) +
            " on are damaged");
    at = next;
  }
  if (ended_ && at < bytes_.size()) {
    note_once(std::to_string(bytes_.size() - at) + " bytes after the trace's end were ignored");
  }
}

// Reads the whole chunk at `at` and moves behind it. False when there is none.
bool Reader::read_chunk_at(size_t& at) {
  auto header = header_at(bytes_, at);
  if (!header) {
    return false;
  }
  size_t table = index_of(header->table);
  bool counted = table < kTables && header->table != Table::kEnd;
  if (counted) {
    expected_[table] = std::max(expected_[table], header->first_row + header->rows);
  }
  auto rest = bytes_.subspan(at + kChunkHeader);
  if (header->payload_size > rest.size()) {
    return false;
  }
  auto payload = rest.first(header->payload_size);
  // A file may be made of headers that all claim the same bytes: checking each claim would take
  // quadratic time.
  checked_ += payload.size();
  if (checked_ > 8 * bytes_.size() || crc32(payload) != header->payload_crc) {
    if (counted) {
      ++lost_[table].chunks;
    }
    return false;
  }
  take(*header, payload);
  report_.good_bytes += kChunkHeader + payload.size();
  at += kChunkHeader + payload.size();
  return true;
}

// What follows the last whole chunk: cut off by a kill or a power cut, or damaged?
void Reader::take_tail(size_t at) {
  auto tail = bytes_.subspan(at);
  auto header = header_at(bytes_, at);
  bool cut = header ? header->payload_size > tail.size() - kChunkHeader
                    : tail.size() < kChunkHeader ||
                          std::all_of(tail.begin(), tail.end(), [](uint8_t b) { return b == 0; });
  std::string where = std::to_string(tail.size()) + " bytes at the end, from offset " +
                      std::to_string(at) + " on, ";
  if (cut) {
    note_once(where + "are an unfinished chunk");
  } else {
    corrupt(where + "are damaged");
  }
}

void Reader::take(const ChunkHeader& header, std::span<const uint8_t> payload) {
  std::string name(table_name(header.table));
  if (index_of(header.table) == 0 || index_of(header.table) >= kTables || header.flags != 0) {
    ++report_.skipped_chunks;
    note_once("chunks of table " + std::to_string(index_of(header.table)) + ", flags " +
              std::to_string(header.flags) +
              ", were skipped: a newer pytracer wrote them and can read them");
    return;
  }
  if (!parse_columns(header, payload) || !take_rows(header)) {
    ++lost_[index_of(header.table)].chunks;
    corrupt("a chunk of " + name + " contradicts itself");
  }
}

bool Reader::parse_columns(const ChunkHeader& header, std::span<const uint8_t> payload) {
  columns_.clear();
  for (unsigned i = 0; i < header.columns; ++i) {
    if (payload.size() < kColumnHeader) {
      return false;
    }
    Column next{payload[0],
                payload[1],
                payload[2],
                static_cast<Codec>(payload[3]),
                load<uint32_t>(payload, 4),
                {}};
    size_t encoded_size = load<uint32_t>(payload, 8);
    payload = payload.subspan(kColumnHeader);
    if (encoded_size > payload.size() || column(next.id) != nullptr) {
      return false;
    }
    next.encoded = payload.first(encoded_size);
    payload = payload.subspan(encoded_size);
    columns_.push_back(next);
  }
  return payload.empty();
}

const Column* Reader::column(uint8_t id) const {
  auto found = std::find_if(
      columns_.begin(), columns_.end(), [id](const Column& column) { return column.id == id; });
  return found == columns_.end() ? nullptr : &*found;
}

bool Reader::take_rows(const ChunkHeader& header) {
  switch (header.table) {
    case Table::kMeta:
      return take_meta();
    case Table::kClock:
      return take_group(header, out_.clock, false);
    case Table::kStrings:
      return take_strings(header);
    case Table::kStacks:
      return take_group(header, out_.stacks);
    case Table::kPlaces:
      return take_group(header, out_.places);
    case Table::kLabels:
      return take_group(header, out_.labels);
    case Table::kThreads:
      return take_group(header, out_.threads);
    case Table::kLosses:
      return take_group(header, losses_, false);
    case Table::kEvents:
      return take_group(header, out_.events);
    case Table::kScopeBegins:
      return take_group(header, out_.scope_begins);
    case Table::kScopeEnds:
      return take_group(header, out_.scope_ends);
    case Table::kEnd:
      ended_ = take_group(header, totals_, false);
      return ended_;
  }
  return false;
}

// Whether the chunk's rows can follow those we have, with blank rows in between where some were
// lost.
bool Reader::fits(const ChunkHeader& header, size_t rows_here, size_t bytes_per_row) {
  if (header.first_row < rows_here) {
    return false;
  }
  uint64_t gap = header.first_row - rows_here;
  if (gap > blank_budget_ / bytes_per_row) {
    return false;
  }
  if (gap > 0) {
    blank_budget_ -= gap * bytes_per_row;
    lost_[index_of(header.table)].rows += gap;
    corrupt(std::to_string(gap) + " rows of " + std::string(table_name(header.table)) +
            " are missing from row " + std::to_string(rows_here) + " on");
  }
  return true;
}

template <typename Group>
bool Reader::take_group(const ChunkHeader& header, Group& group, bool numbered) {
  size_t before = rows_in(group);
  size_t first = before;
  if (numbered) {
    if (!fits(header, before, row_bytes(group))) {
      return false;
    }
    first = header.first_row;
    if (first > before) {
      resize(group, first);
      blank(group, before);
    }
  }
  uint8_t id = 0;
  bool good = std::apply([&](auto&... each) { return (decode(++id, header.rows, each) && ...); },
                         columns_of(group));
  if (!good) {
    resize(group, first);
  }
  for (const Column& each : columns_) {
    if (each.id > id) {
      note_once("column " + std::to_string(each.id) + " of " +
                std::string(table_name(header.table)) +
                " was skipped: a newer pytracer wrote it and can read it");
    }
  }
  return good;
}

// Appends a decoded column. Sizes are compared with what the file holds before memory is taken.
template <typename Item>
bool Reader::decode(uint8_t id, size_t rows, std::vector<Item>& column_out) {
  const Column* found = column(id);
  if (found == nullptr || found->width != sizeof(Item) || found->raw_size != rows * sizeof(Item) ||
      found->raw_size > found->encoded.size() * kLz4MaxRatio) {
    return false;
  }
  size_t before = column_out.size();
  column_out.resize(before + rows);
  auto* raw = reinterpret_cast<uint8_t*>(column_out.data() + before);
  return decode_column(
      found->encoded, found->codec, found->width, found->filter, scratch_, {raw, found->raw_size});
}

bool Reader::take_text(uint8_t id, std::string& text) {
  const Column* found = column(id);
  if (found == nullptr || found->width != kBytesWidth || found->filter != kFilterNone ||
      found->raw_size > kMaxColumnBytes || found->raw_size > found->encoded.size() * kLz4MaxRatio) {
    return false;
  }
  text.resize(found->raw_size);
  auto* raw = reinterpret_cast<uint8_t*>(text.data());
  return decode_column(
      found->encoded, found->codec, 1, kFilterNone, scratch_, {raw, found->raw_size});
}

bool Reader::take_meta() {
  std::string meta;
  if (!take_text(1, meta)) {
    return false;
  }
  out_.meta = std::move(meta);
  return true;
}

bool Reader::take_strings(const ChunkHeader& header) {
  // Stored, not compressed: 4 bytes of file for each string object that we make.
  const Column* stored = column(1);
  std::vector<uint32_t> lengths;
  std::string text;
  if (stored == nullptr || stored->codec != Codec::kStored || !decode(1, header.rows, lengths) ||
      !take_text(2, text) || !fits(header, out_.strings.size(), sizeof(std::string))) {
    return false;
  }
  uint64_t total = 0;
  for (uint32_t length : lengths) {
    total += length;
  }
  if (total != text.size()) {
    return false;
  }
  out_.strings.resize(header.first_row);
  size_t at = 0;
  for (uint32_t length : lengths) {
    out_.strings.emplace_back(text, at, length);
    at += length;
  }
  return true;
}

size_t Reader::rows_read(size_t table) {
  switch (static_cast<Table>(table)) {
    case Table::kMeta:
      return out_.meta.empty() ? 0 : 1;
    case Table::kClock:
      return rows_in(out_.clock);
    case Table::kStrings:
      return out_.strings.size();
    case Table::kStacks:
      return rows_in(out_.stacks);
    case Table::kPlaces:
      return rows_in(out_.places);
    case Table::kLabels:
      return rows_in(out_.labels);
    case Table::kThreads:
      return rows_in(out_.threads);
    case Table::kLosses:
      return rows_in(losses_);
    case Table::kEvents:
      return rows_in(out_.events);
    case Table::kScopeBegins:
      return rows_in(out_.scope_begins);
    case Table::kScopeEnds:
      return rows_in(out_.scope_ends);
    case Table::kEnd:
      break;
  }
  return 0;
}

// What the file says it held, against what we have.
void Reader::check_totals() {
  for (size_t i = 0; i < rows_in(totals_); ++i) {
    if (size_t table = totals_.table[i]; table > 0 && table < index_of(Table::kEnd)) {
      expected_[table] = std::max(expected_[table], totals_.rows[i]);
    }
  }
  bool missing = false;
  for (size_t table = 1; table < index_of(Table::kEnd); ++table) {
    ReadReport::Lost& lost = lost_[table];
    lost.table = kTableNames[table];
    size_t here = rows_read(table);
    lost.rows += expected_[table] - std::min<uint64_t>(expected_[table], here);
    if (lost.rows > 0 || lost.chunks > 0) {
      missing = true;
      note_once(lost.table + ": " + std::to_string(lost.rows) + " rows are lost");
      report_.lost.push_back(lost);
    }
  }
  if (report_.status != ReadReport::Status::kCorrupt) {
    if (!ended_) {
      report_.status = ReadReport::Status::kTruncated;
      note_once("the recording was not finished: its end is missing");
    } else if (missing) {
      report_.status = ReadReport::Status::kCorrupt;
    }
  }
}

void Reader::repair_text() {
  size_t repaired = make_utf8(out_.meta) ? 1 : 0;
  for (std::string& text : out_.strings) {
    repaired += make_utf8(text);
  }
  if (repaired > 0) {
    note_once(std::to_string(repaired) + " texts were not UTF-8 and were repaired");
  }
}

// Reference 0 must lead somewhere, in an empty trace too.
void Reader::add_first_rows() {
  out_.strings.resize(std::max<size_t>(out_.strings.size(), 1));
  resize(out_.stacks, std::max<size_t>(rows_in(out_.stacks), 1));
  resize(out_.places, std::max<size_t>(rows_in(out_.places), 1));
  resize(out_.labels, std::max<size_t>(rows_in(out_.labels), 1));
  resize(out_.threads, std::max<size_t>(rows_in(out_.threads), 1));
}

template <typename Item>
void Reader::clamp(std::vector<Item>& ids, size_t limit, std::string_view what) {
  size_t outside = 0;
  for (Item& id : ids) {
    if (id >= limit) {
      id = 0;
      ++outside;
    }
  }
  note_count(outside, what);
}

// Parents come before their children: so no chain of them can be a circle.
template <typename Item>
void Reader::clamp_to_earlier(std::vector<Item>& ids, size_t first_number, std::string_view what) {
  size_t outside = 0;
  for (size_t row = 0; row < ids.size(); ++row) {
    if (ids[row] >= row + first_number && ids[row] != 0) {
      ids[row] = 0;
      ++outside;
    }
  }
  note_count(outside, what);
}

void Reader::note_count(size_t outside, std::string_view what) {
  if (outside > 0) {
    note_once(std::to_string(outside) + " rows refer to " + std::string(what) +
              " that is not there: set to none");
  }
}

void Reader::check_references() {
  size_t strings = out_.strings.size();
  clamp_to_earlier(out_.stacks.parent, 0, "a calling frame");
  clamp(out_.stacks.file, strings, "a file name");
  clamp(out_.stacks.function, strings, "a function name");
  clamp(out_.labels.role, strings, "a role");
  clamp(out_.labels.name, strings, "a label's name");
  clamp(out_.labels.shape, strings, "a shape");
  clamp(out_.labels.dtype, strings, "a dtype");
  clamp(out_.threads.name, strings, "a thread's name");
  clamp(losses_.name, strings, "a loss counter's name");

  auto& begins = out_.scope_begins;
  clamp_to_earlier(begins.parent, 1, "a parent scope");
  clamp_to_earlier(begins.forward, 1, "a forward scope");
  clamp(begins.name, strings, "a scope's name");
  clamp(begins.thread, rows_in(out_.threads), "a thread");
  check_kinds();
  clamp(out_.scope_ends.scope, rows_in(begins) + 1, "an ended scope");
  clamp(out_.scope_ends.stack, rows_in(out_.stacks), "a stack");

  auto& events = out_.events;
  clamp(events.scope, rows_in(begins) + 1, "an event's scope");
  clamp(events.place, rows_in(out_.places), "a place");
  clamp(events.thread, rows_in(out_.threads), "an event's thread");
  check_actions();
}

void Reader::check_kinds() {
  size_t unknown = 0;
  for (uint8_t& kind : out_.scope_begins.kind) {
    if (kind >= kScopeKinds) {
      kind = static_cast<uint8_t>(ScopeKind::kUser);
      ++unknown;
    }
  }
  if (unknown > 0) {
    note_once(std::to_string(unknown) + " scopes are of an unknown kind: read as user scopes");
  }
}

// An unknown action becomes a blank row: events are known by their positions, so none may go.
void Reader::check_actions() {
  size_t unknown = 0;
  size_t labels = rows_in(out_.labels);
  size_t unlabelled = 0;
  auto& events = out_.events;
  for (size_t i = 0; i < events.action.size(); ++i) {
    if (events.action[i] >= kActions) {
      events.action[i] = static_cast<uint8_t>(Action::kLabel);
      events.address[i] = 0;
      events.bytes[i] = 0;
      ++unknown;
    } else if (events.action[i] == static_cast<uint8_t>(Action::kLabel) &&
               events.bytes[i] >= labels) {
      events.bytes[i] = 0;
      ++unlabelled;
    }
  }
  note_count(unlabelled, "a label");
  if (unknown > 0) {
    note_once(std::to_string(unknown) + " events are of an unknown kind and were blanked");
  }
}

// A later count replaces an earlier one of the same name.
void Reader::fold_losses() {
  std::unordered_map<uint32_t, size_t> rows;
  for (size_t i = 0; i < losses_.name.size(); ++i) {
    auto [found, is_new] = rows.try_emplace(losses_.name[i], out_.losses.size());
    if (is_new) {
      out_.losses.emplace_back(out_.strings[losses_.name[i]], 0);
    }
    out_.losses[found->second].second = losses_.count[i];
  }
}

FileError read_error(const std::string& path, int error) {
  using Kind = FileError::Kind;
  std::string reason = std::generic_category().message(error);
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return {Kind::kMissing, path, "there is no such file", "see whether the path is right"};
    case EACCES:
    case EPERM:
      return {Kind::kUnreadable,
              path,
              "may not be read (" + reason + ")",
              "ask its owner for permission to read it"};
    default:
      return {Kind::kIo, path, "reading failed (" + reason + ")", "see whether the disk is well"};
  }
}

// Closes on every way out.
struct Descriptor {
  explicit Descriptor(int number) : fd(number) {}

  ~Descriptor() {
    if (fd >= 0) {
      ::close(fd);
    }
  }

  Descriptor(const Descriptor&) = delete;  // closes once
  Descriptor& operator=(const Descriptor&) = delete;
  int fd;
};

// What the file holds now; a recording that goes on may grow it meanwhile.
size_t checked_size(const Descriptor& file, const std::string& path) {
  using Kind = FileError::Kind;
  struct stat status;
  if (::fstat(file.fd, &status) != 0) {
    throw read_error(path, errno);
  }
  if (S_ISDIR(status.st_mode)) {
    throw FileError(Kind::kDirectory, path, "this is a directory", "name a trace inside it");
  }
  if (!S_ISREG(status.st_mode)) {
    throw FileError(Kind::kNotAFile, path, "this is not a regular file", "copy it into one first");
  }
  return static_cast<size_t>(status.st_size);
}

}  // namespace

std::vector<Place> to_places(const Recording::Places& columns) {
  std::vector<Place> places;
  for (size_t i = 0; i < columns.stream.size(); ++i) {
    places.push_back({columns.stream[i],
                      columns.pool_high[i],
                      columns.pool_low[i],
                      static_cast<DeviceType>(columns.device_type[i]),
                      columns.device_index[i]});
  }
  return places;
}

Recording read_recording(std::span<const uint8_t> bytes,
                         ReadReport& report,
                         const std::string& name) {
  return Reader(bytes, report, name).read();
}

Recording read_recording(const std::string& path, ReadReport& report) {
  // Without O_NONBLOCK opening a pipe would wait for a writer.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd < 0) {
    throw read_error(path, errno);
  }
  size_t size = checked_size(file, path);
  auto bytes = std::make_unique_for_overwrite<uint8_t[]>(size);
  size_t done = 0;
  while (done < size) {
    ssize_t got = ::read(file.fd, bytes.get() + done, size - done);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      throw read_error(path, errno);
    }
    if (got == 0) {
      break;
    }
    done += static_cast<size_t>(got);
  }
  return read_recording(std::span(bytes.get(), done), report, path);
}

}  // namespace pytracer
