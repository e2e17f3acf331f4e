#include "trace_chunk.h"
#include "trace_file.h"
#include "trace_format.h"
#include "trace_source.h"

#include <algorithm>
#include <iterator>
#include <new>

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
                                                               "end",
                                                               "flushes"};

// Rows in the place of lost ones. They do not change the meaning of later rows.
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

// A whole chunk, its place, and the memory that its rows take.
struct Chunk {
  ChunkHeader header;
  uint64_t at;
  uint64_t memory = 0;

  uint64_t end() const { return at + kChunkHeader + header.payload_size; }
};

// How deep a JSON document's brackets nest.
int nesting(std::string_view json) {
  int depth = 0;
  int deepest = 0;
  bool in_text = false;
  for (size_t i = 0; i < json.size(); ++i) {
    char byte = json[i];
    if (in_text) {
      i += byte == '\\' ? 1 : 0;
      in_text = byte != '"';
    } else if (byte == '[' || byte == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (byte == ']' || byte == '}') {
      --depth;
    } else {
      in_text = byte == '"';
    }
  }
  return deepest;
}

// Goes through the file twice. The first time it finds the whole chunks, which tell how much of the
// file is trustworthy; the second time it reads them.
class Reader {
 public:
  Reader(Source& source, ReadReport& report, MemoryLimit limit)
      : source_(source),
        report_(report),
        notes_(report.notes),
        name_(source.name()),
        size_of_data_(source.size_of_data()),
        most_memory_(limit.of(size_of_data_)) {}

  Recording read();

 private:
  void read_file_header();
  void find_chunks();
  std::optional<Chunk> chunk_at(uint64_t at);
  bool is_sound(const Chunk& chunk);
  uint64_t find_header(uint64_t from);
  void take_tail(uint64_t at);
  void take_what_follows_the_end(uint64_t at);
  void cut_to_last_flush();
  void reserve_events();
  void take(const Chunk& chunk);
  bool parse(const Chunk& chunk);
  void take_memory(uint64_t bytes);
  bool take_rows(const ChunkHeader& header);
  template <typename Group>
  bool take_group(const ChunkHeader& header, Group& group, bool numbered = true);
  bool take_meta();
  bool take_clock(const ChunkHeader& header);
  bool take_strings(const ChunkHeader& header);
  bool take_flush(const ChunkHeader& header);
  bool fits(const ChunkHeader& header, size_t rows_here, size_t bytes_per_row);
  void cut_after_last_event();
  void check_totals();
  void corrupt(const std::string& text);
  size_t rows_read(size_t table);

  Source& source_;
  ReadReport& report_;
  Notes notes_;
  const std::string& name_;
  std::vector<Chunk> chunks_;
  Recording out_;
  Losses losses_;
  Totals totals_;
  Flushes flushes_;
  uint32_t chain_ = 0;     // over the chunks taken so far
  bool in_flush_ = false;  // a flush has begun
  size_t clock_rows_ = 0;  // with the lost ones, which leave no blank rows
  bool ended_ = false;
  // Blank rows and checksums cost work that the file did not pay for in bytes. The file's size
  // limits both.
  uint64_t blank_budget_ = 0;
  uint64_t checked_ = 0;
  uint64_t size_of_data_;
  uint64_t most_memory_;
  uint64_t memory_ = 0;                       // of all rows, with the blank ones so far
  std::array<uint64_t, kTables> expected_{};  // rows that the headers claim
  std::array<ReadReport::Lost, kTables> lost_{};
  ChunkColumns columns_;  // of the current chunk
};

void Reader::corrupt(const std::string& text) {
  report_.status = ReadReport::Status::kCorrupt;
  notes_.add(text);
}

Recording Reader::read() {
  report_ = {};
  report_.total_bytes = source_.size();
  read_file_header();
  find_chunks();
  cut_to_last_flush();
  uint64_t memory = 0;
  for (const Chunk& chunk : chunks_) {
    memory += chunk.memory;
  }
  take_memory(memory);
  reserve_events();
  for (const Chunk& chunk : chunks_) {
    take(chunk);
  }
  cut_after_last_event();
  check_totals();
  make_safe(out_, losses_, notes_);
  return std::move(out_);
}

void Reader::read_file_header() {
  auto version = version_of(source_);
  report_.major = version.major;
  report_.minor = version.minor;
  report_.good_bytes = kFileHeader;
}

void Reader::find_chunks() {
  uint64_t at = kFileHeader;
  while (at < source_.size()) {
    if (auto chunk = chunk_at(at)) {
      chunks_.push_back(*chunk);
      at = chunk->end();
      if (chunk->header.table == Table::kEnd && chunk->header.flags == 0) {
        take_what_follows_the_end(at);
        return;
      }
      continue;
    }
    uint64_t next = find_header(at + 1);
    if (next == source_.size()) {
      take_tail(at);
      return;
    }
    corrupt(std::to_string(next - at) + " bytes from offset " + std::to_string(at) +
            " on are damaged");
    at = next;
  }
}

// The whole chunk at `at`, if there is one.
std::optional<Chunk> Reader::chunk_at(uint64_t at) {
  auto header = header_of(source_.read(at, kChunkHeader));
  if (!header) {
    return std::nullopt;
  }
  size_t table = index_of(header->table);
  bool counted = table < index_of(Table::kEnd);
  if (counted) {
    expected_[table] = std::max(expected_[table], header->first_row + header->rows);
  }
  Chunk chunk{*header, at};
  if (chunk.end() > source_.size()) {
    return std::nullopt;
  }
  if (is_sound(chunk)) {
    bool known = table > 0 && table < kTables && header->flags == 0;
    chunk.memory = known && parse(chunk) ? columns_.memory(*header) : 0;
    return chunk;
  }
  if (counted) {
    ++lost_[table].chunks;
  }
  return std::nullopt;
}

bool Reader::is_sound(const Chunk& chunk) {
  // A file may consist of headers that all claim the same bytes. To check each claim would take
  // quadratic time.
  checked_ += chunk.header.payload_size;
  if (checked_ > 8 * size_of_data_) {
    return false;
  }
  uint32_t crc = 0;
  for (uint64_t at = chunk.at + kChunkHeader; at < chunk.end();) {
    auto piece = source_.look(at, 1);
    piece = piece.first(std::min<uint64_t>(piece.size(), chunk.end() - at));
    if (piece.empty()) {
      return false;  // the file was cut meanwhile
    }
    crc = crc32(piece, crc);
    at += piece.size();
  }
  return crc == chunk.header.payload_crc;
}

// The place of the next sound header, or the file's end.
uint64_t Reader::find_header(uint64_t from) {
  while ((from = source_.next_data(from)) < source_.size()) {
    auto piece = source_.look(from, kChunkHeader);
    if (piece.size() < kChunkHeader) {
      break;
    }
    auto sync = std::search(piece.begin(), piece.end(), kSync.begin(), kSync.end());
    if (sync == piece.end()) {
      from += piece.size() - (kSync.size() - 1);
      continue;
    }
    from += static_cast<uint64_t>(sync - piece.begin());
    if (header_of(source_.read(from, kChunkHeader))) {
      return from;
    }
    ++from;
  }
  return source_.size();
}

// Decides whether the bytes after the last whole chunk were cut off by a kill or a power cut, or
// are damaged.
void Reader::take_tail(uint64_t at) {
  uint64_t size = source_.size() - at;
  auto header = header_of(source_.read(at, kChunkHeader));
  bool cut = header ? header->payload_size > size - kChunkHeader
                    : size < kChunkHeader || source_.is_zero_from(at);
  std::string where =
      std::to_string(size) + " bytes at the end, from offset " + std::to_string(at) + " on, ";
  if (cut) {
    notes_.add(where + "are an unfinished chunk");
  } else {
    corrupt(where + "are damaged");
  }
}

void Reader::take_what_follows_the_end(uint64_t at) {
  uint64_t size = source_.size() - at;
  if (find_header(at) < source_.size()) {
    corrupt("the trace's end is in the middle of the file: what follows was ignored");
  } else if (size > 0) {
    notes_.add(std::to_string(size) + " bytes after the trace's end were ignored");
  }
}

// Takes a flush as a whole or not at all.
void Reader::cut_to_last_flush() {
  if (report_.minor == 0) {
    return;  // nothing in this version says which chunks belong together
  }
  auto last = std::find_if(chunks_.rbegin(), chunks_.rend(), [](const Chunk& chunk) {
    return chunk.header.table == Table::kFlushes || chunk.header.table == Table::kEnd;
  });
  auto cut = static_cast<size_t>(last - chunks_.rbegin());
  if (cut > 0) {
    chunks_.resize(chunks_.size() - cut);
    notes_.add(std::to_string(cut) + " chunks behind the last whole flush were cut: the rest of " +
               "their own is missing");
  }
}

// Growing a column of millions of rows step by step would move them all again and again.
void Reader::reserve_events() {
  size_t rows = 0;
  for (const Chunk& chunk : chunks_) {
    size_t most = chunk.header.payload_size * kLz4MaxRatio;
    blank_budget_ += most;
    if (chunk.header.table == Table::kEvents) {
      // A chunk may claim more than its bytes can hold.
      rows += std::min<size_t>(chunk.header.rows, most / row_bytes<Recording::Events>());
    }
  }
  rows = std::min<size_t>(rows, memory_ / row_bytes<Recording::Events>());
  change_columns(out_.events, [rows](auto& column) { column.reserve(rows); });
}

bool Reader::parse(const Chunk& chunk) {
  const ChunkHeader& header = chunk.header;
  return columns_.parse(header, source_.read(chunk.at + kChunkHeader, header.payload_size));
}

// Throws if the rows take more than the file may take.
void Reader::take_memory(uint64_t bytes) {
  memory_ += bytes;
  if (memory_ > most_memory_) {
    throw too_large(name_, memory_, most_memory_);
  }
}

void Reader::take(const Chunk& chunk) {
  const ChunkHeader& header = chunk.header;
  size_t table = index_of(header.table);
  if (table == 0 || table >= kTables || header.flags != 0) {
    ++report_.skipped_chunks;
    notes_.add("chunks of table " + std::to_string(table) + ", flags " +
               std::to_string(header.flags) +
               ", were skipped: a newer pytracer wrote them and can read them");
  } else if (!parse(chunk) || !take_rows(header)) {
    ++lost_[table].chunks;
    corrupt("a chunk of " + std::string(table_name(header.table)) + " contradicts itself");
  }
  report_.good_bytes += chunk.end() - chunk.at;
  in_flush_ = header.table != Table::kFlushes;
  chain_ = crc32(std::span(reinterpret_cast<const uint8_t*>(&header.own_crc), 4), chain_);
}

bool Reader::take_rows(const ChunkHeader& header) {
  switch (header.table) {
    case Table::kMeta:
      return take_meta();
    case Table::kClock:
      return take_clock(header);
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
      if (report_.minor > 0 && in_flush_) {
        corrupt("the last chunks before the trace's end belong to no flush");
      }
      return ended_;
    case Table::kFlushes:
      return take_flush(header);
  }
  return false;
}

// Whether the chunk's rows can follow those that we have, with blank rows in the place of lost
// ones.
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
    take_memory(gap * bytes_per_row);
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
    if (!fits(header, before, row_bytes<Group>())) {
      return false;
    }
    first = header.first_row;
    if (first > before) {
      resize(group, first);
      blank(group, before);
    }
  }
  bool good = columns_.decode_group(header.rows, group);
  if (!good) {
    resize(group, first);
  }
  for (const EncodedBytes& each : columns_.all()) {
    if (each.id > Group::kColumns) {
      notes_.add("column " + std::to_string(each.id) + " of " +
                 std::string(table_name(header.table)) +
                 " was skipped: a newer pytracer wrote it and can read it");
    }
  }
  return good;
}

