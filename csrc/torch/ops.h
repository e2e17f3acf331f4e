// The op stack: torch's RecordFunction calls back when operators, autograd nodes and annotations
// begin and end.
#pragma once

#include <cstdint>
#include <string>

namespace at {
struct RecordFunction;
}

namespace pytracer::ops {

enum class Detail {
  kSteps,     // only optimizers' steps, and only to count them: while one runs, if that can be seen
  kCategory,  // annotations: optimizer steps, DataLoader, FSDP
  kOp,        // these, and operators and nodes
};

// Installing again, also with another detail, replaces the earlier callback.
void install(Detail detail);
void uninstall();
bool installed();
// Whether operators are recorded wherever they run.
bool records_operators();
// An operator that has been pushed ends.
void leave_operator(const at::RecordFunction& fn);

// Around an outermost backward pass. Turns RecordFunction off for this thread and the engine's when
// nobody else listens and `is_possible`: the pass runs only torch's own nodes (graph.h). Such a
// pass computes gradients, and every allocation in it counts as its node's, not as an operator's.
// So each allocation asks the engine for its current node. RecordFunction costs a host-bound step
// several percent, most of it torch's own. If no operators are recorded, all of the pass is one
// scope, but the engine takes over a thread's callbacks twice a node, 1,000 instructions each time.
class QuietBackward {
 public:
  explicit QuietBackward(bool is_possible);
  ~QuietBackward();
  QuietBackward(const QuietBackward&) = delete;
  QuietBackward& operator=(const QuietBackward&) = delete;

 private:
  bool quiet_;
};

// Around a module or another pass that a quiet pass runs unexpectedly: turns RecordFunction on
// again for as long as that lasts. No later pass is quiet.
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

// A recording begins: backward passes may be quiet, until one runs more than nodes.
void allow_quiet_passes();
// No later pass of this recording is quiet.
void forbid_quiet_passes();
uint64_t quiet_passes();

}  // namespace pytracer::ops
