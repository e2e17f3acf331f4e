// Shared by the writer and the readers of a trace; no other file includes this.
// docs/trace-format.md describes the bytes.
#pragma once

#include "trace_file.h"

#include <cstring>
#include <set>
#include <type_traits>

namespace pytracer {

// Like PNG's: the first byte is no text, and a transfer that rewrites line ends damages the magic.
inline constexpr std::array<uint8_t, 8> kMagic = {0x89, 'P', 'Y', 'T', '\r', '\n', 0x1A, '\n'};
// Where a chunk may begin. Random bytes: a payload holds them by chance once in 2^64 positions.
inline constexpr std::array<uint8_t, 8> kSync = {0xC4, 0x7E, 0x91, 0x0D, 0xF3, 0x5A, 0x0A, 0xE8};
inline constexpr size_t kFileHeader = 16;
inline constexpr size_t kChunkHeader = 36;
inline constexpr size_t kHeaderCrc = 32;  // the checksum's place in the header
inline constexpr size_t kColumnHeader = 12;
inline constexpr unsigned kBytesWidth = 0;  // a column that is one text, not one item per row
inline constexpr uint64_t kMaxRow = uint64_t{1} << 48;
inline constexpr size_t kMaxPayload = size_t{512} << 20;
inline constexpr int kMaxNesting = 64;  // in the meta document

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

using Losses = LossTable<Owned>;
using Flushes = FlushTable<Owned>;
using Totals = TotalTable<Owned>;

// Calls change(column) for each column of a table.
template <class Table, class Change>
void change_columns(Table& table, Change change) {
  Table::each_column([&](const auto&, auto& column) { change(column); }, table);
}

template <class Table>
void resize(Table& table, size_t rows) {
  change_columns(table, [rows](auto& column) { column.resize(rows); });
}

template <class Table>
constexpr size_t row_bytes() {
  size_t bytes = 0;
  Table::each_column(
      [&](const auto& schema) { bytes += sizeof(typename std::decay_t<decltype(schema)>::Item); });
  return bytes;
}

// Replaces bytes that are not UTF-8. Returns whether there were any.
bool make_utf8(std::string& text);

// Notes for people about a file: each sentence once, and not too many.
class Notes {
 public:
  explicit Notes(std::vector<std::string>& out) : out_(out) {}

  void add(const std::string& text) {
    if (out_.size() <= kMost && said_.insert(text).second) {
      out_.push_back(out_.size() < kMost ? text : "more notes were left out");
    }
  }

 private:
  static constexpr size_t kMost = 100;
  std::vector<std::string>& out_;
  std::set<std::string> said_;
};

// Makes Recording's promises true for any file: references lead to rows, texts are UTF-8. Then
// gives the losses their names.
void make_safe(Recording& recording, Losses& losses, Notes& notes);

}  // namespace pytracer
