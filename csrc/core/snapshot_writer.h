// Writes the entries of a memory snapshot of torch as a pickle, a piece at a time: one dict for
// each action of an allocator. pytracer/export/snapshot.py decides what the entries say.
#pragma once

#include "event.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pytracer {

struct SnapshotFrame {
  std::string name;
  std::string file;
  uint32_t line;
};

// An allocation in words; many allocations share one of these.
struct SnapshotWords {
  std::string category;
  std::string text;
  std::string label;  // for pytracer's own reader
  std::vector<SnapshotFrame> frames;
};

// Some entries of a device, in order. The columns are equally long.
struct SnapshotEntries {
  std::span<const uint8_t> action;  // Action
  std::span<const uint32_t> row;    // of the blocks; of the events if the action is not a block's
  std::span<const int64_t> time_us;
};

// The tables of one device that its entries name rows of. They must outlive the writer.
struct SnapshotDevice {
  struct Rows {
    std::span<const uint64_t> address;
    std::span<const uint64_t> bytes;
    std::span<const uint16_t> place;
  };

  Rows blocks;
  Rows events;
  std::span<const uint32_t> words;  // per block

  struct Places {
    std::span<const uint64_t> stream;
    std::span<const uint64_t> pool_high;
    std::span<const uint64_t> pool_low;
  } places;
};

class SnapshotWriter {
 public:
  // `memo`: how many values the pickle's beginning has put into the memo.
  SnapshotWriter(std::vector<SnapshotWords> words, uint32_t memo);

  // The list of devices is: begin, then per device begin_device, any number of entries, and
  // end_device; then end. Each appends to `out`.
  void begin(std::string& out);
  void begin_device(const SnapshotDevice& device, std::string& out);
  void entries(const SnapshotEntries& some, std::string& out);
  void end_device(std::string& out);
  void end(std::string& out);

 private:
  bool recall(uint32_t& memo, std::string& out);
  void text(std::string_view value, std::string& out);
  void frames(size_t words, std::string& out);
  void entry(Action action, size_t row, int64_t time_us, std::string& out);
  void last_entry(std::string& out);

  std::vector<SnapshotWords> words_;
  std::vector<uint32_t> frames_memo_;  // per words
  std::unordered_map<std::string_view, uint32_t> texts_;
  SnapshotDevice device_;
  int64_t last_us_ = 0;
  uint32_t memo_;
};

}  // namespace pytracer
