#include "imagined_guard.h"

#include "imagined.h"
#include "private_torch.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace pytracer::imagined {

namespace {

thread_local bool imagines = false;

constexpr auto kCuda = static_cast<size_t>(c10::DeviceType::CUDA);

// Answers for threads that imagine; for others the device's own guard answers.
class Answers final : public c10::impl::DeviceGuardImplInterface {
 public:
  explicit Answers(const DeviceGuardImplInterface* own) : own_(own) {}

  const DeviceGuardImplInterface* own() const { return own_; }

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return others() ? own_->exchangeDevice(device) : first();
  }

  c10::Device getDevice() const override { return others() ? own_->getDevice() : first(); }

  void setDevice(c10::Device device) const override {
    if (others()) {
      own_->setDevice(device);
    }
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (others()) {
      own_->uncheckedSetDevice(device);
    }
  }

  // A node of a graph keeps this one, and its backward uses it.
  c10::Stream getStream(c10::Device device) const override {
    return others() ? own_->getStream(device) : stream(imagined::stream());
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return others() ? own_->getDefaultStream(device) : stream();
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high) const override {
    return others() ? own_->getStreamFromGlobalPool(device, is_high) : stream();
  }

  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return others() ? own_->getNewStream(device, priority) : stream();
  }

  c10::Stream exchangeStream(c10::Stream other) const override {
    if (others()) {
      return own_->exchangeStream(other);
    }
    uint64_t before = imagined::stream();
    use_stream(static_cast<uint64_t>(other.id()));
    return stream(before);
  }

  void destroyEvent(void* event, c10::DeviceIndex device) const noexcept override {
    if (others()) {
      own_->destroyEvent(event, device);
    }
  }

  void record(void** event,
              const c10::Stream& stream,
              c10::DeviceIndex device,
              c10::EventFlag flag) const override {
    if (others()) {
      own_->record(event, stream, device, flag);
    }
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (others()) {
      own_->block(event, stream);
    }
  }

  bool queryEvent(void* event) const override { return !others() || own_->queryEvent(event); }

  bool queryStream(const c10::Stream& stream) const override {
    return !others() || own_->queryStream(stream);
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    if (others()) {
      own_->synchronizeStream(stream);
    }
  }

  void synchronizeEvent(void* event) const override {
    if (others()) {
      own_->synchronizeEvent(event);
    }
  }

  void synchronizeDevice(c10::DeviceIndex device) const override {
    if (others()) {
      own_->synchronizeDevice(device);
    }
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (others()) {
      own_->recordDataPtrOnStream(data, stream);
    } else {
      note_use(data, static_cast<uint64_t>(stream.id()));
    }
  }

  double elapsedTime(void* from, void* to, c10::DeviceIndex device) const override {
    return others() ? own_->elapsedTime(from, to, device) : 0;
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return others() ? own_->deviceCount() : static_cast<c10::DeviceIndex>(imagines ? 1 : 0);
  }

 private:
  bool others() const { return own_ != nullptr && !imagines; }

  static c10::Device first() { return {c10::DeviceType::CUDA, 0}; }

  static c10::Stream stream(uint64_t number = 0) {
    return c10::Stream(c10::Stream::UNSAFE, first(), static_cast<c10::StreamId>(number));
  }

  const DeviceGuardImplInterface* own_;
};

// Torch asks one object whether there is CUDA, and keeps the first object that it gets. So the
// object stays, and a few of its answers change: it gets a copy of its class's table of virtual
// functions, in which these entries lead here.
class Hooks {
 public:
  static void replace() {
    static const Hooks* const hooks = new Hooks;
    table_of(hooks->object_).store(hooks->replaced_);
  }

  // The offset to the top stands in front of a table, and is 0 for an object as a whole.
  static bool has_table() {
    Function* table = table_of(&at::detail::getCUDAHooks()).load();
    return table != nullptr && *(table - kHeader) == nullptr;
  }

  static void restore() {
    Object* object = &at::detail::getCUDAHooks();
    if (original != nullptr) {
      table_of(object).store(original);
    }
  }

 private:
  using Object = const at::CUDAHooksInterface;
  using Function = void (*)();
  static constexpr size_t kHeader = 2;  // in front of a table: the offset to the top, and the type

  // One more than the interface has: its slot is their number.
  struct Counting : at::CUDAHooksInterface {
    virtual void behind_all() const {}
  };

