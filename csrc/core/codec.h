// How a column of numbers becomes few bytes: filters that make it repetitive, then LZ4.
//
// Nothing here trusts its input: every decoder is given the room it may use and never reads or
// writes outside it. Nothing here throws or allocates, except encode_column's output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pytracer {

// The LZ4 block format, as in https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md.
// A block can shrink at most to 1/255: one byte of length stands for at most 255 bytes. Readers
// rely on this to refuse a size that the file could not hold.
inline constexpr size_t kLz4MaxRatio = 255;
inline constexpr size_t kLz4MaxInput = 0x7E000000;  // the format's own limit

// The most bytes that compressing `size` bytes can take.
constexpr size_t lz4_bound(size_t size) {
  return size + size / 255 + 16;
}

// Returns the compressed size, or 0 if `out` is too small (lz4_bound always suffices) or the input
// is larger than kLz4MaxInput.
size_t lz4_compress(std::span<const uint8_t> in, std::span<uint8_t> out);

// True if `in` is one whole block that decodes to exactly out.size() bytes.
bool lz4_decompress(std::span<const uint8_t> in, std::span<uint8_t> out);

// CRC-32 as in zlib, gzip and PNG. Pass an earlier result to continue it.
uint32_t crc32(std::span<const uint8_t> bytes, uint32_t previous = 0);

// Filters are bits, undone in the reverse order. Items are little-endian, `width` bytes each.
enum Filter : uint8_t {
  kFilterNone = 0,
  kFilterDelta = 1,    // zigzag(item - the item before), the first against 0
  kFilterShuffle = 2,  // all first bytes, then all second bytes, ...
};

enum class Codec : uint8_t { kStored = 0, kLz4 = 1 };

struct EncodedColumn {
  Codec codec;
  size_t size;  // bytes appended to the output
};

// Filters `raw` and appends it, compressed where that makes it smaller. `width` is 1, 2, 4 or 8
// and divides raw.size(). `scratch` is only a place to work in: keep it between calls.
EncodedColumn encode_column(std::span<const uint8_t> raw,
                            unsigned width,
                            uint8_t filter,
                            std::vector<uint8_t>& scratch,
                            std::vector<uint8_t>& out);

// The inverse; `raw` has exactly the size of the encoded column. False if the bytes are not such a
// column; `raw` then holds anything.
bool decode_column(std::span<const uint8_t> encoded,
                   Codec codec,
                   unsigned width,
                   uint8_t filter,
                   std::vector<uint8_t>& scratch,
                   std::span<uint8_t> raw);

}  // namespace pytracer
