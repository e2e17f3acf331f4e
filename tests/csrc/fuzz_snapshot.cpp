// Any bytes are a memory snapshot or an error in one line: never a crash, a hang or a wild read.
// The memory is in proportion to the file, and code may index the result without checking.
//
// Under clang this is a libFuzzer target (preset "fuzz"); elsewhere main() replays files.
#include "fuzzing.h"
#include "snapshot.h"

#include <cstring>

namespace {

using namespace pytracer;

void require_sound(const Snapshot& found, size_t file_bytes) {
  size_t strings = found.strings.size();
  size_t stacks = found.stacks.parent.size();
  require(strings > 0 && stacks > 0);
  for (size_t i = 0; i < stacks; ++i) {
    require(found.stacks.parent[i] < i || i == 0);
  }
  require_below(found.stacks.file, strings);
  require_below(found.stacks.function, strings);
  require_below(found.entries.stack, stacks);
  require_below(found.entries.category, strings);
  require_below(found.entries.metadata, strings);
  require_below(found.entries.device, found.devices);
  require_below(found.entries.action, kActions);
  require_below(found.entries.bytes, uint64_t{1} << 48);
  require_below(found.blocks.segment, found.segments.device.size());
  require_below(found.blocks.stack, stacks);
  require_below(found.annotations.name, strings);
  require_below(found.annotations.stage, strings);
  size_t rows = found.entries.action.size() + found.segments.device.size() +
                found.blocks.segment.size() + found.annotations.name.size();
  require(rows <= file_bytes / 16 + 16);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    require_sound(read_snapshot({data, size}), size);
  } catch (const FileError& error) {
    require(std::strchr(error.what(), '\n') == nullptr);
  }
  return 0;
}
