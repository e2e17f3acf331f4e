// The op stack: torch's RecordFunction tells when operators, autograd nodes and annotations are
// entered and left.
#pragma once

#include <cstdint>
#include <string>

namespace at {
struct RecordFunction;
}

namespace pytracer::ops {

enum class Detail {
  kSteps,     // optimizers' steps only, and only to count them
  kCategory,  // annotations: optimizer steps, DataLoader, FSDP
  kOp,        // and operators and nodes
};

// Installing twice, or with another detail, replaces what was there.
void install(Detail detail);
void uninstall();
bool installed();
// Whether they are recorded wherever they run.
bool records_operators();
// One that has been pushed is over.
void leave_operator(const at::RecordFunction& fn);

// Around an outermost backward pass. Turns RecordFunction off for this thread and the engine's when
// nobody else listens, if that is possible because the pass runs only torch's own nodes (graph.h):
// it computes gradients, and an operator inside of a node is not told apart anyway. Allocations are
// then attributed by asking the engine for its current node. Listening costs a host-bound step
// several percent, most of it torch's own.
class QuietBackward {
 public:
  explicit QuietBackward(bool is_possible);
  ~QuietBackward();
  QuietBackward(const QuietBackward&) = delete;
  QuietBackward& operator=(const QuietBackward&) = delete;

 private:
  bool quiet_;
};

// Around what a quiet pass turns out to run all the same (a module, another pass): turns
// RecordFunction on again for as long as it lasts. No later pass is quiet.
class ResumeRecordFunction {
 public:
  ResumeRecordFunction();
  ~ResumeRecordFunction();
  ResumeRecordFunction(const ResumeRecordFunction&) = delete;  // its address is the node's key
  ResumeRecordFunction& operator=(const ResumeRecordFunction&) = delete;

 private:
  std::string node_;
  bool inside_;
};

// A recording begins: backward passes may be quiet until one turns out to run more than nodes.
void allow_quiet_passes();
// No later pass of this recording is quiet.
void forbid_quiet_passes();
uint64_t quiet_passes();

}  // namespace pytracer::ops
