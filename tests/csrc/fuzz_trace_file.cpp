// Any bytes are a trace or an error: never a crash, a hang, a wild read or much memory. And code
// may index the reader's result without checking, as its header promises.
//
// Under clang this is a libFuzzer target (preset "fuzz"); elsewhere main() replays files.
#include "fuzzing.h"
#include "lifetimes.h"
#include "samples.h"
#include "trace_file.h"

#include <cstring>

namespace {

using namespace pytracer;

void require_sound(const Recording& r) {
  size_t strings = r.strings.size();
  size_t scopes = r.scope_begins.ticks.size();
  require(strings > 0 && !r.stacks.line.empty() && !r.places.stream.empty() &&
          !r.labels.name.empty() && !r.threads.name.empty());
  require_below(r.stacks.file, strings);
  require_below(r.stacks.function, strings);
  require_below(r.labels.role, strings);
  require_below(r.labels.name, strings);
  require_below(r.labels.shape, strings);
  require_below(r.labels.dtype, strings);
  require_below(r.threads.name, strings);
  require_below(r.scope_begins.name, strings);
  require_below(r.scope_begins.thread, r.threads.name.size());
  require_below(r.scope_begins.kind, kScopeKinds);
  require_below(r.scope_ends.scope, scopes + 1);
  require_below(r.scope_ends.stack, r.stacks.line.size());
  require_below(r.events.scope, scopes + 1);
  require_below(r.events.place, r.places.stream.size());
  require_below(r.events.thread, r.threads.name.size());
  require_below(r.events.action, kActions);
  for (size_t i = 0; i < scopes; ++i) {
    require(r.scope_begins.parent[i] <= i && r.scope_begins.forward[i] <= i);
  }
  for (size_t i = 0; i < r.stacks.parent.size(); ++i) {
    require(r.stacks.parent[i] < i || r.stacks.parent[i] == 0);
  }
  uint64_t sum = 0;
  for (size_t i = 0; i < r.events.bytes.size(); ++i) {
    if (r.events.action[i] != static_cast<uint8_t>(Action::kLabel)) {
      require(r.events.bytes[i] <= kMostBytes);
      sum += r.events.bytes[i];
      require(sum <= uint64_t{1} << 62);
    }
  }
  size_t rows = r.events.ticks.size();
  require(r.events.address.size() == rows && r.events.bytes.size() == rows &&
          r.events.thread.size() == rows);
}

void require_lifetimes(const Recording& r) {
  auto places = to_places(r.places);
  Lifetimes found =
      match_lifetimes({r.events.address, r.events.bytes, r.events.action, r.events.place}, places);
  auto rows = static_cast<int64_t>(r.events.ticks.size());
  auto allocations = static_cast<int64_t>(found.start.size());
  for (size_t i = 0; i < found.start.size(); ++i) {
    require(found.start[i] < rows && found.end[i] < rows && found.completed[i] < rows);
    require(found.completed[i] < 0 || found.completed[i] >= found.end[i]);
  }
  for (int64_t allocation : found.allocation_of_event) {
    require(allocation >= -1 && allocation < allocations);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ReadReport report;
  try {
    Recording recording = read_recording({data, size}, report);
    require(report.good_bytes <= report.total_bytes && report.total_bytes == size);
    require(report.notes.size() <= 101);
    require_sound(recording);
    require_lifetimes(recording);
  } catch (const FileError& error) {
    require(std::strchr(error.what(), '\n') == nullptr);
  }
  return 0;
}

#ifdef PYTRACER_FUZZ

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Random bytes seldom get past a checksum, so this mostly corrects the checksums.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data,
                                          size_t size,
                                          size_t max_size,
                                          unsigned int seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 8 != 0) {
    samples::repair_checksums(data, size);
  }
  return size;
}

#endif
