// Gradients that do not outlive their backward pass: a hook steps with each and frees it (LOMO, an
// optimizer in backward), or FSDP reduces it to a shard. After the pass they are gone.
#pragma once

#include <ATen/record_function.h>

namespace pytracer::gradients {

// While it lives, each gradient gets its label as soon as it is a parameter's: when a hook begins
// to use it, or when its node ends. That holds for the calling thread and for the engine's threads
// that work for it.
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
