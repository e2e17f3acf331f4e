// The op stack: torch's RecordFunction tells when operators, autograd nodes and annotations are
// entered and left.
#pragma once

#include <cstdint>
#include <string>

namespace pytracer::ops {

enum class Detail { kCategory, kOp };

// Annotations (optimizer steps, DataLoader, FSDP) always; operators and nodes with kOp.
// Installing twice, or with another detail, replaces what was there.
void install(Detail detail);
void uninstall();
bool installed();

// Around an outermost backward pass, which is then not told of operators if it can do without:
// torch asks nobody else about them, and the passes heard so far ran nothing but torch's own nodes,
// in which an operator is not told apart anyway. Nodes are asked for instead, at each event.
// Hearing costs a host-bound step several percent, most of it torch's own.
class Pass {
 public:
  explicit Pass(bool may_be_quiet);
  ~Pass();
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

 private:
  bool quiet_;
  bool enabled_;  // the thread's switch, before
};

// Around what a quiet pass turns out to run all the same: a module, another pass. Those after it
// are heard.
class Heard {
 public:
  Heard();
  ~Heard();
  Heard(const Heard&) = delete;  // its address is the node's key
  Heard& operator=(const Heard&) = delete;

 private:
  std::string node_;
  bool inside_;
};

// A recording begins: nothing has been heard yet.
void forget_passes();
uint64_t passes_not_heard();
// Something was run in a backward pass that must be heard.
void hear_passes();

}  // namespace pytracer::ops
