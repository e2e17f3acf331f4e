// How fast the core is on one thread: benchmark [million events]. Not a test: it proves nothing,
// and its numbers mean something only on an idle machine.
#include "codec.h"
#include "lifetimes.h"
#include "samples.h"
#include "trace_file.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

namespace {

using namespace pytracer;

// The best of a few rounds: whatever disturbs can only make it slower.
double seconds(const std::function<void()>& body) {
  double best = 1e9;
  for (int round = 0; round < 3; ++round) {
    auto start = std::chrono::steady_clock::now();
    body();
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::min(best, took.count());
  }
  return best;
}

// Training: steps repeat their sizes and mostly their addresses; times and order vary a little.
// Half of the blocks of a step die at once, half in the backward pass.
std::vector<Event> training(size_t count) {
  constexpr size_t kBlocks = 3000;  // allocations in a step
  std::mt19937_64 random(1);
  std::vector<uint64_t> sizes;
  for (size_t i = 0; i < kBlocks; ++i) {
    sizes.push_back((random() % 64 + 1) << (9 + random() % 12));
  }
  std::vector<Event> rows;
  rows.reserve(count + 2);
  uint64_t ticks = 1'000'000'000;
  uint32_t scope = 1;
  std::vector<std::pair<uint64_t, size_t>> kept;
  std::vector<uint64_t> free_list;
  uint64_t top = 0x7F1200000000;
  auto record = [&](Action action, uint64_t address, uint64_t bytes) {
    ticks += 3000 + random() % 20000;
    rows.push_back({.ticks = ticks,
                    .address = address,
                    .bytes = bytes,
                    .action = static_cast<uint64_t>(action),
                    .ready = 1,
                    .scope = scope,
                    .place = 1,
                    .thread = static_cast<uint16_t>(kept.size() % 2)});
  };
  auto free_block = [&](uint64_t address, size_t i) {
    record(Action::kFreeRequested, address, sizes[i]);
    record(Action::kFreeCompleted, address, sizes[i]);
    free_list.push_back(address);
  };
  while (rows.size() < count) {
    for (size_t i = 0; i < kBlocks && rows.size() < count; ++i) {
      scope += static_cast<uint32_t>(random() % 3);
      uint64_t address = top;
      if (!free_list.empty()) {
        address = free_list.back();
        free_list.pop_back();
      } else {
        top += (sizes[i] + 511) / 512 * 512;
      }
      record(Action::kAlloc, address, sizes[i]);
      if (i % 2 == 0) {
        free_block(address, i);
      } else {
        if (i % 8 == 1) {
          record(Action::kSaved, address, sizes[i]);
        }
        kept.emplace_back(address, i);
      }
    }
    while (!kept.empty()) {
      auto [address, i] = kept.back();
      kept.pop_back();
      scope += static_cast<uint32_t>(random() % 2);
      free_block(address, i);
    }
  }
  rows.resize(count);
  return rows;
}

void bench_codec() {
  std::vector<Event> rows = training(1 << 16);
  samples::Bytes raw(rows.size() * sizeof(Event));
  std::memcpy(raw.data(), rows.data(), raw.size());
  samples::Bytes packed(lz4_bound(raw.size()));
  size_t size = 0;
  double megabytes = static_cast<double>(raw.size()) / 1e6;
  double took = seconds([&] { size = lz4_compress(raw, packed); });
  std::printf("lz4_compress    %7.0f MB/s  to %.2f\n",
              megabytes / took,
              static_cast<double>(size) / static_cast<double>(raw.size()));
  took = seconds([&] { lz4_decompress(std::span(packed).first(size), raw); });
  std::printf("lz4_decompress  %7.0f MB/s\n", megabytes / took);
  uint32_t crc = 0;
  took = seconds([&] { crc += crc32(raw); });
  std::printf("crc32           %7.0f MB/s  (%08x)\n", megabytes / took, crc);
}

void bench_file(const std::vector<Event>& rows) {
  samples::Bytes bytes;
  bytes.reserve(rows.size() * 16);
  double megabytes = static_cast<double>(rows.size() * sizeof(Event)) / 1e6;
  double took = seconds([&] {
    bytes.clear();
    TraceWriter writer(&bytes);
    writer.add(std::span<const Event>(rows));
    writer.finish();
  });
  std::printf("write events    %7.0f MB/s  %.2f bytes per event\n",
              megabytes / took,
              static_cast<double>(bytes.size()) / static_cast<double>(rows.size()));
  took = seconds([&] {
    ReadReport report;
    read_recording(std::span<const uint8_t>(bytes), report);
  });
  std::printf("read events     %7.0f MB/s  %.3f s\n", megabytes / took, took);
}

void bench_lifetimes(const std::vector<Event>& rows, bool inner_label) {
  std::vector<uint64_t> address;
  std::vector<uint64_t> bytes;
  std::vector<uint8_t> action;
  std::vector<uint16_t> place;
  for (const Event& row : rows) {
    address.push_back(row.address);
    bytes.push_back(row.bytes);
    action.push_back(static_cast<uint8_t>(row.action));
    place.push_back(row.place);
  }
  if (inner_label) {
    action[1] = static_cast<uint8_t>(Action::kLabel);
    ++address[1];
  }
  std::vector<Place> places = {{}, {0, 0, 0, DeviceType::kCuda, 0}};
  Lifetimes found;
  double took = seconds([&] { found = match_lifetimes({address, bytes, action, place}, places); });
  std::printf("lifetimes       %7.3f s     %zu allocations%s\n",
              took,
              found.start.size(),
              inner_label ? ", with a label inside a block" : "");
}

}  // namespace

int main(int argc, char** argv) {
  size_t millions = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  std::vector<Event> rows = training(millions * 1'000'000);
  std::printf("%zu million events\n", millions);
  bench_codec();
  bench_file(rows);
  bench_lifetimes(rows, false);
  bench_lifetimes(rows, true);
  return 0;
}
