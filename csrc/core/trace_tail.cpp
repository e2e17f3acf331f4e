#include "trace_tail.h"

namespace pytracer {
namespace {

// A disk of another machine may show a chunk's length before its bytes. When the file has grown by
// this much more, the bytes are there.
constexpr uint64_t kPatience = uint64_t{1} << 20;

}  // namespace

TraceTail::TraceTail(const std::string& path, MemoryLimit limit) : source_(path), limit_(limit) {
  begin();
}

// Reads the file's header as soon as it is there.
bool TraceTail::begin() {
  if (at_ == 0 && source_.size() >= kFileHeader) {
    minor_ = version_of(source_).minor;
    at_ = kFileHeader;
  } else if (at_ == 0 && source_.size() >= kMagic.size()) {
    try {
      version_of(source_);
    } catch (const FileError& error) {
      if (error.kind() != FileError::Kind::kEmpty) {
        throw;
      }
    }
  }
  return at_ > 0;
}

bool TraceTail::advance(size_t most_bytes, const TakeFlush& take) {
  if (source_.look_again() < at_) {
    state_ = State::kReplaced;
  }
  if (state_ != State::kGrowing || !begin()) {
    return false;
  }
  uint64_t until = at_ + most_bytes;
  while (state_ == State::kGrowing && at_ < until) {
    if (!take_chunk(take)) {
      return false;
    }
  }
  return state_ == State::kGrowing && at_ < source_.size();
}

bool TraceTail::take_chunk(const TakeFlush& take) {
  if (source_.size() - at_ < kChunkHeader) {
    return false;
  }
  auto header = header_of(source_.read(at_, kChunkHeader));
  if (!header) {
    return wait_or_give_up();
  }
  uint64_t end = at_ + kChunkHeader + header->payload_size;
  if (end > source_.size()) {
    return false;
  }
  auto payload = source_.read(at_ + kChunkHeader, header->payload_size);
  if (payload.size() != header->payload_size || crc32(payload) != header->payload_crc) {
    return wait_or_give_up();
  }
  bool good = columns_.parse(*header, payload);
  if (good) {
    take_memory(columns_.memory(*header));
    good = decode(*header);
  }
  if (!good) {
    state_ = State::kDamaged;
    return false;
  }
  at_ = end;
  unsound_since_ = 0;
  // Version 1.0 had no flushes; its events came last.
  bool is_end = header->table == Table::kFlushes || header->table == Table::kEnd ||
                (minor_ == 0 && header->table == Table::kEvents);
  if (is_end) {
    take(flush_);
    flush_ = {};
  }
  if (header->table == Table::kEnd) {
    state_ = State::kComplete;
  }
  return true;
}

void TraceTail::take_memory(uint64_t bytes) {
  memory_ += bytes;
  if (memory_ <= limit_.of(0)) {
    return;
  }
  uint64_t most = limit_.of(source_.size_of_data());
  if (memory_ > most) {
    throw too_large(source_.name(), memory_, most);
  }
}

// The bytes are no chunk: not all of it is written yet, or it is damaged.
bool TraceTail::wait_or_give_up() {
  if (unsound_since_ == 0) {
    unsound_since_ = source_.size();
  } else if (source_.size() > unsound_since_ + kPatience) {
    state_ = State::kDamaged;
  }
  return false;
}

template <typename Group>
bool TraceTail::decode_next(const ChunkHeader& header, Group& group) {
  uint64_t& rows = rows_[index_of(header.table)];
  if (header.first_row != rows || !columns_.decode_group(header.rows, group)) {
    return false;
  }
  rows += header.rows;
  return true;
}

bool TraceTail::decode(const ChunkHeader& header) {
  if (header.flags != 0) {
    return true;  // a newer version's chunk: skipped
  }
  switch (header.table) {
    case Table::kMeta:
      return columns_.decode_text(1, flush_.meta);
    case Table::kClock:
      return columns_.decode_group(header.rows, flush_.clock);
    case Table::kStrings: {
      size_t before = flush_.strings.size();
      uint64_t& rows = rows_[index_of(header.table)];
      if (header.first_row != rows || !columns_.decode_strings(header.rows, flush_.strings)) {
        return false;
      }
      rows += header.rows;
      for (size_t i = before; i < flush_.strings.size(); ++i) {
        make_utf8(flush_.strings[i]);
        strings_.push_back(flush_.strings[i]);
      }
      return true;
    }
    case Table::kStacks:
      return decode_next(header, flush_.stacks);
    case Table::kPlaces:
      return decode_next(header, flush_.places);
    case Table::kLabels:
      return decode_next(header, flush_.labels);
    case Table::kThreads:
      return decode_next(header, flush_.threads);
    case Table::kLosses:
      return decode_losses(header);
    case Table::kEvents:
      return decode_next(header, flush_.events);
    case Table::kScopeBegins:
      return decode_next(header, flush_.scope_begins);
    case Table::kScopeEnds:
      return decode_next(header, flush_.scope_ends);
    case Table::kEnd:
    case Table::kFlushes:
      break;
  }
  return true;
}

bool TraceTail::decode_losses(const ChunkHeader& header) {
  Losses losses;
  if (!columns_.decode_group(header.rows, losses)) {
    return false;
  }
  for (size_t i = 0; i < losses.name.size(); ++i) {
    std::string name = losses.name[i] < strings_.size() ? strings_[losses.name[i]] : "unknown";
    flush_.losses.emplace_back(std::move(name), losses.count[i]);
  }
  return true;
}

}  // namespace pytracer
