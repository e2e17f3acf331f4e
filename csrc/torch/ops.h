// The op stack: torch's RecordFunction tells when operators, autograd nodes and annotations are
// entered and left.
#pragma once

namespace pytracer::ops {

enum class Detail { kCategory, kOp };

// Annotations (optimizer steps, DataLoader, FSDP) always; operators and nodes with kOp.
// What an operator that computes calls in its turn is heard of only `with_helpers`: where tensor
// subclasses communicate inside of operators. Installing again replaces what was there.
void install(Detail detail, bool with_helpers);
void uninstall();
bool installed();

}  // namespace pytracer::ops
