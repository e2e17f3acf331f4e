#include "check.h"
#include "codec.h"

#include <cstring>
#include <numeric>
#include <random>

namespace pytracer {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes compress(const Bytes& raw) {
  Bytes out(lz4_bound(raw.size()));
  out.resize(lz4_compress(raw, out));
  return out;
}

Bytes random_bytes(size_t size, int values, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(size);
  for (uint8_t& byte : bytes) {
    byte = static_cast<uint8_t>(random() % static_cast<uint32_t>(values));
  }
  return bytes;
}

Bytes repeated(std::string_view text, size_t size) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<uint8_t>(text[i % text.size()]);
  }
  return bytes;
}

TEST(lz4_returns_what_was_put_in) {
  for (size_t size : {0, 1, 4, 5, 12, 13, 14, 15, 16, 18, 19, 64, 270, 274, 275, 1000, 70000}) {
    for (int values : {1, 2, 3, 17, 256}) {
      Bytes raw = random_bytes(size, values, static_cast<uint32_t>(size));
      Bytes back(size);
      CHECK(lz4_decompress(compress(raw), back));
      CHECK_EQ(back, raw);
    }
  }
}

TEST(lz4_finds_repetitions_of_every_period) {
  for (size_t period = 1; period < 40; ++period) {
    Bytes raw =
        repeated(std::string_view("abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG", period), 5000);
    Bytes packed = compress(raw);
    CHECK(packed.size() < 100);
    Bytes back(raw.size());
    CHECK(lz4_decompress(packed, back));
    CHECK_EQ(back, raw);
  }
}

TEST(lz4_never_shrinks_beyond_its_ratio) {
  Bytes zeros(1 << 20);
  CHECK(compress(zeros).size() * kLz4MaxRatio >= zeros.size());
}

TEST(lz4_refuses_room_that_may_be_too_small) {
  Bytes raw(100);
  Bytes out(50);
  CHECK_EQ(lz4_compress(raw, out), size_t{0});
}

TEST(lz4_decompress_wants_the_exact_size) {
  Bytes raw = repeated("hello, trace", 500);
  Bytes packed = compress(raw);
  for (size_t size : {size_t{0}, raw.size() - 1, raw.size() + 1}) {
    Bytes back(size);
    CHECK(!lz4_decompress(packed, back));
  }
}

TEST(lz4_decompress_refuses_a_cut_block) {
  Bytes raw = random_bytes(3000, 3, 7);
  Bytes packed = compress(raw);
  Bytes back(raw.size());
  for (size_t size = 0; size < packed.size(); ++size) {
    CHECK(!lz4_decompress(std::span(packed).first(size), back));
  }
}

// Address sanitizer watches the edges.
TEST(lz4_decompress_survives_any_bytes) {
  Bytes raw = random_bytes(400, 3, 1);
  Bytes packed = compress(raw);
  std::mt19937 random(2);
  for (int round = 0; round < 20000; ++round) {
    Bytes damaged = packed;
    for (int i = 0; i < 3; ++i) {
      damaged[random() % damaged.size()] = static_cast<uint8_t>(random());
    }
    Bytes back(random() % 600);
    lz4_decompress(damaged, back);
    Bytes noise = random_bytes(random() % 50, 256, random());
    lz4_decompress(noise, back);
  }
}

TEST(lz4_decompress_refuses_a_distance_before_the_start) {
  Bytes back(20);
  CHECK(!lz4_decompress(Bytes{0x10, 'a', 2, 0, 0x50, 1, 2, 3, 4, 5}, back));
  CHECK(!lz4_decompress(Bytes{0x10, 'a', 0, 0, 0x50, 1, 2, 3, 4, 5}, back));
}

TEST(crc32_is_the_one_of_zlib) {
  std::string_view text = "123456789";
  Bytes bytes(text.begin(), text.end());
  CHECK_EQ(crc32(bytes), 0xCBF43926u);
  CHECK_EQ(crc32({}), 0u);
  uint32_t first = crc32(std::span(bytes).first(4));
  CHECK_EQ(crc32(std::span(bytes).subspan(4), first), 0xCBF43926u);
}

TEST(crc32_of_long_input_equals_the_sum_of_its_parts) {
  Bytes bytes = random_bytes(1000, 256, 3);
  uint32_t crc = 0;
  for (const uint8_t& byte : bytes) {
    crc = crc32({&byte, 1}, crc);
  }
  CHECK_EQ(crc32(bytes), crc);
}

template <typename Item>
Bytes bytes_of(const std::vector<Item>& items) {
  Bytes bytes(items.size() * sizeof(Item));
  if (!items.empty()) {
    std::memcpy(bytes.data(), items.data(), bytes.size());
  }
  return bytes;
}

template <typename Item>
void check_column(const std::vector<Item>& items) {
  Bytes raw = bytes_of(items);
  for (uint8_t filter : {0, 1, 2, 3}) {
    Bytes scratch;
    Bytes out = {1, 2, 3};  // these stay
    EncodedColumn column = encode_column(raw, sizeof(Item), filter, scratch, out);
    CHECK_EQ(out.size(), 3 + column.size);
    CHECK_EQ(out[2], 3);
    CHECK(column.size <= raw.size());
    Bytes back(raw.size());
    std::span<const uint8_t> encoded = std::span(out).subspan(3);
    CHECK(decode_column(encoded, column.codec, sizeof(Item), filter, scratch, back));
    CHECK_EQ(back, raw);
  }
}

template <typename Item>
void check_columns_of() {
  std::mt19937_64 random(5);
  for (size_t size : {0, 1, 2, 7, 8, 9, 1000}) {
    std::vector<Item> noise(size);
    for (Item& item : noise) {
      item = static_cast<Item>(random());
    }
    check_column(noise);
    std::vector<Item> rising(size);
    std::iota(rising.begin(), rising.end(), static_cast<Item>(-5));
    check_column(rising);
    check_column(std::vector<Item>(size, static_cast<Item>(-1)));
  }
}

TEST(columns_of_every_width_and_filter_come_back) {
  check_columns_of<uint8_t>();
  check_columns_of<uint16_t>();
  check_columns_of<uint32_t>();
  check_columns_of<uint64_t>();
}

TEST(rising_numbers_become_small) {
  std::vector<uint64_t> ticks(10000);
  for (size_t i = 0; i < ticks.size(); ++i) {
    ticks[i] = 0x123456789ABC + i * 1000;
  }
  Bytes scratch;
  Bytes out;
  encode_column(bytes_of(ticks), 8, kFilterDelta | kFilterShuffle, scratch, out);
  CHECK(out.size() < 500);
}

TEST(a_column_of_unknown_codec_or_filter_is_refused) {
  Bytes scratch;
  Bytes raw(8);
  CHECK(!decode_column(raw, static_cast<Codec>(2), 1, 0, scratch, raw));
  CHECK(!decode_column(Bytes(8), Codec::kStored, 1, 4, scratch, raw));
  CHECK(!decode_column(Bytes(7), Codec::kStored, 1, 0, scratch, raw));
  CHECK(!decode_column(Bytes(8), Codec::kStored, 3, kFilterDelta, scratch, raw));
}

}  // namespace
}  // namespace pytracer
