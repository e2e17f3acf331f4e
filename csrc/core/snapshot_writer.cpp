#include "snapshot_writer.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace pytracer {
namespace {

constexpr uint32_t kNotYet = UINT32_MAX;
constexpr size_t kBatch = 1000;  // entries between a MARK and its APPENDS, as Python does it

// The pickle's instructions for plain data.
enum Code : char {
  kMark = '(',
  kEmptyDict = '}',
  kEmptyList = ']',
  kSetItems = 'u',
  kAppends = 'e',
  kTuple2 = '\x86',
  kOneByte = 'K',
  kTwoBytes = 'M',
  kFourBytes = 'J',
  kLong = '\x8a',
  kShortText = '\x8c',
  kText = 'X',
  kMemoize = '\x94',
  kGet = 'h',
  kLongGet = 'j',
};

constexpr std::array<std::string_view, 11> kActionNames = {"alloc",
                                                           "free_requested",
                                                           "free_completed",
                                                           "segment_alloc",
                                                           "segment_free",
                                                           "segment_map",
                                                           "segment_unmap",
                                                           "snapshot",
                                                           "seed",
                                                           "seed_segment",
                                                           "oom"};

void little_endian(uint64_t value, size_t bytes, std::string& out) {
  for (size_t i = 0; i < bytes; ++i) {
    out.push_back(static_cast<char>(value >> (8 * i)));
  }
}

void integer(int64_t value, std::string& out) {
  if (value >= 0 && value < 256) {
    out.push_back(kOneByte);
    little_endian(static_cast<uint64_t>(value), 1, out);
  } else if (value >= 0 && value < 65536) {
    out.push_back(kTwoBytes);
    little_endian(static_cast<uint64_t>(value), 2, out);
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    out.push_back(kFourBytes);
    little_endian(static_cast<uint64_t>(value), 4, out);
  } else {
    out.push_back(kLong);
    little_endian(8, 1, out);
    little_endian(static_cast<uint64_t>(value), 8, out);
  }
}

// 2^63 or more takes a ninth byte, or it would be negative.
void integer(uint64_t value, std::string& out) {
  if (value <= INT64_MAX) {
    integer(static_cast<int64_t>(value), out);
    return;
  }
  out.push_back(kLong);
  little_endian(9, 1, out);
  little_endian(value, 8, out);
  little_endian(0, 1, out);
}

template <typename Values>
auto at(const Values& values, size_t row) {
  if (row >= values.size()) {
    throw std::out_of_range("a snapshot's entry speaks of a row that is not there");
  }
  return values[row];
}

}  // namespace

SnapshotWriter::SnapshotWriter(std::vector<SnapshotWords> words, uint32_t memo)
    : words_(std::move(words)), frames_memo_(words_.size(), kNotYet), memo_(memo) {}

// Writes the number of a value that was written before; gives a new value the next number.
bool SnapshotWriter::recall(uint32_t& memo, std::string& out) {
  if (memo == kNotYet) {
    memo = memo_++;
    return false;
  }
  out.push_back(memo < 256 ? kGet : kLongGet);
  little_endian(memo, memo < 256 ? 1 : 4, out);
  return true;
}

void SnapshotWriter::text(std::string_view value, std::string& out) {
  auto [found, is_new] = texts_.try_emplace(value, kNotYet);
  if (recall(found->second, out)) {
    return;
  }
  bool is_short = value.size() < 256;
  out.push_back(is_short ? kShortText : kText);
  little_endian(value.size(), is_short ? 1 : 4, out);
  out.append(value);
  out.push_back(kMemoize);
}

void SnapshotWriter::frames(size_t words, std::string& out) {
  if (recall(frames_memo_[words], out)) {
    return;
  }
  out.push_back(kEmptyList);
  out.push_back(kMemoize);
  out.push_back(kMark);
  for (const SnapshotFrame& frame : words_[words].frames) {
    out.push_back(kEmptyDict);
    out.push_back(kMark);
    text("name", out);
    text(frame.name, out);
    text("filename", out);
    text(frame.file, out);
    text("line", out);
    integer(int64_t{frame.line}, out);
    out.push_back(kSetItems);
  }
  out.push_back(kAppends);
}

void SnapshotWriter::entry(Action action, size_t row, int64_t time_us, std::string& out) {
  bool is_block = action <= Action::kFreeCompleted;
  const SnapshotDevice::Rows& rows = is_block ? device_.blocks : device_.events;
  size_t place = at(rows.place, row);
  out.push_back(kEmptyDict);
  out.push_back(kMark);
  text("action", out);
  text(at(kActionNames, static_cast<size_t>(action)), out);
  text(action == Action::kOom ? "device_free" : "addr", out);
  integer(at(rows.address, row), out);
  text("size", out);
  integer(at(rows.bytes, row), out);
  text("stream", out);
  integer(at(device_.places.stream, place), out);
  text("time_us", out);
  integer(time_us, out);
  text("compile_context", out);
  text("N/A", out);
  text("pool_id", out);
  integer(at(device_.places.pool_high, place), out);
  integer(at(device_.places.pool_low, place), out);
  out.push_back(kTuple2);
  text("user_metadata", out);
  if (action == Action::kAlloc) {
    size_t number = at(device_.words, row);
    const SnapshotWords& words = words_.at(number);
    text(words.text, out);
    text("category", out);
    text(words.category, out);
    text("pytracer", out);
    text(words.label, out);
    text("frames", out);
    frames(number, out);
  } else {
    text("", out);
    text("frames", out);
    out.push_back(kEmptyList);
  }
  out.push_back(kSetItems);
}

// Torch's viewer breaks if there are categories without "unknown" among them.
void SnapshotWriter::last_entry(std::string& out) {
  out.push_back(kEmptyDict);
  out.push_back(kMark);
  text("action", out);
  text("snapshot", out);
  for (std::string_view name : {"addr", "size", "stream"}) {
    text(name, out);
    integer(int64_t{0}, out);
  }
  text("frames", out);
  out.push_back(kEmptyList);
  text("time_us", out);
  integer(last_us_, out);
  text("category", out);
  text("unknown", out);
  out.push_back(kSetItems);
}

void SnapshotWriter::begin(std::string& out) {
  out.push_back(kEmptyList);
  out.push_back(kMark);
}

void SnapshotWriter::begin_device(const SnapshotDevice& device, std::string& out) {
  device_ = device;
  last_us_ = 0;
  out.push_back(kEmptyList);
}

void SnapshotWriter::entries(const SnapshotEntries& some, std::string& out) {
  size_t count = some.action.size();
  if (some.row.size() != count || some.time_us.size() != count) {
    throw std::invalid_argument("the columns of a snapshot's entries differ in length");
  }
  for (size_t begin = 0; begin < count; begin += kBatch) {
    out.push_back(kMark);
    for (size_t i = begin; i < std::min(begin + kBatch, count); ++i) {
      entry(static_cast<Action>(some.action[i]), some.row[i], some.time_us[i], out);
    }
    out.push_back(kAppends);
  }
  last_us_ = count == 0 ? last_us_ : some.time_us.back();
}

void SnapshotWriter::end_device(std::string& out) {
  out.push_back(kMark);
  last_entry(out);
  out.push_back(kAppends);
}

void SnapshotWriter::end(std::string& out) {
  out.push_back(kAppends);
}

}  // namespace pytracer
