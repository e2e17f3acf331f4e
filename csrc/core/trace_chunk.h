// One chunk of a trace: its header and its decoded columns. Both readers use it: the reader of
// whole files, and the one that follows a growing file.
#pragma once

#include "codec.h"
#include "trace_format.h"
#include "trace_source.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace pytracer {

struct FileVersion {
  uint16_t major;
  uint16_t minor;
};

// Reads the file's version of the format. Throws FileError if the file is no readable trace.
FileVersion version_of(Source& source);

struct ChunkHeader {
  Table table;
  uint8_t columns;
  uint8_t flags;
  uint32_t rows;
  uint64_t first_row;
  uint32_t payload_size;
  uint32_t payload_crc;
  uint32_t own_crc;
};

// The header at the start of these bytes, if it is sound.
std::optional<ChunkHeader> header_of(std::span<const uint8_t> bytes);

struct EncodedBytes {
  uint8_t id;
  uint8_t width;
  uint8_t filter;
  Codec codec;
  size_t raw_size;
  std::span<const uint8_t> encoded;
};

// The rows need `needed` bytes of memory, which is more than `limit`.
FileError too_large(const std::string& path, uint64_t needed, uint64_t limit);

// The columns of the current chunk. They point into the payload, which must outlive them.
class ChunkColumns {
 public:
  // False if the payload does not match its header.
  bool parse(const ChunkHeader& header, std::span<const uint8_t> payload);

  const EncodedBytes* find(uint8_t id) const;

  const std::vector<EncodedBytes>& all() const { return columns_; }

  // The memory that the chunk's rows take when they are decoded.
  uint64_t memory(const ChunkHeader& header) const;

  // Appends a decoded column. Checks sizes against the file's before it takes memory.
  template <typename Item>
  bool decode(uint8_t id, size_t rows, std::vector<Item>& out) {
    const EncodedBytes* found = find(id);
    if (found == nullptr || found->width != sizeof(Item) ||
        found->raw_size != rows * sizeof(Item) ||
        found->raw_size > found->encoded.size() * kLz4MaxRatio) {
      return false;
    }
    size_t before = out.size();
    out.resize(before + rows);
    auto* raw = reinterpret_cast<uint8_t*>(out.data() + before);
    return decode_column(found->encoded,
                         found->codec,
                         found->width,
                         found->filter,
                         scratch_,
                         {raw, found->raw_size});
  }

  // Appends rows to all columns of a table, in the order of their ids.
  template <class Table>
  bool decode_group(size_t rows, Table& table) {
    uint8_t id = 0;
    bool good = true;
    Table::each_column(
        [&](const auto& schema, auto& column) {
          if (find(++id) == nullptr && schema.presence == kMayBeMissing) {
            column.resize(column.size() + rows);
          } else {
            good = good && decode(id, rows, column);
          }
        },
        table);
    return good;
  }

  // A column that is one text.
  bool decode_text(uint8_t id, std::string& text);

  // Appends the rows of the string table.
  bool decode_strings(size_t rows, std::vector<std::string>& strings);

 private:
  std::vector<EncodedBytes> columns_;
  std::vector<uint8_t> scratch_;
};

}  // namespace pytracer
