#include "codec.h"
#include "trace_file.h"
#include "trace_format.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <memory>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

namespace pytracer {
namespace {

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

struct Totals {
  std::vector<uint16_t> table;
  std::vector<uint64_t> rows;
};

auto columns_of(Totals& t) {
  return std::tie(t.table, t.rows);
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

class Reader {
 public:
  Reader(std::span<const uint8_t> bytes, ReadReport& report, const std::string& name)
      : bytes_(bytes),
        report_(report),
        notes_(report.notes),
        name_(name),
        blank_budget_(bytes.size() * kLz4MaxRatio) {}

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
  void corrupt(const std::string& text);
  size_t rows_read(size_t table);

  std::span<const uint8_t> bytes_;
  ReadReport& report_;
  Notes notes_;
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
};

void Reader::corrupt(const std::string& text) {
  report_.status = ReadReport::Status::kCorrupt;
  notes_.add(text);
}

Recording Reader::read() {
  report_ = {};
  report_.total_bytes = bytes_.size();
  read_file_header();
  reserve_events();
  read_chunks();
  check_totals();
  make_safe(out_, losses_, notes_);
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
    notes_.add(std::to_string(bytes_.size() - at) + " bytes after the trace's end were ignored");
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
    notes_.add(where + "are an unfinished chunk");
  } else {
    corrupt(where + "are damaged");
  }
}

void Reader::take(const ChunkHeader& header, std::span<const uint8_t> payload) {
  std::string name(table_name(header.table));
  if (index_of(header.table) == 0 || index_of(header.table) >= kTables || header.flags != 0) {
    ++report_.skipped_chunks;
    notes_.add("chunks of table " + std::to_string(index_of(header.table)) + ", flags " +
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
      notes_.add("column " + std::to_string(each.id) + " of " +
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
      notes_.add(lost.table + ": " + std::to_string(lost.rows) + " rows are lost");
      report_.lost.push_back(lost);
    }
  }
  if (report_.status != ReadReport::Status::kCorrupt) {
    if (!ended_) {
      report_.status = ReadReport::Status::kTruncated;
      notes_.add("the recording was not finished: its end is missing");
    } else if (missing) {
      report_.status = ReadReport::Status::kCorrupt;
    }
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

std::string_view table_name(Table table) {
  return index_of(table) < kTables ? kTableNames[index_of(table)] : "unknown";
}

std::vector<Place> to_places(const Recording::Places& columns) {
  std::vector<Place> places;
  places.reserve(columns.stream.size());
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

WholeFile read_whole_file(const std::string& path) {
  // Without O_NONBLOCK opening a pipe would wait for a writer.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd < 0) {
    throw read_error(path, errno);
  }
  size_t size = checked_size(file, path);
  WholeFile whole{std::make_unique_for_overwrite<uint8_t[]>(size), 0};
  size_t& done = whole.size;
  while (done < size) {
    ssize_t got = ::read(file.fd, whole.data.get() + done, size - done);
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
  return whole;
}

Recording read_recording(const std::string& path, ReadReport& report) {
  return read_recording(read_whole_file(path).bytes(), report, path);
}

}  // namespace pytracer
