#include "codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace pytracer {
namespace {

static_assert(std::endian::native == std::endian::little, "columns are stored as they lie");

// --- LZ4 blocks ---------------------------------------------------------------------------
// A block is a series of sequences: a token (high nibble: how many literals, low nibble: match
// length - 4; 15 means "more bytes follow, each adding up to 255"), the literals, and a match:
// two bytes of distance back. The last sequence has literals only.

constexpr size_t kMinMatch = 4;
constexpr size_t kLastLiterals = 5;  // the block's last 5 bytes are literals, says the format,
constexpr size_t kMatchLimit = 12;   // and no match starts in its last 12
constexpr size_t kMaxDistance = 65535;
constexpr int kHashBits = 12;  // 16 KiB of positions: fits the first-level cache beside the data

uint32_t load32(const uint8_t* at) {
  uint32_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

uint64_t load64(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// A hash of five bytes, though a match needs only four: columns have few distinct bytes, so the
// last place with the same four is seldom the start of a long match. Reads 8 bytes.
uint32_t hash_of(const uint8_t* at) {
  constexpr uint64_t kPrime = 0x9E3779B97F4A7C15u;
  return static_cast<uint32_t>(((load64(at) << 24) * kPrime) >> (64 - kHashBits));
}

// How many bytes are equal from `a` and `b` on; `b` stops at `end`.
size_t common_length(const uint8_t* a, const uint8_t* b, const uint8_t* end) {
  const uint8_t* start = b;
  while (b + 8 <= end) {
    if (uint64_t differ = load64(a) ^ load64(b)) {
      return static_cast<size_t>(b - start) + static_cast<size_t>(std::countr_zero(differ) / 8);
    }
    a += 8;
    b += 8;
  }
  while (b < end && *a == *b) {
    ++a;
    ++b;
  }
  return static_cast<size_t>(b - start);
}

uint8_t* write_length(uint8_t* out, size_t rest) {
  size_t full = rest / 255;
  std::memset(out, 255, full);
  out[full] = static_cast<uint8_t>(rest % 255);
  return out + full + 1;
}

// Writes a token and its literals. `match` is the match's length, 0 for the last sequence.
uint8_t* write_literals(uint8_t* out, const uint8_t* from, size_t literals, size_t match) {
  size_t extra = match == 0 ? 0 : match - kMinMatch;
  *out++ = static_cast<uint8_t>(std::min<size_t>(literals, 15) << 4 | std::min<size_t>(extra, 15));
  if (literals >= 15) {
    out = write_length(out, literals - 15);
  }
  if (literals > 0) {
    std::memcpy(out, from, literals);
  }
  return out + literals;
}

uint8_t* write_match(uint8_t* out, size_t distance, size_t match) {
  *out++ = static_cast<uint8_t>(distance);
  *out++ = static_cast<uint8_t>(distance >> 8);
  return match - kMinMatch >= 15 ? write_length(out, match - kMinMatch - 15) : out;
}

// Adds up a length's extra bytes. False if they run out or pass the limit.
bool read_length(const uint8_t*& in, const uint8_t* end, size_t limit, size_t& length) {
  uint8_t byte;
  do {
    if (in == end) {
      return false;
    }
    byte = *in++;
    length += byte;
    if (length > limit) {
      return false;
    }
  } while (byte == 255);
  return true;
}

void copy_match(uint8_t* out, size_t distance, size_t length) {
  if (distance == 1) {
    std::memset(out, out[-1], length);
    return;
  }
  // A match may overlap its own output and repeat it. The output is then a repetition too, so the
  // part that can be copied at once doubles each time.
  const uint8_t* from = out - distance;
  while (length > distance) {
    std::memcpy(out, from, distance);
    out += distance;
    length -= distance;
    distance *= 2;
  }
  std::memcpy(out, from, length);
}

// --- Filters ------------------------------------------------------------------------------

template <typename Item>
void delta(const uint8_t* in, Item* out, size_t count) {
  constexpr int kSignBit = sizeof(Item) * 8 - 1;
  Item before = 0;
  for (size_t i = 0; i < count; ++i) {
    Item item;
    std::memcpy(&item, in + i * sizeof(Item), sizeof(Item));
    auto change = static_cast<Item>(item - before);
    // Small steps down become small numbers too: 0, -1, 1, -2 are 0, 1, 2, 3.
    out[i] = static_cast<Item>((change << 1) ^ (change >> kSignBit ? ~Item{0} : Item{0}));
    before = item;
  }
}

template <typename Item>
void undo_delta(uint8_t* bytes, size_t count) {
  Item item = 0;
  for (size_t i = 0; i < count; ++i) {
    Item zigzag;
    std::memcpy(&zigzag, bytes + i * sizeof(Item), sizeof(Item));
    auto change = static_cast<Item>((zigzag >> 1) ^ (zigzag & 1 ? ~Item{0} : Item{0}));
    item = static_cast<Item>(item + change);
    std::memcpy(bytes + i * sizeof(Item), &item, sizeof(Item));
  }
}

template <typename Item>
void shuffle(const Item* in, uint8_t* out, size_t count) {
  for (size_t byte = 0; byte < sizeof(Item); ++byte) {
    for (size_t i = 0; i < count; ++i) {
      out[byte * count + i] = static_cast<uint8_t>(in[i] >> (8 * byte));
    }
  }
}

template <typename Item>
void undo_shuffle(const uint8_t* in, uint8_t* out, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    Item item = 0;
    for (size_t byte = 0; byte < sizeof(Item); ++byte) {
      item = static_cast<Item>(item | static_cast<Item>(in[byte * count + i]) << (8 * byte));
    }
    std::memcpy(out + i * sizeof(Item), &item, sizeof(Item));
  }
}

// Applies `filter` to `raw`; the result lies in `scratch`, which has room for it twice.
template <typename Item>
std::span<const uint8_t> apply_filters(std::span<const uint8_t> raw,
                                       uint8_t filter,
                                       std::vector<uint8_t>& scratch) {
  size_t count = raw.size() / sizeof(Item);
  // A vector's storage is aligned for any item.
  auto* items = reinterpret_cast<Item*>(scratch.data());
  if (filter & kFilterDelta) {
    delta<Item>(raw.data(), items, count);
  } else {
    std::memcpy(items, raw.data(), raw.size());
  }
  if (!(filter & kFilterShuffle)) {
    return {scratch.data(), raw.size()};
  }
  uint8_t* planes = scratch.data() + raw.size();
  shuffle<Item>(items, planes, count);
  return {planes, raw.size()};
}

template <typename Item>
void undo_filters(std::span<const uint8_t> filtered, uint8_t filter, std::span<uint8_t> raw) {
  size_t count = raw.size() / sizeof(Item);
  if (filter & kFilterShuffle) {
    undo_shuffle<Item>(filtered.data(), raw.data(), count);
  } else {
    std::memcpy(raw.data(), filtered.data(), raw.size());
  }
  if (filter & kFilterDelta) {
    undo_delta<Item>(raw.data(), count);
  }
}

// --- CRC ----------------------------------------------------------------------------------
// Eight tables: entry [k][b] is the remainder of byte b followed by k zero bytes, so eight bytes
// are taken in one step of independent look-ups.

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
    }
    tables[0][byte] = crc;
  }
  for (size_t zeros = 1; zeros < 8; ++zeros) {
    for (size_t byte = 0; byte < 256; ++byte) {
      uint32_t before = tables[zeros - 1][byte];
      tables[zeros][byte] = before >> 8 ^ tables[0][before & 255];
    }
  }
  return tables;
}

