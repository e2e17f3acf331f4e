// An imagined device: its blocks have no memory, and back fake tensors.
//
// A fake tensor's storage has a size and no memory. Here it gets a pointer that nobody may follow.
// The end of that pointer is the block's end. So the storage itself holds its block's address:
// labels, saved tensors and names read it there, as they do from real storages.
#pragma once

#include "../core/allocator_replay.h"
#include "../core/event.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pytracer::imagined {

struct Memory;
struct PossibleBlock;

// The block behind a pointer of ours; address 0 for any other pointer.
struct Block {
  uint64_t address = 0;
  DeviceType type = DeviceType::kCpu;
};

Block block_of(const c10::DataPtr& data);

// A stream, and the block of another stream that it uses.
using Use = std::pair<uint64_t, std::shared_ptr<PossibleBlock>>;
// The engine uses this block on this stream.
void note_use(const c10::DataPtr& data, uint64_t stream);
// Those of backward passes since the last call: the engine hands a gradient to a node of another
// stream.
std::vector<Use> take_uses_of_passes();

// Whether the program has let go of a block that is held.
bool is_let_go(const PossibleBlock& block);

constexpr uint64_t kNoStream = UINT64_MAX;

// The stream that new blocks of the calling thread are for. 0 is the default stream.
uint64_t stream();
void use_stream(uint64_t number);

// Gives a fake tensor on the CPU the memory of a real storage, for C++ of torch's that reads it by
// pointer. If the CPU is imagined, `Device::back` also gives it a block.
void ground(const at::Tensor& fake, const c10::Storage& real);

// One device that is imagined, from its making until it is closed.
class Device {
 public:
  // `of`: the kind of memory, the CPU's or CUDA's. Only CUDA's comes in segments.
  Device(DeviceType of, AllocatorRules rules);
  ~Device();
  Device(const Device&) = delete;  // one device is one place of the recording
  Device& operator=(const Device&) = delete;

  // Records from here on.
  void open();
  // Gives the tensor's storage a block, or a block of its new size. Returns whether anything
  // changed.
  bool back(const at::Tensor& tensor);
  // The storage has another size now. A storage without a block of ours stays as it is.
  bool resized(const c10::Storage& storage);
  // Gives the result the other's block, as if it had been computed in place. If somebody else still
  // uses the other's block, returns false and does nothing. The other's storage has an object in
  // Python.
  bool take_over(const at::Tensor& result, const at::Tensor& before);
  // Takes a block that stays until the device is closed, as a library's workspace does.
  void keep(uint64_t bytes, uint32_t label);
  // While the result lives, the tensor's block is in use in the possible placements: the card may
  // need it after the program has let it go. Null if it has no block, or was made on this stream.
  std::shared_ptr<PossibleBlock> hold(const at::Tensor& tensor, uint64_t but_of = kNoStream);
  // The card takes a block of so many bytes, for a moment. The least is sure.
  void take(uint64_t least, uint64_t most);
  // Records no more from here on.
  void close();

  // Frees cached memory, as empty_cache() does.
  void trim();

  // The allocator's own counters: requested, allocated, active and reserved bytes, now and at their
  // peak; and the peaks of the possible placements.
  struct Counters {
    uint64_t requested, allocated, active, reserved;
    uint64_t peak_requested, peak_allocated, peak_active, peak_reserved;
    uint64_t most_requested, least_reserved, most_reserved;
  };

  Counters counters() const;

 private:
  bool back(c10::StorageImpl& storage, bool also_others);

  std::shared_ptr<Memory> memory_;  // its blocks may outlive this
};

}  // namespace pytracer::imagined
