#include "trace_chunk.h"

#include <algorithm>

namespace pytracer {
namespace {

// What a string costs beside its text, and what each byte of a JSON document can become in Python:
// `[],` is a list.
constexpr uint64_t kStringBytes = 100;
constexpr uint64_t kMetaBytes = 32;

uint64_t mebibytes(uint64_t bytes) {
  return (bytes >> 20) + ((bytes & ((1 << 20) - 1)) != 0 ? 1 : 0);
}

}  // namespace

FileVersion version_of(Source& source) {
  using Kind = FileError::Kind;
  const std::string elsewhere = "name a file that pytracer wrote";
  auto head = source.read(0, kFileHeader);
  size_t known = std::min(head.size(), kMagic.size());
  if (head.empty()) {
    throw FileError(Kind::kEmpty, source.name(), "the file is empty", "record again");
  }
  if (!std::equal(
          kMagic.begin(), kMagic.begin() + static_cast<std::ptrdiff_t>(known), head.begin())) {
    bool ours = known > 4 && std::equal(kMagic.begin(), kMagic.begin() + 4, head.begin());
    if (ours) {
      throw FileError(Kind::kDamaged,
                      source.name(),
                      "line ends were rewritten in this trace",
                      "transfer it again as a binary file");
    }
    throw FileError(Kind::kForeign, source.name(), "this is not a pytracer trace", elsewhere);
  }
  if (head.size() < kFileHeader) {
    throw FileError(Kind::kEmpty,
                    source.name(),
                    "the recording died before anything was written",
                    "record again");
  }
  if (load<uint32_t>(head, 12) != crc32(head.first(12))) {
    throw FileError(Kind::kDamaged,
                    source.name(),
                    "the trace's header is damaged",
                    "use another copy of the file");
  }
  FileVersion version{load<uint16_t>(head, 8), load<uint16_t>(head, 10)};
  if (version.major != kFormatMajor) {
    throw FileError(Kind::kNewer,
                    source.name(),
                    "the trace has format " + std::to_string(version.major) +
                        ", this version reads format " + std::to_string(kFormatMajor),
                    "update pytracer");
  }
  return version;
}

std::optional<ChunkHeader> header_of(std::span<const uint8_t> bytes) {
  if (bytes.size() < kChunkHeader) {
    return std::nullopt;
  }
  auto raw = bytes.first(kChunkHeader);
  if (!std::equal(kSync.begin(), kSync.end(), raw.begin()) ||
      load<uint32_t>(raw, kHeaderCrc) != crc32(raw.first(kHeaderCrc))) {
    return std::nullopt;
  }
  ChunkHeader header{static_cast<Table>(load<uint16_t>(raw, 8)),
                     raw[10],
                     raw[11],
                     load<uint32_t>(raw, 12),
                     load<uint64_t>(raw, 16),
                     load<uint32_t>(raw, 24),
                     load<uint32_t>(raw, 28),
                     load<uint32_t>(raw, kHeaderCrc)};
  if (header.rows > kMaxRowsPerChunk || header.first_row > kMaxRow ||
      header.payload_size > kMaxPayload) {
    return std::nullopt;
  }
  return header;
}

FileError too_large(const std::string& path, uint64_t needed, uint64_t limit) {
  uint64_t gibibytes = (mebibytes(needed) >> 10) + 1;
  return {FileError::Kind::kTooLarge,
          path,
          "its rows take " + std::to_string(mebibytes(needed)) +
              " MiB of memory, and those of a file " + "of this size may take " +
              std::to_string(mebibytes(limit)) + " MiB",
          "if you trust the file, set PYTRACER_READ_LIMIT=" + std::to_string(gibibytes) + "GiB"};
}

bool ChunkColumns::parse(const ChunkHeader& header, std::span<const uint8_t> payload) {
  columns_.clear();
  for (unsigned i = 0; i < header.columns; ++i) {
    if (payload.size() < kColumnHeader) {
      return false;
    }
    EncodedBytes next{payload[0],
                      payload[1],
                      payload[2],
                      static_cast<Codec>(payload[3]),
                      load<uint32_t>(payload, 4),
                      {}};
    size_t encoded_size = load<uint32_t>(payload, 8);
    payload = payload.subspan(kColumnHeader);
    if (encoded_size > payload.size() || find(next.id) != nullptr) {
      return false;
    }
    next.encoded = payload.first(encoded_size);
    payload = payload.subspan(encoded_size);
    columns_.push_back(next);
  }
  return payload.empty();
}

const EncodedBytes* ChunkColumns::find(uint8_t id) const {
  auto found = std::find_if(
      columns_.begin(), columns_.end(), [id](const EncodedBytes& each) { return each.id == id; });
  return found == columns_.end() ? nullptr : &*found;
}

uint64_t ChunkColumns::memory(const ChunkHeader& header) const {
  uint64_t bytes = 0;
  for (const EncodedBytes& each : columns_) {
    bytes += std::min<uint64_t>(each.raw_size, each.encoded.size() * kLz4MaxRatio);
  }
  switch (header.table) {
    case Table::kMeta:
      return kMetaBytes * bytes;
    case Table::kStrings:
      return 2 * bytes + kStringBytes * header.rows;  // Python has them once more
    default:
      return bytes;
  }
}

bool ChunkColumns::decode_text(uint8_t id, std::string& text) {
  const EncodedBytes* found = find(id);
  if (found == nullptr || found->width != kBytesWidth || found->filter != kFilterNone ||
      found->raw_size > kMaxColumnBytes || found->raw_size > found->encoded.size() * kLz4MaxRatio) {
    return false;
  }
  text.resize(found->raw_size);
  auto* raw = reinterpret_cast<uint8_t*>(text.data());
  return decode_column(
      found->encoded, found->codec, 1, kFilterNone, scratch_, {raw, found->raw_size});
}

bool ChunkColumns::decode_strings(size_t rows, std::vector<std::string>& strings) {
  // Stored, not compressed: each string object that we make costs the file 4 bytes.
  const EncodedBytes* stored = find(1);
  std::vector<uint32_t> lengths;
  std::string text;
  if (stored == nullptr || stored->codec != Codec::kStored || !decode(1, rows, lengths) ||
      !decode_text(2, text)) {
    return false;
  }
  uint64_t total = 0;
  for (uint32_t length : lengths) {
    total += length;
  }
  if (total != text.size()) {
    return false;
  }
  size_t at = 0;
  for (uint32_t length : lengths) {
    strings.emplace_back(text, at, length);
    at += length;
  }
  return true;
}

}  // namespace pytracer