constexpr CrcTables kCrc = make_crc_tables();

}  // namespace

size_t lz4_compress(std::span<const uint8_t> in, std::span<uint8_t> out) {
  if (in.size() > kLz4MaxInput || out.size() < lz4_bound(in.size())) {
    return 0;
  }
  const uint8_t* const begin = in.data();
  const uint8_t* const end = begin + in.size();
  const uint8_t* anchor = begin;  // literals from here on are not written yet
  uint8_t* to = out.data();
  if (in.size() > kMatchLimit) {
    std::array<uint32_t, size_t{1} << kHashBits> positions{};
    const uint8_t* const last_start = end - kMatchLimit;
    const uint8_t* at = begin + 1;  // position 0 is what an empty table points to
    size_t misses = 0;
    while (at <= last_start) {
      uint32_t& slot = positions[hash_of(at)];
      const uint8_t* earlier = begin + slot;
      slot = static_cast<uint32_t>(at - begin);
      if (static_cast<size_t>(at - earlier) > kMaxDistance || load32(earlier) != load32(at)) {
        at += 1 + (misses++ >> 6);  // steps grow for as long as nothing matches
        continue;
      }
      while (at > anchor && earlier > begin && at[-1] == earlier[-1]) {
        --at;
        --earlier;
      }
      size_t match =
          kMinMatch + common_length(earlier + kMinMatch, at + kMinMatch, end - kLastLiterals);
      to = write_literals(to, anchor, static_cast<size_t>(at - anchor), match);
      to = write_match(to, static_cast<size_t>(at - earlier), match);
      at += match;
      anchor = at;
      misses = 0;
      if (at <= last_start) {
        positions[hash_of(at - 2)] = static_cast<uint32_t>(at - 2 - begin);
      }
    }
  }
  to = write_literals(to, anchor, static_cast<size_t>(end - anchor), 0);
  return static_cast<size_t>(to - out.data());
}

