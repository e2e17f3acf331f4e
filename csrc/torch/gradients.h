// Gradients that do not outlive their backward pass: a hook steps with each and lets it go (LOMO,
// an optimizer in backward), or FSDP reduces it to a shard. After the pass nobody could see them.
#pragma once

#include <ATen/record_function.h>

namespace pytracer::gradients {

// While it lives, the calling thread and the engine's that work for it say of each gradient that
// it is one, as soon as it is a parameter's: when a hook begins to use it, or its node is left.
class Watch {
 public:
  explicit Watch(bool wanted);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace pytracer::gradients