bool Reader::take_meta() {
  std::string meta;
  if (!columns_.decode_text(1, meta) || nesting(meta) > kMaxNesting) {
    return false;
  }
  out_.meta = std::move(meta);
  return true;
}

// A lost reading leaves no blank row: time is the line through the first reading and the last.
bool Reader::take_clock(const ChunkHeader& header) {
  if (!fits(header, clock_rows_, row_bytes<Recording::Clock>()) ||
      !take_group(header, out_.clock, false)) {
    return false;
  }
  clock_rows_ = header.first_row + header.rows;
  return true;
}

// Holds the chain of the chunks before it: other chunks, or the same in another order, do not
// belong to this recording.
bool Reader::take_flush(const ChunkHeader& header) {
  if (header.rows != 1 || !take_group(header, flushes_)) {
    return false;
  }
  if (flushes_.chain.back() != chain_ && report_.status != ReadReport::Status::kCorrupt) {
    corrupt("chunks were taken away, repeated, put in another order or come from another file");
  }
  chain_ = flushes_.chain.back();
  return true;
}

bool Reader::take_strings(const ChunkHeader& header) {
  std::vector<std::string> rows;
  if (!columns_.decode_strings(header.rows, rows) ||
      !fits(header, out_.strings.size(), sizeof(std::string))) {
    return false;
  }
  out_.strings.resize(header.first_row);
  std::move(rows.begin(), rows.end(), std::back_inserter(out_.strings));
  return true;
}

