// Makes allocations of events: finds the alloc, free and labels of each block.
//
// An allocation is one life of a block. Addresses are reused, so an allocation has a number: seeds
// (blocks that were alive before) come first, in row order, then the others in the order of their
// allocs.
//
// The rules, one test each; tests/lifetimes_reference.py has them in slow Python:
//   - A device whose log holds a kSnapshot starts there. Its earlier rows are ignored and counted
//     (before_snapshot); the seeds after it describe what was alive at the snapshot.
//   - A device without one starts at its first row.
//   - A seed is a block that was alive before if nothing happened at its address before the seed's
//     row. After a snapshot, which is the seeds' instant, it also is if the first event there was a
//     free.
//   - Any other seed found the block that lives there by then, and is ignored (duplicate_seeds). If
//     none lives there, on a device without a snapshot, its alloc was missed: it begins at the
//     seed.
//   - An alloc where a block still lives ends that block, unseen (implicit_frees).
//   - kFreeRequested ends the program's use, kFreeCompleted makes the bytes reusable. A block
//     that is only completed (the CPU) ends there. In between it can still be labelled.
//   - Labels and saves find the block that starts at their address; failing that, the live block
//     with the nearest start below, if it reaches that far.
//   - A row that finds no block is counted by name. Nothing is guessed. On a device without a
//     snapshot (the CPU), such a free is no surprise: the blocks from before are not known.
#pragma once

#include "event.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace pytracer {

// Views of equally long columns, from a Recording or from numpy. Positions are row numbers.
struct EventColumns {
  std::span<const uint64_t> address;
  std::span<const uint64_t> bytes;
  std::span<const uint8_t> action;
  std::span<const uint16_t> place;
};

struct LifetimeCounters {
  uint64_t before_snapshot = 0;          // rows of a device before its snapshot; not a loss
  uint64_t repeated_snapshots = 0;       // a device's second and later snapshots, ignored
  uint64_t duplicate_seeds = 0;          // seeds of blocks that are known already; not a loss
  uint64_t implicit_frees = 0;           // blocks that ended unseen: their address came again
  uint64_t unmatched_free_requests = 0;  // kFreeRequested where no block lives
  uint64_t unmatched_frees = 0;          // kFreeCompleted where no block lives, after a snapshot
  uint64_t frees_from_before = 0;        // the same on a device without a snapshot; not a loss
  uint64_t repeated_free_requests = 0;   // kFreeRequested of a block that was freed already
  uint64_t unmatched_labels = 0;         // kLabel where no block lives
  uint64_t unmatched_saves = 0;          // kSaved where no block lives
  uint64_t unknown_places = 0;           // rows whose place is not in the table, ignored
  uint64_t unknown_actions = 0;          // rows whose action this version does not know, ignored

  std::vector<std::pair<std::string_view, uint64_t>> named() const;
};

// The number of an event or of an allocation. A trace of more events does not fit into memory.
using RowNumber = int32_t;

// One row per allocation, except allocation_of_event. Event positions are -1 for "before the
// recording" (start) and "still alive" (end, completed).
struct Lifetimes {
  std::vector<RowNumber> start;
  std::vector<RowNumber> end;        // the program's use ended: free requested
  std::vector<RowNumber> completed;  // the bytes could be handed out again
  std::vector<uint64_t> address;
  std::vector<uint64_t> bytes;
  std::vector<uint16_t> place;
  std::vector<RowNumber> allocation_of_event;  // per event: the allocation it touched, or -1
  LifetimeCounters counters;
};

// Throws std::invalid_argument if the columns differ in length or have too many rows. No content of
// them is an error.
Lifetimes match_lifetimes(const EventColumns& events, std::span<const Place> places);

}  // namespace pytracer
