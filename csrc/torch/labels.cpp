#include "labels.h"

#include "../core/recorder.h"

#include <c10/core/DeviceType.h>

namespace pytracer::labels {

namespace {

struct Block {
  uint64_t address = 0;
  uint16_t place = 0;
};

// A label names a device and an address; which stream or pool does not matter.
Block block_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return {};
  }
  const c10::Device device = tensor.device();
  if (!device.is_cpu() && !device.is_cuda()) {
    return {};
  }
  // The storage's pointer, not the tensor's: views share a block. Read this way it neither makes
  // copy-on-write storages copy nor complains about fake tensors, which have none.
  auto address = reinterpret_cast<uint64_t>(
      tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  auto type = device.is_cpu() ? DeviceType::kCpu : DeviceType::kCuda;
  auto index = static_cast<uint8_t>(device.is_cpu() ? 0 : device.index());
  return {address, Recorder::get().place({0, 0, 0, type, index})};
}

}  // namespace

bool record(const at::Tensor& tensor, uint32_t label) {
  Block block = block_of(tensor);
  if (block.address != 0) {
    Recorder::get().record(Action::kLabel, block.place, block.address, label);
  }
  return block.address != 0;
}

bool Watched::add(const at::Tensor& tensor, uint32_t label, uint32_t gradient_label) {
  if (!known_.insert(tensor.unsafeGetTensorImpl()).second) {
    return false;
  }
  entries_.push_back(
      {c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), label, gradient_label});
  return true;
}

template <class LabelOne>
size_t Watched::each(LabelOne label_one) {
  return std::erase_if(entries_, [&](const Entry& entry) {
    auto alive = entry.tensor.lock();
    if (!alive) {
      known_.erase(entry.tensor._unsafe_get_target());
      return true;
    }
    label_one(at::Tensor(std::move(alive)), entry);
    return false;
  });
}

size_t Watched::label() {
  return each([](const at::Tensor& tensor, const Entry& entry) { record(tensor, entry.label); });
}

size_t Watched::label_gradients() {
  return each([](const at::Tensor& tensor, const Entry& entry) {
    const at::Tensor& gradient = tensor.grad();
    if (gradient.defined()) {
      record(gradient, entry.gradient_label);
    }
  });
}

void record_saved(const at::Tensor& tensor) {
  Block block = block_of(tensor);
  if (block.address != 0) {
    Recorder::get().record(Action::kSaved, block.place, block.address, tensor.nbytes());
  }
}

}  // namespace pytracer::labels
