// Small traces made by the real writer, for tests and for the fuzzer's corpus.
#pragma once

#include "codec.h"
#include "trace_file.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace samples {

using Bytes = std::vector<uint8_t>;

// The numbers of docs/trace-format.md, once more: a change of the format must change both.
inline constexpr size_t kFileHeader = 16;
inline constexpr size_t kChunkHeader = 36;
inline constexpr std::array<uint8_t, 8> kSync = {0xC4, 0x7E, 0x91, 0x0D, 0xF3, 0x5A, 0x0A, 0xE8};

template <typename Row>
void add(pytracer::TraceWriter& writer, const std::vector<Row>& rows) {
  writer.add(std::span<const Row>(rows));
}

inline std::vector<pytracer::Event> events(size_t count) {
  std::vector<pytracer::Event> rows;
  for (uint64_t i = 0; i < count; ++i) {
    bool alloc = i % 2 == 0;
    rows.push_back({.ticks = 1000 + i * 37,
                    .address = 0x7F0000000000 + i / 2 % 50 * 4096,
                    .bytes = 512 * (i % 7 + 1),
                    .action = static_cast<uint64_t>(alloc ? pytracer::Action::kAlloc
                                                          : pytracer::Action::kFreeCompleted),
                    .ready = 1,
                    .scope = static_cast<uint32_t>(i % 3),
                    .place = static_cast<uint16_t>(i % 2),
                    .thread = static_cast<uint16_t>(i % 2)});
  }
  return rows;
}

// Every table, a few rows each, and `count` events, in two flushes.
inline void write_all(pytracer::TraceWriter& writer, size_t count) {
  using namespace pytracer;
  writer.set_meta(R"({"title": "old"})");
  add<ClockReading>(writer, {{1000, 1'700'000'000'000'000'000}});
  add<std::string>(writer, {"", "aten::mm", "train.py", "main", "wéight", "lost_alloc"});
  add<StackFrame>(writer, {{}, {0, 2, 3, 10}, {1, 2, 3, 12}});
  add<Place>(writer, {{}, {7, 0, 1, DeviceType::kCuda, 3}});
  add<Label>(writer, {{}, {1, 3, 4, 0, 2}});
  add<NamedThread>(writer, {{0, 0}, {12345, 3}});
  add<NamedCount>(writer, {{5, 1}});
  add<ScopeBegin>(writer,
                  {{1001, 0, 0, 1, 0, ScopeKind::kModule, 0x80},
                   {1002, 1, 1, 2, 1, ScopeKind::kNode, 0x80 | kScopeRecompute}});
  add<ScopeEnd>(writer, {{1010, 2, 1}, {1011, 1, 2}});
  add(writer, events(count));
  writer.end_flush();
  add<ClockReading>(writer, {{5000, 1'700'000'000'000'001'000}});
  add<NamedCount>(writer, {{5, 4}});
  writer.set_meta(R"({"title": "new"})");
  writer.end_flush();
}

inline Bytes trace(size_t count, bool finish = true) {
  Bytes bytes;
  pytracer::TraceWriter writer(&bytes);
  write_all(writer, count);
  if (finish) {
    writer.finish();
  }
  return bytes;
}

template <typename Item>
Item load(const Bytes& bytes, size_t at) {
  Item item;
  std::memcpy(&item, bytes.data() + at, sizeof(item));
  return item;
}

template <typename Item>
void store(Bytes& bytes, size_t at, Item item) {
  std::memcpy(bytes.data() + at, &item, sizeof(item));
}

inline bool is_chunk(const Bytes& bytes, size_t at) {
  return at + kChunkHeader <= bytes.size() &&
         std::memcmp(bytes.data() + at, kSync.data(), kSync.size()) == 0;
}

// The positions of an undamaged trace's chunks.
inline std::vector<size_t> chunks(const Bytes& bytes) {
  std::vector<size_t> found;
  for (size_t at = kFileHeader; is_chunk(bytes, at);
       at += kChunkHeader + load<uint32_t>(bytes, at + 24)) {
    found.push_back(at);
  }
  return found;
}

inline pytracer::Table table_at(const Bytes& bytes, size_t at) {
  return static_cast<pytracer::Table>(load<uint16_t>(bytes, at + 8));
}

// The bytes of the chunk that begins there.
inline Bytes chunk_at(const Bytes& bytes, size_t at) {
  auto begin = bytes.begin() + static_cast<long>(at);
  return {begin, begin + static_cast<long>(kChunkHeader + load<uint32_t>(bytes, at + 24))};
}

inline void insert(Bytes& bytes, size_t at, const Bytes& more) {
  bytes.insert(bytes.begin() + static_cast<long>(at), more.begin(), more.end());
}

inline void take_out(Bytes& bytes, size_t at, size_t size) {
  auto begin = bytes.begin() + static_cast<long>(at);
  bytes.erase(begin, begin + static_cast<long>(size));
}

// The nth chunk of a table.
inline size_t chunk_of(const Bytes& bytes, pytracer::Table table, size_t nth = 0) {
  for (size_t at : chunks(bytes)) {
    if (table_at(bytes, at) == table && nth-- == 0) {
      return at;
    }
  }
  return 0;
}

// Corrects the checksum behind each sync marker, so that the code behind the checks gets tested.
inline void repair_checksums(uint8_t* data, size_t size) {
  using pytracer::crc32;
  std::span bytes(data, size);
  if (size >= kFileHeader) {
    uint32_t crc = crc32(bytes.first(12));
    std::memcpy(data + 12, &crc, sizeof(crc));
  }
  for (size_t at = kFileHeader; at + kChunkHeader <= size; ++at) {
    if (std::memcmp(data + at, kSync.data(), kSync.size()) != 0) {
      continue;
    }
    uint32_t payload;
    std::memcpy(&payload, data + at + 24, sizeof(payload));
    if (payload <= size - at - kChunkHeader) {
      uint32_t crc = crc32(bytes.subspan(at + kChunkHeader, payload));
      std::memcpy(data + at + 28, &crc, sizeof(crc));
    }
    uint32_t crc = crc32(bytes.subspan(at, 32));
    std::memcpy(data + at + 32, &crc, sizeof(crc));
  }
}

inline void repair_checksums(Bytes& bytes) {
  repair_checksums(bytes.data(), bytes.size());
}

}  // namespace samples
