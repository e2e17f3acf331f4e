#include "imagined.h"

#include "../core/recorder.h"
#include "private_torch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bitset>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace pytracer::imagined {

namespace {

// The model's addresses are too high for a processor, on purpose: nobody can follow one. In the
// recording they are below 2^53, so that JavaScript reads them exactly.
constexpr uint64_t kModelsSegments = uint64_t{1} << 57;
constexpr uint64_t kSegments = uint64_t{1} << 47;

uint64_t recorded(uint64_t address) {
  return address < kModelsSegments ? address - (kModelsSegments - kSegments)
                                   : address - kModelsSegments;
}

}  // namespace

// What the placements take of the ranges that only the card knows: nothing of some, and of the
// others a share between two. The first takes the most of each. On an H100 and an H200 cuDNN's
// convolutions took nothing, or about half of what they may.
struct Way {
  double nothing, lowest, highest;
};

constexpr std::array kWays = {
    Way{0, 1, 1},       Way{0, 0.5, 0.5},   Way{0, 0.4, 0.6},   Way{0, 0.3, 0.6},
    Way{0, 0.1, 0.5},   Way{0, 0, 1},       Way{0, 0.5, 1},     Way{0.3, 0.4, 0.6},
    Way{0.3, 0.3, 0.6}, Way{0.3, 0.2, 0.6}, Way{0.3, 0.2, 0.6}, Way{0.3, 0, 1},
    Way{0.3, 0.5, 1},   Way{0.5, 0.4, 0.6}, Way{0.5, 0.3, 0.6}, Way{0.5, 0.2, 0.6},
    Way{0.5, 0, 1},     Way{0.5, 0.5, 1},   Way{0.7, 0.4, 0.6}, Way{0.7, 0.2, 0.6},
    Way{0.7, 0, 1},     Way{0.7, 0.5, 1},   Way{0.9, 0.4, 0.6}, Way{0.9, 0.5, 1},
};