size_t Reader::rows_read(size_t table) {
  switch (static_cast<Table>(table)) {
    case Table::kMeta:
      return out_.meta.empty() ? 0 : 1;
    case Table::kClock:
      return clock_rows_;
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
    case Table::kFlushes:
      return rows_in(flushes_);
    case Table::kEnd:
      break;
  }
  return 0;
}

// Cuts the rows from the first one that is later than that. Returns how many these are.
template <typename Group>
size_t cut_later(Group& group, uint64_t ticks) {
  auto later = std::find_if(
      group.ticks.begin(), group.ticks.end(), [ticks](uint64_t each) { return each > ticks; });
  auto cut = static_cast<size_t>(group.ticks.end() - later);
  resize(group, group.ticks.size() - cut);
  return cut;
}

// Version 1.0 did not say which chunks belong together. Events came last. So a scope that is later
// than the last event may have had events, and would look empty.
void Reader::cut_after_last_event() {
  if (ended_ || report_.minor > 0) {
    return;
  }
  const auto& ticks = out_.events.ticks;
  uint64_t last = ticks.empty() ? 0 : *std::max_element(ticks.begin(), ticks.end());
  size_t cut = cut_later(out_.scope_begins, last) + cut_later(out_.scope_ends, last);
  if (cut > 0) {
    notes_.add(std::to_string(cut) +
               " rows of scopes were cut: they are later than the last event");
  }
}

