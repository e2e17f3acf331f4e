// The vocabulary: the rows of a recording, their order and their bytes. Everything else in the
// project (file format, lifetimes, numpy columns) uses these words. pytracer/data/schema.py repeats
// the numbers for Python; a test keeps the two equal.
//
// Three append-only logs make up a recording:
//
//   Event       one thing an allocator did, or one thing we learned about a live block
//   ScopeBegin  one op, module, backward pass, ... was entered
//   ScopeEnd    it was left
//
// A row's position in its log is its number, and the order of the rows is the order in which
// things happened. Times are raw ticks; they become nanoseconds when the recording is read.
#pragma once

#include <array>
#include <cstdint>

namespace pytracer {

enum class Action : uint8_t {
  kAlloc = 0,          // bytes: the requested size
  kFreeRequested = 1,  // the program gave the block back
  kFreeCompleted = 2,  // no stream uses it any more: the allocator may hand it out again
  kSegmentAlloc = 3,   // the allocator took memory from the driver; bytes: the segment's size
  kSegmentFree = 4,
  kSegmentMap = 5,  // the same two for expandable segments
  kSegmentUnmap = 6,
  kSnapshot = 7,     // the device's recording starts here: seeds describe what was alive now
  kSeed = 8,         // a block that was alive before; bytes: the requested size
  kSeedSegment = 9,  // a segment that was held before
  kOom = 10,         // an allocation failed; bytes: the requested size, address: free device bytes
  kLabel = 11,       // we learned what the block at address is for; bytes: a label id
  kSaved = 12,       // autograd saved a tensor in the block at address; bytes: the tensor's own
};
inline constexpr uint8_t kActions = 13;

// Two events share a cache line and never straddle one. 2^48 bytes is 256 TiB: larger than any
// block, so the action and the log's own ready mark fit beside the size. A larger request is
// recorded as kMostBytes.
inline constexpr uint64_t kMostBytes = (uint64_t{1} << 48) - 1;
// Sums of sizes stay below this, so a signed number holds them.
inline constexpr uint64_t kMostBytesInAll = uint64_t{1} << 62;

struct Event {
  uint64_t ticks;
  uint64_t address;
  uint64_t bytes : 48;
  uint64_t action : 8;
  uint64_t ready : 8;  // set last, by the log: the row is whole
  uint32_t scope;      // the innermost scope open on the acting thread, 0 for none
  uint16_t place;      // device, stream and pool: a row of the place table
  uint16_t thread;     // a row of the thread table
};

static_assert(sizeof(Event) == 32);

// A row's words, put together in registers. A row that is written in parts and read in whole words
// makes the processor wait twice.
constexpr std::array<uint64_t, 4> words_of(const Event& row) {
  return {row.ticks,
          row.address,
          uint64_t{row.bytes} | uint64_t{row.action} << 48 | uint64_t{row.ready} << 56,
          uint64_t{row.scope} | uint64_t{row.place} << 32 | uint64_t{row.thread} << 48};
}

enum class ScopeKind : uint8_t {
  kOp = 0,         // a dispatched operator
  kNode = 1,       // the engine evaluates one autograd node
  kModule = 2,     // a module's call
  kBackward = 3,   // a call of the autograd engine
  kOptimizer = 4,  // optimizer.step()
  kUser = 5,       // record_function(...), the profiler's own annotations, DataLoader, FSDP
  kStep = 6,       // a mark without extent: the user or the optimizer ended a step
};
inline constexpr uint8_t kScopeKinds = 7;

enum ScopeFlag : uint8_t {
  kScopeRecompute = 1,  // grad mode was on inside a node that began with it off
  kScopeGrad = 2,       // the op or module ran with grad mode on: what it returns may be saved
  kScopeAutocast = 4,   // the module was entered under autocast
  kScopeGraph = 8,      // the op, outside of modules, got a tensor that needs a gradient
};

// The name of the scope of a line that allocates in code that torch.compile wrote.
inline constexpr const char* kGeneratedLine = "torch.compile::line";
// How the names of a compiled graph's Function and node begin, and of the call around them.
inline constexpr const char* kCompiled[] = {"CompiledFunction", "Torch-Compiled Region"};

inline constexpr uint8_t kScopeReady = 0x80;  // the log's own mark beside the flags

struct ScopeBegin {
  uint64_t ticks;
  uint32_t parent;  // the enclosing scope on the same thread, 0 for none
  uint32_t
      forward;    // of a node: the op that made it, 0 if not known
                  // of a backward, without operators: the first op outside of modules in its graph
  uint32_t name;  // a row of the string table
  uint16_t thread;
  ScopeKind kind;
  uint8_t flags_and_ready;  // ScopeFlag bits; the top bit is the log's ready mark
};

static_assert(sizeof(ScopeBegin) == 24);

constexpr std::array<uint64_t, 3> words_of(const ScopeBegin& row) {
  return {row.ticks,
          uint64_t{row.parent} | uint64_t{row.forward} << 32,
          uint64_t{row.name} | uint64_t{row.thread} << 32 | uint64_t{uint8_t(row.kind)} << 48 |
              uint64_t{row.flags_and_ready} << 56};
}

// Scopes are numbered from 1; the row at position i of the log is scope i + 1. A parent is
// always begun before its children, so a scope's number is greater than its parent's.
// An operator inside an operator has no end of its own.
struct ScopeEnd {
  uint64_t ticks;
  uint32_t scope;
  uint32_t stack;  // a row of the stack table (the Python line that called), 0 for none
};

static_assert(sizeof(ScopeEnd) == 16);

constexpr std::array<uint64_t, 2> words_of(const ScopeEnd& row) {
  return {row.ticks, uint64_t{row.scope} | uint64_t{row.stack} << 32};
}

enum class DeviceType : uint8_t { kCpu = 0, kCuda = 1 };

struct Place {
  uint64_t stream;
  uint64_t pool_high;  // the allocator's pool id, {0, 0} for the default pool
  uint64_t pool_low;
  DeviceType device_type;
  uint8_t device_index;

  bool operator==(const Place&) const = default;
};

inline constexpr uint16_t kCpuPlace = 0;  // the default row

// One frame of a Python stack: the trie's node. Row 0 is the root, "no stack".
struct StackFrame {
  uint32_t parent;  // the caller
  uint32_t file;    // rows of the string table
  uint32_t function;
  uint32_t line;

  bool operator==(const StackFrame&) const = default;
};

// What a block is for. Category numbers are those of pytracer/data/schema.py.
struct Label {
  uint8_t category;
  uint32_t role;  // rows of the string table, 0 for none
  uint32_t name;
  uint32_t shape;
  uint32_t dtype;

  bool operator==(const Label&) const = default;
};

// A pair of readings of the two clocks, taken together. Two of them turn ticks into time.
struct ClockReading {
  uint64_t ticks;
  int64_t unix_ns;
};

}  // namespace pytracer
