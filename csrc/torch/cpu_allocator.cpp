#include "cpu_allocator.h"

#include "../core/device_totals.h"
#include "../core/recorder.h"
#include "private_torch.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>

namespace pytracer::cpu_allocator {

namespace {

// The allocator behind ours. Set once: its deleter frees all blocks made through us, for ever.
c10::Allocator* original = nullptr;
c10::DeleterFnPtr original_deleter = nullptr;
int priority = 0;  // its priority in torch, and ours
std::atomic<bool> reporting{false};

[[gnu::cold, gnu::noinline]] void record(Action action, uint64_t address, uint64_t bytes) {
  if (reporting.load(std::memory_order_relaxed)) {
    Recorder::get().record(action, kCpuPlace, address, bytes);
  }
}

// Inlined where it is called: between two looks, an event takes few more instructions than a call.
template <Action action>
[[gnu::always_inline]] inline void report(const void* address, uint64_t bytes) {
  auto at = reinterpret_cast<uint64_t>(address);
  if (recording.load(std::memory_order_relaxed)) [[unlikely]] {
    record(action, at, bytes);
  }
  if (!counting_host.load(std::memory_order_relaxed)) {
    return;
  }
  if constexpr (action == Action::kAlloc) {
    DeviceTotals::get().count_host_alloc(at, bytes);
  } else if constexpr (action == Action::kFreeCompleted) {
    DeviceTotals::get().count_host_free(at);
  } else {
    DeviceTotals::get().count(action, DeviceType::kCpu, 0, at, bytes);
  }
}

// Lives as long as the process: tensors made while tracing outlive the trace.
void deleter(void* address) {
  if (address != nullptr) {
    // Before the block can be handed out again, so that per address the order is right.
    report<Action::kFreeCompleted>(address, 0);
  }
  original_deleter(address);
}

// Keeps context == data and only swaps the deleter: oneDNN asks for raw pointers and frees them
// without a context.
class ReportingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = allocate_or_report(bytes);
    if (data.get() != nullptr) {
      report<Action::kAlloc>(data.get(), bytes);
    }
    (void)data.compare_exchange_deleter(original_deleter, &deleter);
    return data;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &deleter; }

  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return original->is_simple_data_ptr(data);
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    original->copy_data(to, from, bytes);
  }

 private:
  // Records a failure as CUDA's allocator does; the exception goes on unchanged.
  static c10::DataPtr allocate_or_report(size_t bytes) {
    try {
      return original->allocate(bytes);
    } catch (...) {
      report<Action::kOom>(nullptr, bytes);
      throw;
    }
  }
};

ReportingAllocator& wrapper() {
  static auto* const allocator = new ReportingAllocator;  // leaked: storages point at it
  return *allocator;
}

}  // namespace

std::string install() {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current != &wrapper()) {
    if (current->raw_deleter() == nullptr) {
      return "the CPU allocator in place gives out memory that carries its own context";
    }
    if (original != nullptr && original != current) {
      return "the CPU allocator was replaced since an earlier trace";
    }
    original = current;
    original_deleter = current->raw_deleter();
    // Torch ignores a priority lower than the present one, and has no way to ask for that one.
    for (priority = 0; priority <= UINT8_MAX && c10::GetCPUAllocator() != &wrapper(); ++priority) {
      c10::SetCPUAllocator(&wrapper(), static_cast<uint8_t>(priority));
    }
    --priority;
  }
  reporting.store(true);
  return {};
}

void uninstall() {
  reporting.store(false);
  if (original != nullptr && c10::GetCPUAllocator() == &wrapper()) {
    c10::SetCPUAllocator(original, static_cast<uint8_t>(priority));
  }
}

bool installed() {
  return reporting.load();
}

bool knows(const c10::StorageImpl& storage) {
  return storage.data_ptr().get_deleter() == &deleter;
}

bool adopt(c10::StorageImpl& storage) {
  // The pointer stays; only its deleter changes.
  c10::DataPtr& data = private_torch::data_of(storage);
  if (data.get() == nullptr || data.device().type() != c10::DeviceType::CPU) {
    return false;
  }
  if (data.get_deleter() != &deleter &&
      !data.compare_exchange_deleter(original_deleter, &deleter)) {
    return false;
  }
  report<Action::kSeed>(data.get(), storage.nbytes());
  return true;
}

}  // namespace pytracer::cpu_allocator
