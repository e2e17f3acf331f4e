#include "workspaces.h"

#include "labels.h"
#include "private_torch.h"

#include <pybind11/pybind11.h>

#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace pytracer::workspaces {

namespace {

// The mutex's owner may allocate, and an observer of a failed allocation may want the GIL. So this
// does not hold the GIL while it waits for the mutex, and allocates nothing from torch while it
// holds the mutex.
std::vector<std::pair<const void*, c10::Device>> blocks_of(private_torch::Workspaces& workspaces) {
  std::vector<std::pair<const void*, c10::Device>> blocks;
  py::gil_scoped_release unlocked;
  std::shared_lock lock(workspaces.mutex);
  for (const auto& [user, data] : workspaces.map) {
    blocks.emplace_back(data.get(), data.device());
  }
  return blocks;
}

}  // namespace

size_t label(uint32_t label) {
  size_t labelled = 0;
  for (private_torch::Workspaces* workspaces : private_torch::workspaces()) {
    for (const auto& [address, device] : blocks_of(*workspaces)) {
      labelled += labels::record_block(address, device, label) ? 1 : 0;
    }
  }
  return labelled;
}

}  // namespace pytracer::workspaces
