// A memory snapshot of torch (torch.cuda.memory._dump_snapshot) as columns. pytracer/snapshot.py
// decides what they mean for a Trace.
//
// A snapshot is a dict. `segments`, with their blocks, are the allocator's memory at the time of
// the snapshot; `device_traces` are its earlier actions, per device. Fields came and went with
// torch's versions: a missing one reads as 0, and an unknown one is left out and counted.
#pragma once

#include "trace_file.h"

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace pytracer {

struct Snapshot {
  struct Entries {
    std::vector<uint32_t> device;
    std::vector<uint8_t> action;    // an Action of an allocator
    std::vector<uint64_t> address;  // of an oom: the device's free bytes
    std::vector<uint64_t> bytes;
    std::vector<uint64_t> stream;
    std::vector<uint64_t> pool_high;
    std::vector<uint64_t> pool_low;
    std::vector<int64_t> time_us;  // since 1970; -1: not recorded
    std::vector<uint32_t> stack;
    std::vector<uint32_t> category;  // rows of strings
    std::vector<uint32_t> metadata;  // from our own export
  };

  struct Segments {
    std::vector<uint32_t> device;
    std::vector<uint64_t> address;
    std::vector<uint64_t> bytes;
    std::vector<uint64_t> allocated;
    std::vector<uint64_t> requested;
    std::vector<uint64_t> stream;
    std::vector<uint64_t> pool_high;
    std::vector<uint64_t> pool_low;
    std::vector<uint8_t> expandable;
  };

  struct Blocks {
    std::vector<uint32_t> segment;
    std::vector<uint64_t> address;
    std::vector<uint64_t> bytes;
    std::vector<uint64_t> requested;
    std::vector<uint8_t> state;  // 0 inactive, 1 allocated, 2 freed but still in use
    std::vector<uint32_t> stack;
  };

  struct Annotations {
    std::vector<uint32_t> device;
    std::vector<int64_t> time_us;
    std::vector<uint32_t> name;   // rows of strings
    std::vector<uint32_t> stage;  // START, END
  };

  std::vector<std::string> strings;  // valid UTF-8; row 0 is empty
  Recording::Stacks stacks;
  Entries entries;  // device by device, each in the order in which things happened
  Segments segments;
  Blocks blocks;
  Annotations annotations;
  uint32_t devices = 0;  // how many traces there are
  std::vector<std::pair<std::string, std::string>> settings;
  std::string pytracer;                                  // from our own export: a JSON document
  std::vector<std::pair<std::string, uint64_t>> losses;  // counts of unreadable things, by name
};

// Throws FileError if the file is no pickle, no snapshot, wants to run code, or is cut short.
Snapshot read_snapshot(const std::string& path);
Snapshot read_snapshot(std::span<const uint8_t> bytes, const std::string& name = "<memory>");

}  // namespace pytracer
