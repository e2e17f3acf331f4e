#include "live.h"

#include "trace_format.h"

#include <algorithm>
#include <iterator>
#include <tuple>

namespace pytracer {
namespace {

constexpr uint64_t kMostOfOneBlock = uint64_t{1} << 42;  // so that no sum overflows

template <typename Values>
auto at_or_zero(const Values& values, size_t row) {
  return row < values.size() ? values[row] : typename Values::value_type{};
}

void raise_to(LivePeak& peak, const LivePeak& other) {
  if (other.bytes > peak.bytes) {
    peak = other;
  }
}

}  // namespace

// ------------------------------------------------------------------ a flush

void Live::take(Recording& flush) {
  take_tables(flush);
  marks_.clear();
  take_scopes(flush);
  std::stable_sort(
      marks_.begin(), marks_.end(), [](const Mark& a, const Mark& b) { return a.ticks < b.ticks; });
  auto next = marks_.begin();
  const auto& events = flush.events;
  for (size_t row = 0; row < events.ticks.size(); ++row) {
    // An event with the same tick as the end of a step still belongs to that step.
    while (next != marks_.end() && next->ticks < events.ticks[row]) {
      apply(*next++);
    }
    take_event(events, row);
  }
  while (next != marks_.end()) {
    apply(*next++);
  }
}

void Live::end() {
  if (may_have_ended_ && step_ends_.end()) {
    close();
  }
}

void Live::take_tables(Recording& flush) {
  if (!flush.meta.empty()) {
    tables_.meta = flush.meta;
  }
  std::move(flush.strings.begin(), flush.strings.end(), std::back_inserter(tables_.strings));
  append_table(tables_.stacks, flush.stacks);
  append_table(tables_.places, flush.places);
  append_table(tables_.labels, flush.labels);
  append_table(tables_.threads, flush.threads);
  for (auto& [name, count] : flush.losses) {
    auto known = std::find_if(tables_.losses.begin(),
                              tables_.losses.end(),
                              [&name = name](const auto& each) { return each.first == name; });
    if (known == tables_.losses.end()) {
      tables_.losses.emplace_back(name, count);
    } else {
      known->second = count;
    }
  }
  // Time is the line through the first reading and the last.
  auto& clock = tables_.clock;
  for (size_t i = 0; i < flush.clock.ticks.size(); ++i) {
    if (clock.ticks.size() == 2) {
      clock.ticks.pop_back();
      clock.unix_ns.pop_back();
    }
    clock.ticks.push_back(flush.clock.ticks[i]);
    clock.unix_ns.push_back(flush.clock.unix_ns[i]);
  }
}

// ------------------------------------------------------------------ steps

void Live::take_scopes(const Recording& flush) {
  const auto& begins = flush.scope_begins;
  for (size_t row = 0; row < begins.ticks.size(); ++row) {
    add_scope(begins, row);
  }
  const auto& ends = flush.scope_ends;
  for (size_t row = 0; row < ends.ticks.size(); ++row) {
    contexts_.erase(ends.scope[row]);
    if (auto found = optimizers_.find(ends.scope[row]); found != optimizers_.end()) {
      marks_.push_back({ends.ticks[row], Mark::kOptimizer, found->second});
      optimizers_.erase(found);
    }
  }
}

const Live::Scope* Live::find_scope(uint32_t number) const {
  const Scope& recent = recent_[number % kRecent];
  if (number == 0 || recent.number == number) {
    return number == 0 ? nullptr : &recent;
  }
  auto found = contexts_.find(number);
  return found == contexts_.end() ? nullptr : &found->second;
}

// Whether a forward may begin there: on the main thread, outside of modules and backward passes.
bool Live::begins_forward(const Scope* scope) const {
  return scope == nullptr ||
         (scope->thread == main_thread_ && !scope->in_module && !scope->in_pass);
}

void Live::add_scope(const Recording::ScopeBegins& rows, size_t row) {
  auto kind = static_cast<ScopeKind>(rows.kind[row]);
  Scope scope{rows.ticks[row], ++scopes_, rows.thread[row]};
  if (const Scope* parent = find_scope(rows.parent[row])) {
    scope.in_module = parent->in_module;
    scope.in_pass = parent->in_pass;
  }
  choose_main_thread(kind, scope);
  bool is_pass = kind == ScopeKind::kNode || kind == ScopeKind::kBackward;
  if (kind == ScopeKind::kStep) {
    marks_.push_back({scope.ticks, Mark::kStep, 0});
  } else if (kind == ScopeKind::kModule && begins_forward(&scope)) {
    marks_.push_back({scope.ticks, Mark::kForward, scope.ticks});
  } else if (kind == ScopeKind::kOptimizer && optimizers_.size() < kMostOpen) {
    optimizers_.emplace(scope.number, rows.name[row]);
  } else if (is_pass && rows.forward[row] != 0) {
    const Scope* forward = find_scope(rows.forward[row]);
    if (forward != nullptr && begins_forward(forward)) {
      marks_.push_back({scope.ticks, Mark::kForward, forward->ticks});
    }
  }
  scope.in_module |= kind == ScopeKind::kModule;
  scope.in_pass |= is_pass;
  if (kind != ScopeKind::kOp && kind != ScopeKind::kStep && contexts_.size() < kMostOpen) {
    contexts_.emplace(scope.number, scope);
  }
  recent_[scope.number % kRecent] = scope;
}

// The thread that calls backward. If there is none, the one whose optimizer steps; if there is none
// either, the one that calls modules.
void Live::choose_main_thread(ScopeKind kind, const Scope& scope) {
  int rank = scope.in_pass                   ? 0
             : kind == ScopeKind::kBackward  ? 3
             : kind == ScopeKind::kOptimizer ? 2
             : kind == ScopeKind::kModule    ? 1
                                             : 0;
  if (rank > main_thread_rank_) {
    main_thread_rank_ = rank;
    main_thread_ = scope.thread;
  }
}

void Live::apply(const Mark& mark) {
  switch (mark.kind) {
    case Mark::kStep:
      marked_steps_ = true;
      may_end(mark.ticks);
      close();
      break;
    case Mark::kForward:
      if (mark.about > end_ticks_ && step_ends_.forward() && may_have_ended_) {
        close();
      }
      break;
    case Mark::kOptimizer:
      if (marked_steps_) {
        break;
      }
      if (step_ends_.stepped(mark.about) && may_have_ended_) {
        close();
      }
      may_end(mark.ticks);
      break;
  }
}

// The step has ended, or the step before goes on: what follows shows which.
void Live::may_end(uint64_t ticks) {
  for (Device& device : devices_) {
    raise_to(device.until, device.since);
    device.end = device.shown.now;
    device.since = {device.end, ticks, 0};
  }
  may_have_ended_ = true;
  end_ticks_ = ticks;
}

void Live::close() {
  LiveStep done{step_, end_ticks_, {}, {}};
  for (Device& device : devices_) {
    device.until.step = step_;
    raise_to(device.shown.peak, device.until);
    done.peaks.push_back(device.until.bytes);
    done.ends.push_back(device.end);
    device.until = {device.end, end_ticks_, 0};
  }
  steps_.push_back(std::move(done));
  if (steps_.size() > kMostSteps) {
    steps_.pop_front();
  }
  ++step_;
  may_have_ended_ = false;
}

// ------------------------------------------------------------------ bytes

uint32_t Live::device_of(uint16_t place) {
  auto type = static_cast<uint8_t>(at_or_zero(tables_.places.device_type, place));
  auto index = static_cast<uint8_t>(at_or_zero(tables_.places.device_index, place));
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (devices_[i].shown.type == type && devices_[i].shown.index == index) {
      return static_cast<uint32_t>(i);
    }
  }
  devices_.push_back(
      {.shown = {.type = type, .index = index, .peak = {}}, .until = {}, .since = {}});
  return static_cast<uint32_t>(devices_.size() - 1);
}