  Hooks() : object_(&at::detail::getCUDAHooks()) {
    const size_t count = slot_of(&Counting::behind_all);
    original = table_of(object_).load();
    auto* copy = new Function[kHeader + count];
    std::copy(original - kHeader, original + count, copy);
    replaced_ = copy + kHeader;
    answer<&Object::hasCUDA>(&yes<&Object::hasCUDA>);
    answer<&Object::isBuilt>(&yes<&Object::isBuilt>);
    answer<&Object::isAvailable>(&yes<&Object::isAvailable>);
    answer<&Object::hasPrimaryContext>(&has_context);
    answer<&Object::isPinnedPtr>(&is_pinned);
    // Questions about a device's architecture before torch chooses a convolution.
    answer<&Object::supportsDilatedConvolutionWithCuDNN>(
        &yes<&Object::supportsDilatedConvolutionWithCuDNN>);
    answer<&Object::supportsDepthwiseConvolutionWithCuDNN>(
        &yes<&Object::supportsDepthwiseConvolutionWithCuDNN>);
    answer<&Object::supportsBFloat16ConvolutionWithCuDNNv8>(
        &yes<&Object::supportsBFloat16ConvolutionWithCuDNNv8>);
    answer<&Object::supportsBFloat16RNNWithCuDNN>(&yes<&Object::supportsBFloat16RNNWithCuDNN>);
    answer<&Object::showConfig>(&configuration);
  }

  static std::atomic<Function*>& table_of(Object* object) {
    return *reinterpret_cast<std::atomic<Function*>*>(const_cast<at::CUDAHooksInterface*>(object));
  }

  // Every torch for Linux and macOS follows the Itanium C++ ABI: a pointer to a virtual member
  // function is its offset in the table. x86 adds 1; ARM adds it to the second word.
  template <class Member>
  static size_t slot_of(Member member) {
    uintptr_t offset = 0;
    static_assert(sizeof(member) == 2 * sizeof(offset));
    std::memcpy(&offset, &member, sizeof(offset));
    return (offset & ~uintptr_t{1}) / sizeof(Function);
  }

  template <class Result, class Member, class... Arguments>
  static Result ask(Member member, Object* self, Arguments... arguments) {
    using Asked = Result (*)(Object*, Arguments...);
    return reinterpret_cast<Asked>(original[slot_of(member)])(self, arguments...);
  }

  template <auto kMember, class Answer>
  void answer(Answer given) {
    replaced_[slot_of(kMember)] = reinterpret_cast<Function>(given);
  }

  template <auto kMember>
  static bool yes(Object* self) {
    return imagines || ask<bool>(kMember, self);
  }

  static bool has_context(Object* self, c10::DeviceIndex device) {
    return imagines || ask<bool>(&Object::hasPrimaryContext, self, device);
  }

  static bool is_pinned(Object* self, const void* data) {
    return !imagines && ask<bool>(&Object::isPinnedPtr, self, data);
  }

  // Without a device or without CUDA torch would throw.
  static std::string configuration(Object* self) {
    return imagines ? "  - CUDA is imagined\n" : ask<std::string>(&Object::showConfig, self);
  }

  static inline Function* original = nullptr;

  Object* object_;
  Function* replaced_;
};

}  // namespace

bool is_imagining() {
  return imagines;
}

std::string problem_with_hooks() {
  return Hooks::has_table() ? "" : "torch's object has no table of the Itanium C++ ABI";
}

Guard::Guard() {
  Hooks::replace();
  auto& entry = c10::impl::device_guard_impl_registry[kCuda];
  // One for each guard that was there. Never deleted: another thread may be inside of it.
  static const Answers* answers = nullptr;
  if (entry.load() != answers || answers == nullptr) {
    if (answers == nullptr || answers->own() != entry.load()) {
      answers = new Answers(entry.load());
    }
    entry.store(answers);
  }
  imagines = true;
  use_stream(0);
  take_uses_of_passes();
}

Guard::~Guard() {
  imagines = false;
  Hooks::restore();
  auto& entry = c10::impl::device_guard_impl_registry[kCuda];
  if (const auto* answers = dynamic_cast<const Answers*>(entry.load())) {
    entry.store(answers->own());
  }
}

}  // namespace pytracer::imagined
