// Writes the entries of a memory snapshot of torch as a pickle, a piece at a time: one dict for
// each action of an allocator. pytracer/export/snapshot.py decides what the entries say.
#pragma once

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

// One device. The columns of entries are equally long, and so are those of blocks and of places.
// All must outlive the writer.
struct SnapshotDevice {
  struct Entries {
    std::span<const uint8_t> action;  // Action
    std::span<const uint32_t> row;    // a row of the blocks, or of the events if it is no block's
    std::span<const int64_t> time_us;
  } entries;

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
  SnapshotWriter(std::vector<SnapshotWords> words,
                 std::vector<SnapshotDevice> devices,
                 uint32_t memo);

  // Appends about that many bytes of the list of devices; nothing once it is finished.
  void next(size_t bytes, std::string& out);

 private:
  bool recall(uint32_t& memo, std::string& out);
  void text(std::string_view value, std::string& out);
  void frames(size_t words, std::string& out);
  void entry(const SnapshotDevice& device, size_t i, std::string& out);
  void last_entry(const SnapshotDevice& device, std::string& out);

  std::vector<SnapshotWords> words_;
  std::vector<uint32_t> frames_memo_;  // per words
  std::unordered_map<std::string_view, uint32_t> texts_;
  std::vector<SnapshotDevice> devices_;
  uint32_t memo_;
  size_t device_ = 0;
  size_t at_ = 0;
  bool begun_ = false;
  bool in_device_ = false;
  bool ended_ = false;
};

}  // namespace pytracer