void Live::take_event(const Recording::Events& rows, size_t row) {
  ++events_;
  last_ticks_ = std::max(last_ticks_, rows.ticks[row]);
  uint64_t address = rows.address[row];
  switch (static_cast<Action>(rows.action[row])) {
    case Action::kAlloc:
      let_go(address, rows.ticks[row]);  // if a block lived there, it ended unseen
      make(rows, row);
      break;
    case Action::kSeed:
      if (!live_.contains(address)) {
        make(rows, row);
      }
      break;
    case Action::kFreeCompleted:
      let_go(address, rows.ticks[row]);
      break;
    case Action::kSnapshot:
      start_device(device_of(rows.place[row]));
      break;
    case Action::kSegmentAlloc:
    case Action::kSegmentMap:
    case Action::kSeedSegment:
      devices_[device_of(rows.place[row])].shown.reserved += static_cast<int64_t>(rows.bytes[row]);
      break;
    case Action::kSegmentFree:
    case Action::kSegmentUnmap:
      devices_[device_of(rows.place[row])].shown.reserved -= static_cast<int64_t>(rows.bytes[row]);
      break;
    case Action::kOom:
      failed_bytes_ = rows.bytes[row];
      break;
    case Action::kFreeRequested:
    case Action::kLabel:
    case Action::kSaved:
      break;
  }
}

// The device's recording starts here: earlier events do not belong to it.
void Live::start_device(uint32_t number) {
  std::erase_if(live_, [number](const auto& each) { return each.second.device == number; });
  Device& device = devices_[number];
  device = {.shown = {.type = device.shown.type, .index = device.shown.index, .peak = {}},
            .until = {},
            .since = {}};
}

void Live::make(const Recording::Events& rows, size_t row) {
  auto bytes = static_cast<int64_t>(std::min(rows.bytes[row], kMostOfOneBlock));
  Block block{bytes, device_of(rows.place[row])};
  live_[rows.address[row]] = block;
  change(block.device, block.bytes, rows.ticks[row]);
}

void Live::let_go(uint64_t address, uint64_t ticks) {
  if (auto found = live_.find(address); found != live_.end()) {
    change(found->second.device, -found->second.bytes, ticks);
    live_.erase(found);
  }
}

void Live::change(uint32_t number, int64_t bytes, uint64_t ticks) {
  Device& device = devices_[number];
  device.shown.now += bytes;
  raise_to(device.since, {device.shown.now, ticks, 0});
}

// ------------------------------------------------------------------ what is shown

std::vector<LiveDevice> Live::devices() const {
  std::vector<LiveDevice> shown;
  for (const Device& device : devices_) {
    LiveDevice& row = shown.emplace_back(device.shown);
    LivePeak open = device.until;
    raise_to(open, device.since);
    open.step = step_;
    raise_to(row.peak, open);
  }
  return shown;
}

size_t Live::main_device() const {
  std::vector<LiveDevice> all = devices();
  size_t best = 0;
  auto matters = [&](size_t i) { return std::tuple(all[i].type != 0, all[i].peak.bytes); };
  for (size_t i = 1; i < all.size(); ++i) {
    best = matters(i) > matters(best) ? i : best;
  }
  return best;
}

}  // namespace pytracer
