#include "gradients.h"

#include "../core/recorder.h"
#include "labels.h"
#include "private_torch.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <memory>
#include <string_view>

namespace pytracer::gradients {

namespace {

void label_gradient() {
  auto node = torch::autograd::get_current_node();
  auto* accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get());
  if (accumulate == nullptr) {
    return;
  }
  const at::Tensor& gradient = labels::gradient_of(accumulate->variable);
  if (gradient.defined()) {
    labels::record(gradient, labels::number_of(labels::kGradients, "parameter", "", gradient));
  }
}

struct InNode final : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& fn) {
  if (fn.name() == std::string_view(private_torch::kAccumulateGrad)) {
    return std::make_unique<InNode>();
  }
  label_gradient();  // perhaps an operator of a hook
  return nullptr;
}

void leave(const at::RecordFunction& /*fn*/, at::ObserverContext* in_node) {
  if (in_node != nullptr) {
    label_gradient();
  }
}

}  // namespace

// Thread-local callbacks go with a thread's work to the engine's threads. Global ones would get
// other threads' operators, too.
Watch::Watch(bool wanted) {
  if (wanted) {
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&enter, &leave).scopes({at::RecordScope::FUNCTION}));
  }
}

Watch::~Watch() {
  if (handle_ != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(handle_);
  }
}

}  // namespace pytracer::gradients