// Compares the rows that the file claims with those that we have.
void Reader::check_totals() {
  for (size_t i = 0; i < rows_in(totals_); ++i) {
    size_t table = totals_.table[i];
    if (table == 0 || table >= kTables) {
      continue;
    }
    expected_[table] = std::max(expected_[table], totals_.rows[i]);
    if (rows_read(table) > totals_.rows[i]) {
      corrupt("there are more rows of " + std::string(kTableNames[table]) +
              " than the trace's end says");
    }
  }
  bool missing = false;
  for (size_t table = 1; table < kTables; ++table) {
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

Recording read_from(Source& source, ReadReport& report, MemoryLimit limit) {
  try {
    return Reader(source, report, limit).read();
  } catch (const std::bad_alloc&) {
    throw no_memory_for(source.name());
  }
}

}  // namespace

std::string_view table_name(Table table) {
  return index_of(table) < kTables ? kTableNames[index_of(table)] : "unknown";
}

Recording read_recording(std::span<const uint8_t> bytes,
                         ReadReport& report,
                         const std::string& name,
                         MemoryLimit limit) {
  Source source(bytes, name);
  return read_from(source, report, limit);
}

Recording read_recording(const std::string& path, ReadReport& report, MemoryLimit limit) {
  Source source(path);
  return read_from(source, report, limit);
}

}  // namespace pytracer
