// The op stack: torch's RecordFunction tells when operators, autograd nodes and annotations are
// entered and left.
#pragma once

namespace pytracer::ops {

enum class Detail { kCategory, kOp };

// Annotations (optimizer steps, DataLoader, FSDP) always; operators and nodes with kOp.
// Installing twice, or with another detail, replaces what was there.
void install(Detail detail);
void uninstall();
bool installed();

}  // namespace pytracer::ops