bool lz4_decompress(std::span<const uint8_t> in, std::span<uint8_t> out) {
  const uint8_t* from = in.data();
  const uint8_t* const from_end = from + in.size();
  uint8_t* to = out.data();
  uint8_t* const to_end = to + out.size();
  while (from < from_end) {
    uint8_t token = *from++;
    size_t literals = token >> 4;
    if (literals == 15 && !read_length(from, from_end, out.size(), literals)) {
      return false;
    }
    if (literals > static_cast<size_t>(from_end - from) ||
        literals > static_cast<size_t>(to_end - to)) {
      return false;
    }
    if (literals > 0) {
      std::memcpy(to, from, literals);
      from += literals;
      to += literals;
    }
    if (from == from_end) {
      return to == to_end && (token & 15) == 0;
    }
    if (from_end - from < 2) {
      return false;
    }
    size_t distance = from[0] | static_cast<size_t>(from[1]) << 8;
    from += 2;
    size_t match = token & 15;
    if (match == 15 && !read_length(from, from_end, out.size(), match)) {
      return false;
    }
    match += kMinMatch;
    if (distance == 0 || distance > static_cast<size_t>(to - out.data()) ||
        match > static_cast<size_t>(to_end - to)) {
      return false;
    }
    copy_match(to, distance, match);
    to += match;
  }
  return false;  // a block ends after literals, never after a match
}

uint32_t crc32(std::span<const uint8_t> bytes, uint32_t previous) {
  uint32_t crc = ~previous;
  const uint8_t* at = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint32_t low = load32(at) ^ crc;
    uint32_t high = load32(at + 4);
    crc = kCrc[7][low & 255] ^ kCrc[6][low >> 8 & 255] ^ kCrc[5][low >> 16 & 255] ^
          kCrc[4][low >> 24] ^ kCrc[3][high & 255] ^ kCrc[2][high >> 8 & 255] ^
          kCrc[1][high >> 16 & 255] ^ kCrc[0][high >> 24];
  }
  for (; left > 0; --left, ++at) {
    crc = crc >> 8 ^ kCrc[0][(crc ^ *at) & 255];
  }
  return ~crc;
}

EncodedColumn encode_column(std::span<const uint8_t> raw,
                            unsigned width,
                            uint8_t filter,
                            std::vector<uint8_t>& scratch,
                            std::vector<uint8_t>& out) {
  std::span<const uint8_t> filtered = raw;
  if (filter != kFilterNone && !raw.empty()) {
    scratch.resize(std::max(scratch.size(), 2 * raw.size()));
    switch (width) {
      case 1:
        filtered = apply_filters<uint8_t>(raw, filter, scratch);
        break;
      case 2:
        filtered = apply_filters<uint16_t>(raw, filter, scratch);
        break;
      case 4:
        filtered = apply_filters<uint32_t>(raw, filter, scratch);
        break;
      default:
        filtered = apply_filters<uint64_t>(raw, filter, scratch);
        break;
    }
  }
  size_t before = out.size();
  out.resize(before + lz4_bound(filtered.size()));
  size_t size = lz4_compress(filtered, std::span(out).subspan(before));
  Codec codec = Codec::kLz4;
  if (size == 0 || size >= filtered.size()) {
    codec = Codec::kStored;
    size = filtered.size();
    std::copy(filtered.begin(), filtered.end(), out.begin() + static_cast<std::ptrdiff_t>(before));
  }
  out.resize(before + size);
  return {codec, size};
}

bool decode_column(std::span<const uint8_t> encoded,
                   Codec codec,
                   unsigned width,
                   uint8_t filter,
                   std::vector<uint8_t>& scratch,
                   std::span<uint8_t> raw) {
  if (filter > (kFilterDelta | kFilterShuffle)) {
    return false;
  }
  std::span<const uint8_t> filtered = encoded;
  if (codec == Codec::kLz4) {
    std::span<uint8_t> decoded = raw;
    if (filter != kFilterNone) {
      scratch.resize(std::max(scratch.size(), raw.size()));
      decoded = std::span(scratch).first(raw.size());
    }
    if (!lz4_decompress(encoded, decoded)) {
      return false;
    }
    filtered = decoded;
  } else if (codec != Codec::kStored || encoded.size() != raw.size()) {
    return false;
  }
  if (filter == kFilterNone || raw.empty()) {
    if (filtered.data() != raw.data()) {
      std::copy(filtered.begin(), filtered.end(), raw.begin());
    }
    return true;
  }
  switch (width) {
    case 1:
      undo_filters<uint8_t>(filtered, filter, raw);
      return true;
    case 2:
      undo_filters<uint16_t>(filtered, filter, raw);
      return true;
    case 4:
      undo_filters<uint32_t>(filtered, filter, raw);
      return true;
    case 8:
      undo_filters<uint64_t>(filtered, filter, raw);
      return true;
    default:
      return false;
  }
}

}  // namespace pytracer