// A number from 0 to 1 that looks random and is always the same: splitmix64.
double drawn(uint64_t number) {
  number = (number + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EB;
  return static_cast<double>((number ^ (number >> 31)) >> 11) / static_cast<double>(1ull << 53);
}

// The share that a placement takes of this range.
double share_of(size_t number, uint64_t least, uint64_t most) {
  const Way& way = kWays.at(number);
  uint64_t range = (most * 31 + least) * kWays.size() + number;
  if (drawn(range) < way.nothing) {
    return 0;
  }
  return way.lowest + (way.highest - way.lowest) * drawn(~range);
}

// The stream that new blocks of this thread are for.
static thread_local uint64_t current_stream = 0;

// One way that the blocks may lie: the allocator's model, and the bytes that it was asked for.
struct Placement {
  Placement(AllocatorRules rules, AllocatorModel::Segments segments)
      : model(std::move(rules), std::move(segments)) {}

  struct Place {
    uint32_t number;
    uint64_t address;
  };

  Place allocate(uint64_t bytes, uint64_t stream) {
    if (spare.empty()) {
      spare.push_back(numbers++);
    }
    uint32_t number = spare.back();
    spare.pop_back();
    uint64_t address = model.allocate(number, bytes, stream);
    requested += bytes;
    peak_requested = std::max(peak_requested, requested);
    return {number, address};
  }

  void free(uint32_t number, uint64_t bytes) {
    model.free(number);
    requested -= bytes;
    spare.push_back(number);
  }

  AllocatorModel model;
  std::vector<uint32_t> spare;  // numbers whose allocations are gone
  uint32_t numbers = 0;
  uint64_t requested = 0;
  uint64_t peak_requested = 0;
};

struct Memory : std::enable_shared_from_this<Memory> {
  Memory(DeviceType of, AllocatorRules given)
      : type(of),
        segments{given.expandable_segments ? Action::kSegmentMap : Action::kSegmentAlloc,
                 given.expandable_segments ? Action::kSegmentUnmap : Action::kSegmentFree},
        possible(ways(given)),
        sure(std::move(given), [this](bool taken, uint64_t address, uint64_t bytes) {
          if (has_segments()) {
            uint64_t of = taken ? current_stream : streams.at(address);
            taken ? void(streams[address] = of) : void(streams.erase(address));
            record(taken ? segments.first : segments.second, recorded(address), bytes, of);
          }
        }) {}

  static std::deque<Placement> ways(const AllocatorRules& rules) {
    std::deque<Placement> all;  // a placement stays where it is made
    for (size_t i = 0; i < kWays.size(); ++i) {
      all.emplace_back(rules, [](bool, uint64_t, uint64_t) {});
    }
    return all;
  }

  bool has_segments() const { return type != DeviceType::kCpu; }

  void record(Action action, uint64_t address, uint64_t bytes, uint64_t of) const noexcept {
    if (!is_open || !recording.load(std::memory_order_relaxed)) {
      return;
    }
    try {
      Recorder& recorder = Recorder::get();
      recorder.record(action, recorder.place({of, 0, 0, type, 0}), address, bytes);
    } catch (const std::exception&) {  // no memory for another place
      Recorder::get().lose(action);
    }
  }

  DeviceType type;
  std::pair<Action, Action> segments;    // the actions by which they come and go
  bool is_open = false;                  // the mutex guards this and all below
  std::mutex mutex;                      // a leaf: tensors die on any thread
  uint64_t blocks = 0;                   // that have ended
  std::map<uint64_t, uint64_t> streams;  // by segment
  std::deque<Placement> possible;        // with what the card may take beside what is sure
  Placement sure;                        // what is recorded
};

// A block's places in the possible placements.
struct PossibleBlock {
  // With the lock.
  PossibleBlock(std::shared_ptr<Memory> of, uint64_t size) : memory(std::move(of)), bytes(size) {
    for (size_t i = 0; i < kWays.size(); ++i) {
      numbers[i] = memory->possible[i].allocate(bytes, current_stream).number;
    }
  }

  PossibleBlock(const PossibleBlock&) = delete;  // its end is the block's end
  PossibleBlock& operator=(const PossibleBlock&) = delete;

  ~PossibleBlock() {
    if (memory != nullptr) {
      std::lock_guard lock(memory->mutex);
      for (size_t i = 0; i < kWays.size(); ++i) {
        free(i);
      }
    }
  }

  // With the lock: the program lets go. If the card may still need the block (it is held), some
  // placements keep it, the first one always. Otherwise its end follows at once.
  void let_go(bool is_held) {
    is_let_go = true;
    uint64_t block = memory->blocks++ * kWays.size();
    for (size_t i = 1; is_held && i < kWays.size(); ++i) {
      if (drawn(block + i) < share(i)) {
        free(i);
      }
    }
  }

  static double share(size_t way) {
    return static_cast<double>(way) / static_cast<double>(kWays.size());
  }

  void free(size_t way) {
    if (!ended.test(way)) {
      ended.set(way);
      memory->possible[way].free(numbers[way], bytes);
    }
  }

  std::shared_ptr<Memory> memory;  // null: the block never ends
  uint64_t bytes;
  std::array<uint32_t, kWays.size()> numbers{};
  bool is_let_go = false;  // the memory's mutex guards this and below
  std::bitset<kWays.size()> ended;
};

namespace {

// The context of a storage's pointer.
struct Held {
  std::shared_ptr<Memory> memory;
  uint32_t number;
  uint64_t model_address;
  uint64_t bytes;
  uint64_t stream;
  std::shared_ptr<PossibleBlock> possible;
  std::optional<c10::Storage> real = std::nullopt;  // memory that C++ of torch's may read
};

void end(void* context) {
  std::unique_ptr<Held> held(static_cast<Held*>(context));
  if (held->bytes == 0) {
    return;
  }
  Memory& memory = *held->memory;
  std::lock_guard lock(memory.mutex);
  uint64_t address = recorded(held->model_address);
  memory.record(Action::kFreeRequested, address, held->bytes, held->stream);
  memory.record(Action::kFreeCompleted, address, held->bytes, held->stream);
  memory.sure.free(held->number, held->bytes);
  held->possible->let_go(/*is_held=*/held->possible.use_count() > 1);
}  // and then, without the lock, its possible places

// Zero bytes have an owner, too: the storage may grow.
std::unique_ptr<Held> begin(Memory& memory, uint64_t bytes) {
  std::shared_ptr<Memory> shared = memory.shared_from_this();
  if (bytes == 0) {
    return std::unique_ptr<Held>(new Held{std::move(shared), 0, 0, 0, 0, nullptr});
  }
  std::lock_guard lock(memory.mutex);
  auto [number, address] = memory.sure.allocate(bytes, current_stream);
  memory.record(Action::kAlloc, recorded(address), bytes, current_stream);
  auto possible = std::make_shared<PossibleBlock>(shared, bytes);
  return std::unique_ptr<Held>(
      new Held{std::move(shared), number, address, bytes, current_stream, std::move(possible)});
}

void end_ground(void* context) {
  delete static_cast<c10::Storage*>(context);
}

// The real memory behind a grounded storage.
const c10::Storage* ground_of(const c10::DataPtr& data) {
  return data.get_deleter() == &end_ground ? static_cast<const c10::Storage*>(data.get_context())
                                           : nullptr;
}

const Held* held_by(const c10::DataPtr& data) {
  return data.get_deleter() == &end ? static_cast<const Held*>(data.get_context()) : nullptr;
}

}  // namespace

Block block_of(const c10::DataPtr& data) {
  const Held* held = held_by(data);
  return held == nullptr || held->bytes == 0
             ? Block{}
             : Block{recorded(held->model_address), held->memory->type};
}

void ground(const at::Tensor& fake, const c10::Storage& real) {
  c10::DataPtr data(real.mutable_data(),
                    new c10::Storage(real),
                    &end_ground,
                    private_torch::data_of(fake).device());
  // Another storage, because torch warns whoever reads the one of a fake tensor by pointer.
  fake.unsafeGetTensorImpl()->set_storage_keep_dtype(
      c10::Storage(c10::Storage::use_byte_size_t(),
                   real.nbytes(),
                   std::move(data),
                   c10::GetAllocator(c10::DeviceType::Meta),
                   /*resizable=*/true));
}

Device::Device(DeviceType of, AllocatorRules rules)
    : memory_(std::make_shared<Memory>(of, std::move(rules))) {}

Device::~Device() {
  close();
}

bool Device::back(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() &&
         back(*tensor.storage().unsafeGetStorageImpl(), /*also_others=*/true);
}

bool Device::resized(const c10::Storage& storage) {
  return back(*storage.unsafeGetStorageImpl(), /*also_others=*/false);
}

bool Device::back(c10::StorageImpl& storage, bool also_others) {
  const c10::DataPtr& data = private_torch::data_of(storage);
  const Held* held = held_by(data);
  const c10::Storage* ground = also_others ? ground_of(data) : nullptr;
  // A pointer that is not ours is real memory.
  if (held == nullptr && ground == nullptr &&
      (!also_others || !data.device().is_meta() || data.get() != nullptr)) {
    return false;
  }
  auto bytes = static_cast<uint64_t>(storage.sym_nbytes().maybe_as_int().value_or(0));
  if (held != nullptr && bytes == held->bytes) {
    return false;
  }
  std::unique_ptr<Held> fresh = begin(*memory_, bytes);
  auto* address = reinterpret_cast<void*>(fresh->model_address);
  if (ground != nullptr) {
    fresh->real = *ground;
    address = fresh->real->mutable_data();
  }
  c10::DataPtr now(address, fresh.release(), &end, data.device());
  storage.set_data_ptr_noswap(std::move(now));  // its earlier block ends here
  return true;
}

// References to a storage: its tensor, and its object in Python.
constexpr size_t kAlone = 2;

bool Device::take_over(const at::Tensor& result, const at::Tensor& before) {
  auto& old = *before.storage().unsafeGetStorageImpl();
  auto& fresh = *result.storage().unsafeGetStorageImpl();
  const Held* held = held_by(private_torch::data_of(old));
  if (held == nullptr || before.storage().use_count() > kAlone ||
      old.sym_nbytes() != fresh.sym_nbytes() || !before.is_non_overlapping_and_dense()) {
    return false;
  }
  c10::DataPtr nothing(nullptr, private_torch::data_of(fresh).device());
  fresh.set_data_ptr_noswap(old.set_data_ptr(std::move(nothing)));
  return true;
}

void Device::keep(uint64_t bytes, uint32_t label) {
  std::unique_ptr<Held> held = begin(*memory_, bytes);
  if (held->possible != nullptr) {
    held->possible->memory.reset();
  }
  std::lock_guard lock(memory_->mutex);
  memory_->record(Action::kLabel, recorded(held->model_address), label, held->stream);
}

namespace {

// The block of this pointer, if another stream made it.
std::shared_ptr<PossibleBlock> used_beside(const c10::DataPtr& data, uint64_t stream) {
  const Held* held = held_by(data);
  return held == nullptr || held->stream == stream ? nullptr : held->possible;
}

thread_local std::vector<Use> uses_of_passes;

}  // namespace

std::shared_ptr<PossibleBlock> Device::hold(const at::Tensor& tensor, uint64_t but_of) {
  return used_beside(private_torch::data_of(tensor), but_of);
}

void note_use(const c10::DataPtr& data, uint64_t number) {
  if (auto block = used_beside(data, number)) {
    uses_of_passes.emplace_back(number, std::move(block));
  }
}

std::vector<Use> take_uses_of_passes() {
  return std::exchange(uses_of_passes, {});
}

bool is_let_go(const PossibleBlock& block) {
  std::lock_guard lock(block.memory->mutex);
  return block.is_let_go;
}

void Device::take(uint64_t least, uint64_t most) {
  std::lock_guard lock(memory_->mutex);
  uint64_t stream = current_stream;
  if (least != 0) {
    auto [number, address] = memory_->sure.allocate(least, stream);
    for (Action action : {Action::kAlloc, Action::kFreeRequested, Action::kFreeCompleted}) {
      memory_->record(action, recorded(address), least, stream);
    }
    memory_->sure.free(number, least);
  }
  for (size_t i = 0; i < kWays.size(); ++i) {
    double share = share_of(i, least, most);
    uint64_t bytes = least + static_cast<uint64_t>(share * static_cast<double>(most - least));
    if (bytes != 0) {
      Placement& placement = memory_->possible[i];
      placement.free(placement.allocate(bytes, stream).number, bytes);
    }
  }
}

void Device::open() {
  std::lock_guard lock(memory_->mutex);
  memory_->is_open = true;
  if (memory_->has_segments()) {
    memory_->record(Action::kSnapshot, 0, 0, 0);  // nothing is there yet
  }
}

void Device::close() {
  std::lock_guard lock(memory_->mutex);
  memory_->is_open = false;
}

uint64_t stream() {
  return current_stream;
}

void use_stream(uint64_t number) {
  current_stream = number;
}

void Device::trim() {
  std::lock_guard lock(memory_->mutex);
  memory_->sure.model.trim();
  for (Placement& placement : memory_->possible) {
    placement.model.trim();
  }
}

Device::Counters Device::counters() const {
  std::lock_guard lock(memory_->mutex);
  const ReplayResult& counted = memory_->sure.model.counted();
  uint64_t least = counted.peak_reserved;
  uint64_t most = least;
  for (const Placement& placement : memory_->possible) {
    least = std::min(least, placement.model.counted().peak_reserved);
    most = std::max(most, placement.model.counted().peak_reserved);
  }
  return {memory_->sure.requested,
          counted.allocated,
          counted.active,
          counted.reserved,
          memory_->sure.peak_requested,
          counted.peak_allocated,
          counted.peak_active,
          counted.peak_reserved,
          memory_->possible.front().peak_requested,
          least,
          most};
}

}  // namespace pytracer::imagined
