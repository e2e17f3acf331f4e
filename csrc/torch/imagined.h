// Memory that is not there: an imagined device, whose blocks back fake tensors.
//
// A fake tensor's storage has a size and no memory. It is given a pointer that nobody may follow,
// and whose end is the block's end. So one map leads from a storage to its address: the storage
// itself. Labels, saved tensors and names read it there, as they do from real storages.
#pragma once

#include "../core/allocator_replay.h"
#include "../core/event.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace pytracer::imagined {

struct Memory;

// The block behind a pointer, where it is one of ours: address 0 for none.
struct Block {
  uint64_t address = 0;
  DeviceType type = DeviceType::kCpu;
};

Block block_of(const c10::DataPtr& data);

// One device that is imagined, from its making until it is closed.
class Device {
 public:
  // `of`: whose memory it is, the CPU's or CUDA's. Only CUDA's comes in segments.
  Device(DeviceType of, AllocatorRules rules);
  ~Device();
  Device(const Device&) = delete;  // one device is one place of the recording
  Device& operator=(const Device&) = delete;

  // From here on it is recorded what happens.
  void open();
  // The tensor's storage has memory from now on, or as much as it has become large. Returns
  // whether anything was new.
  bool back(const at::Tensor& tensor);
  // The storage has another size now; one that has no memory of ours is left as it is.
  bool resized(const c10::Storage& storage);
  // The result has the other's block, as if it had been computed in place. False, and nothing is
  // done, where somebody else still uses that. The other's storage has an object in Python.
  bool take_over(const at::Tensor& result, const at::Tensor& before);
  // Takes a block that stays until the device is closed, as a library's workspace does.
  void keep(uint64_t bytes, uint32_t label);
  // What happens from here on is recorded no more.
  void close();

  // Gives back what is cached, as empty_cache() does.
  void trim();

  // As the allocator counts itself: requested, allocated, active and reserved bytes, now and most.
  struct Counters {
    uint64_t requested, allocated, active, reserved;
    uint64_t peak_requested, peak_allocated, peak_active, peak_reserved;
  };

  Counters counters() const;

 private:
  bool back(c10::StorageImpl& storage, bool also_others);

  std::shared_ptr<Memory> memory_;  // whose blocks may outlive this
};

// Whether a Guard exists for the calling thread.
bool is_imagining();

// Why a Guard cannot answer for CUDA; empty if it can.
std::string problem_with_hooks();

// While one exists, the calling thread may compute on fake tensors of CUDA, whether or not there is
// such a device: a backward pass asks for the device's streams. Others see their device as it is.
class Guard {
 public:
  Guard();
  ~Guard();
  Guard(const Guard&) = delete;  // the registry has one entry
  Guard& operator=(const Guard&) = delete;
};

}  // namespace pytracer::imagined
