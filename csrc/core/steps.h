// Where a step ends: the steps of a program as people count them. A GAN's two optimizers make one.
//
// An iteration is over when an optimizer steps for the second time in it. Often its end is known
// earlier: when, so far, only such optimizers have followed the one that stepped last.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

namespace pytracer {

class Iterations {
 public:
  // An optimizer has stepped. Returns whether an iteration was over before this step: the optimizer
  // had stepped in it already, and a forward has begun since the last step.
  bool stepped(uint64_t optimizer, bool forward_since) {
    if (any_) {
      std::set<uint64_t>& known = followers_[last_];
      if (known.size() < kMost) {
        known.insert(optimizer);
      }
    }
    bool over = forward_since && now_.contains(optimizer);
    if (over) {
      now_.clear();
    }
    if (now_.size() < kMost) {
      now_.insert(optimizer);
    }
    last_ = optimizer;
    any_ = true;
    return over;
  }

  // About the optimizers that have followed the last one so far: whether there are any, whether all
  // of them have stepped in this iteration, or none of them.
  bool is_first() const { return followers() == nullptr; }

  bool is_over() const { return !is_first() && have_stepped() == followers()->size(); }

  bool goes_on() const { return !is_first() && have_stepped() == 0; }

  bool has_begun() const { return !now_.empty(); }

  void close() { now_.clear(); }

  // The optimizer steps no more. Another one may get its number.
  void forget(uint64_t optimizer) {
    now_.erase(optimizer);
    followers_.erase(optimizer);
    for (auto& [_, known] : followers_) {
      known.erase(optimizer);
    }
    std::erase_if(followers_, [](const auto& entry) { return entry.second.empty(); });
    any_ = any_ && last_ != optimizer;
  }

 private:
  static constexpr size_t kMost = 64;  // a file with greater numbers is damaged

  const std::set<uint64_t>* followers() const {
    auto found = followers_.find(last_);
    return found == followers_.end() ? nullptr : &found->second;
  }

  size_t have_stepped() const {
    size_t count = 0;
    for (uint64_t optimizer : *followers()) {
      count += now_.count(optimizer);
    }
    return count;
  }

  std::set<uint64_t> now_;  // the optimizers that have stepped in this iteration
  std::unordered_map<uint64_t, std::set<uint64_t>> followers_;
  uint64_t last_ = 0;
  bool any_ = false;
};

// Tells which optimizers' steps end an iteration, as the program runs.
class StepEnds {
 public:
  // A forward begins. Returns whether the last optimizer's step ended an iteration.
  bool forward() {
    forward_since_ = true;
    bool over = is_open_ && iterations_.is_over();
    if (over) {
      iterations_.close();
      is_open_ = false;
    }
    return over;
  }

  // An optimizer has stepped. Returns whether the optimizer's step before ended an iteration.
  bool stepped(uint64_t optimizer) {
    bool over = iterations_.stepped(optimizer, forward_since_) && is_open_;
    forward_since_ = false;
    is_open_ = true;
    return over;
  }

  // The program is over. Returns whether the last optimizer's step ended an iteration; if not, the
  // iteration was cut short.
  bool end() const { return is_open_ && !iterations_.goes_on(); }

 private:
  Iterations iterations_;
  bool forward_since_ = false;
  bool is_open_ = false;  // an optimizer has stepped since the last end
};

// The optimizers' steps that end an iteration. For each step: which optimizer, and whether a
// forward began since the step before.
inline std::vector<size_t> step_ends(std::span<const uint64_t> optimizers,
                                     std::span<const uint8_t> has_forward) {
  StepEnds steps;
  std::vector<size_t> ends;
  for (size_t i = 0; i < std::min(optimizers.size(), has_forward.size()); ++i) {
    bool over = has_forward[i] != 0 && steps.forward();
    if (steps.stepped(optimizers[i]) || over) {
      ends.push_back(i - 1);
    }
  }
  if (steps.end()) {
    ends.push_back(optimizers.size() - 1);
  }
  return ends;
}

}  // namespace pytracer
