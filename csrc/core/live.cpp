#include "live.h"

#include "trace_format.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <tuple>

namespace pytracer {
namespace {

// The numbers of pytracer/schema.py's categories.
enum Category : uint8_t {
  kUnknown,
  kWeights,
  kGradients,
  kOptimizerState,
  kActivations,
  kTemporaries,
  kInputs,
  kWorkspaces,
  kCommunication,
  kGraphPools,
  kFunctional,
};

// If a block has several labels, the leftmost of these counts.
constexpr std::array<uint8_t, 10> kLabelOrder = {kWeights,
                                                 kGradients,
                                                 kOptimizerState,
                                                 kInputs,
                                                 kActivations,
                                                 kWorkspaces,
                                                 kCommunication,
                                                 kGraphPools,
                                                 kFunctional,
                                                 kTemporaries};

constexpr uint32_t kNone = UINT32_MAX;
constexpr uint64_t kMostOfOneBlock = uint64_t{1} << 42;  // so that no sum overflows

int rank_of(uint8_t label) {
  auto found = std::find(kLabelOrder.begin(), kLabelOrder.end(), label);
  return static_cast<int>(found - kLabelOrder.begin());
}

template <class Table>
void append_table(Table& to, const Table& from) {
  Table::each_column(
      [](const auto&, auto& into, const auto& rows) {
        into.insert(into.end(), rows.begin(), rows.end());
      },
      to,
      from);
}

bool names_collective(std::string_view text) {
  bool is = text.starts_with("c10d::") || text.starts_with("_c10d_functional::") ||
            text.starts_with("nccl:") || text.starts_with("gloo:");
  if (text.starts_with("FSDP::")) {
    is = text.find("all_gather") != text.npos || text.find("prefetch") != text.npos ||
         text.find("reduce") != text.npos || text.find("::pre_forward") != text.npos ||
         text.find("::pre_backward") != text.npos;
  }
  return is;
}

// These ops allocate for the op around them.
bool names_factory(std::string_view text) {
  if (!text.starts_with("aten::")) {
    return false;
  }
  text.remove_prefix(6);
  if (text == "resize_") {
    return true;
  }
  if (text.starts_with("new_")) {
    text.remove_prefix(4);
  }
  return text == "empty" || text == "empty_like" || text == "empty_strided" ||
         text == "empty_permuted";
}

bool names_matrix_product(std::string_view text) {
  constexpr std::array<std::string_view, 9> kProducts = {"aten::mm",
                                                         "aten::addmm",
                                                         "aten::bmm",
                                                         "aten::baddbmm",
                                                         "aten::_scaled_mm",
                                                         "MmBackward0",
                                                         "AddmmBackward0",
                                                         "BmmBackward0",
                                                         "BaddbmmBackward0"};
  return std::find(kProducts.begin(), kProducts.end(), text) != kProducts.end();
}

bool is_scratch_size(int64_t bytes) {
  return bytes == 32 << 20 || bytes == 8'519'680 || bytes == 4 << 20 || bytes == 1 << 20;
}

template <typename Values>
auto at_or_zero(const Values& values, size_t row) {
  return row < values.size() ? values[row] : typename Values::value_type{};
}

void add_to(std::vector<int64_t>& sums, uint32_t row, int64_t bytes) {
  if (row >= sums.size()) {
    sums.resize(row + 1);
  }
  sums[row] += bytes;
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
    while (next != marks_.end() && next->ticks <= events.ticks[row]) {
      apply(*next++);
    }
    take_event(events, row);
  }
  while (next != marks_.end()) {
    apply(*next++);
  }
  resolve_lines();
  if (moves_.size() > kMostMoves) {  // a program without steps
    if (pending_) {
      close(pending_moves_, true, pending_ticks_);
      iterations_.close();
    }
    pending_ = false;
    close(moves_.size(), false, last_ticks_);
  }
}

void Live::end() {
  over_ = true;
  if (pending_ && !iterations_.goes_on()) {
    close(pending_moves_, true, pending_ticks_);
  }
  settle_the_provisional();
}

void Live::take_tables(Recording& flush) {
  if (!flush.meta.empty()) {
    tables_.meta = flush.meta;
  }
  for (const std::string& text : flush.strings) {
    is_collective_.push_back(names_collective(text));
    is_factory_.push_back(names_factory(text));
    is_product_.push_back(names_matrix_product(text));
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

// ------------------------------------------------------------------ scopes

void Live::take_scopes(const Recording& flush) {
  const auto& begins = flush.scope_begins;
  for (size_t row = 0; row < begins.ticks.size(); ++row) {
    add_scope(begins, row);
  }
  const auto& ends = flush.scope_ends;
  for (size_t row = 0; row < ends.ticks.size(); ++row) {
    end_scope(ends.scope[row], ends.stack[row], ends.ticks[row]);
  }
}

Live::Scope* Live::find_scope(uint32_t number) {
  Scope& recent = recent_[number % kRecent];
  if (number == 0 || recent.number == number) {
    return number == 0 ? nullptr : &recent;
  }
  auto found = open_.find(number);
  return found == open_.end() ? nullptr : &found->second;
}

void Live::add_scope(const Recording::ScopeBegins& rows, size_t row) {
  Scope scope;
  scope.number = ++scopes_;
  scope.parent = rows.parent[row];
  scope.thread = rows.thread[row];
  bool known = rows.kind[row] < kScopeKinds;
  scope.kind = known ? static_cast<ScopeKind>(rows.kind[row]) : ScopeKind::kUser;
  // A number that points nowhere could make tables of any length.
  uint32_t name = rows.name[row] < tables_.strings.size() ? rows.name[row] : 0;
  if (Scope* parent = find_scope(scope.parent)) {
    scope.module = parent->module;
    scope.op = parent->op;
    scope.root = parent->root;
    scope.outer = parent->outer;
    scope.caused = parent->caused;
    scope.phase = parent->phase;
    scope.in_pass = parent->in_pass;
    scope.in_node = parent->in_node;
    scope.communicates = parent->communicates;
    scope.has_module = parent->has_module;
  }
  auto says = [&](LivePhase phase) { scope.phase = static_cast<uint8_t>(phase); };
  bool outermost = !scope.in_pass && !scope.has_module;
  switch (scope.kind) {
    case ScopeKind::kOp:
      ops_seen_ = true;
      scope.outer = scope.outer == 0 ? scope.number : scope.outer;
      scope.op = at_or_zero(is_factory_, name) && scope.op != 0 ? scope.op : name;
      scope.communicates |= at_or_zero(is_collective_, name) != 0;
      if ((rows.flags[row] & kScopeGrad) != 0) {
        if (Scope* root = find_scope(scope.root)) {
          root->with_grad = true;
        }
      }
      if (scope.in_node && (rows.flags[row] & kScopeRecompute) != 0) {
        says(LivePhase::kRecompute);
      }
      break;
    case ScopeKind::kNode:
      nodes_seen_ = true;
      scope.outer = 0;
      scope.op = name;
      scope.in_pass = scope.in_node = true;
      says(LivePhase::kBackward);
      if (Scope* forward = find_scope(rows.forward[row])) {
        scope.caused = forward->module;
        scope.outer = forward->outer;
      }
      break;
    case ScopeKind::kBackward:
      scope.in_pass = true;
      says(LivePhase::kBackward);
      break;
    case ScopeKind::kModule:
      says(scope.in_pass ? LivePhase::kRecompute : LivePhase::kForward);
      scope.root = scope.root == 0 ? scope.number : scope.root;
      scope.module = name;
      scope.has_module = true;
      break;
    case ScopeKind::kOptimizer:
      says(LivePhase::kOptimizer);
      scope.name = name;
      break;
    case ScopeKind::kUser:
      scope.communicates |= at_or_zero(is_collective_, name) != 0;
      if (at_or_zero(tables_.strings, name).starts_with("enumerate(DataLoader)")) {
        says(LivePhase::kData);
      }
      break;
    case ScopeKind::kStep:
      scope.ended = true;
      break;
  }
  Scope& place = recent_[scope.number % kRecent];
  if (place.number != 0 && !place.ended && place.kind != ScopeKind::kOp) {
    if (open_.size() >= kMostOpen) {
      open_.erase(open_.begin());
    }
    open_.emplace(place.number, place);
  }
  place = scope;
  choose_main_thread(scope);
  bool is_data = scope.kind == ScopeKind::kUser &&
                 scope.phase == static_cast<uint8_t>(LivePhase::kData) && outermost;
  bool turns = scope.kind == ScopeKind::kModule || scope.kind == ScopeKind::kOptimizer ||
               scope.kind == ScopeKind::kBackward;
  bool on_main = scope.thread == main_thread_ && outermost && (turns || is_data);
  if (on_main || scope.kind == ScopeKind::kStep) {
    marks_.push_back({rows.ticks[row], scope.number, scope.kind, true});
    place.root = scope.kind == ScopeKind::kModule ? scope.number : place.root;
  }
}

// The thread that trains: the one that calls backward. If there is none, the one whose optimizer
// steps; if there is none either, the one that calls modules.
void Live::choose_main_thread(const Scope& scope) {
  int rank = scope.kind == ScopeKind::kBackward && !scope.in_node ? 3
             : scope.kind == ScopeKind::kOptimizer                ? 2
             : scope.kind == ScopeKind::kModule                   ? 1
                                                                  : 0;
  bool trains = rank > 0 || scope.kind == ScopeKind::kNode;
  if (trains && scope.thread >= trains_.size()) {
    trains_.resize(scope.thread + size_t{1});
  }
  if (trains) {
    trains_[scope.thread] = 1;
  }
  if (rank > main_thread_rank_) {
    main_thread_rank_ = rank;
    main_thread_ = scope.thread;
  }
}

void Live::end_scope(uint32_t number, uint32_t stack, uint64_t ticks) {
  Scope* scope = find_scope(number);
  if (scope == nullptr) {
    return;
  }
  scope->ended = true;
  scope->line = stack < tables_.stacks.parent.size() ? stack : 0;
  if (is_mark(*scope)) {
    marks_.push_back({ticks, number, scope->kind, false});
  }
  if (recent_[number % kRecent].number != number) {
    // Its end is a mark that is not applied yet: the next flush brings it.
    if (!is_mark(*scope)) {
      open_.erase(number);
    }
  }
}

// Whether it is one of the main thread's outermost scopes.
bool Live::is_mark(const Scope& scope) {
  if (scope.thread != main_thread_) {
    return false;
  }
  Scope* parent = find_scope(scope.parent);
  bool outermost = parent == nullptr || (!parent->in_pass && !parent->has_module);
  bool is_data =
      scope.kind == ScopeKind::kUser && scope.phase == static_cast<uint8_t>(LivePhase::kData);
  return outermost && (scope.kind == ScopeKind::kModule || scope.kind == ScopeKind::kOptimizer ||
                       scope.kind == ScopeKind::kBackward || is_data);
}

Live::Interval Live::new_interval(LivePhase phase) {
  Interval made{phase, ++intervals_};
  kept_[made.number % kRecent] = 0;
  return made;
}

bool Live::is_kept(uint32_t interval) const {
  return kept_[interval % kRecent] != 0;
}

// The rules of pytracer/analysis/facts/phases.py, one mark at a time.
void Live::apply(const Mark& mark) {
  auto close_pending = [&] {
    if (pending_ && !marked_steps_) {
      close(pending_moves_, true, pending_ticks_);
    }
    pending_ = false;
  };
  auto go_forward = [&] {
    went_forward_ = true;
    if (pending_ && iterations_.is_over()) {
      close_pending();
      iterations_.close();
    }
  };
  auto go_on_around = [&] {
    around_ = around_.phase == LivePhase::kOptimizer ? around_ : new_interval(LivePhase::kOther);
    interval_ = around_;
  };
  Scope* scope = find_scope(mark.scope);
  switch (mark.kind) {
    case ScopeKind::kStep:
      marked_steps_ = true;
      pending_ = false;
      close(moves_.size(), true, mark.ticks);
      break;
    case ScopeKind::kBackward:
      if (mark.begins) {
        if (forward_.number != 0) {
          kept_[forward_.number % kRecent] = 1;
        }
        go_forward();
        interval_ = new_interval(LivePhase::kBackward);
      } else {
        go_on_around();
      }
      forward_ = {};
      break;
    case ScopeKind::kOptimizer:
      forward_ = {};
      around_ = new_interval(mark.begins ? LivePhase::kOptimizer : LivePhase::kOther);
      interval_ = around_;
      if (!mark.begins && !marked_steps_) {
        if (iterations_.stepped(scope == nullptr ? 0 : scope->name, went_forward_)) {
          close_pending();
        }
        went_forward_ = false;
        pending_ = true;
        pending_moves_ = moves_.size();
        pending_ticks_ = mark.ticks;
      }
      break;
    case ScopeKind::kModule:
      if (mark.begins && forward_.number == 0) {
        go_forward();
        forward_ = interval_ = new_interval(LivePhase::kForward);
      } else if (!mark.begins && ops_seen_ && scope != nullptr && !scope->with_grad &&
                 interval_.number == forward_.number) {
        forward_ = {};  // no graph was made: no backward follows
        go_on_around();
      }
      break;
    default:
      if (mark.begins) {
        before_data_ = interval_;
        interval_ = new_interval(LivePhase::kData);
      } else {
        interval_ = before_data_;
      }
  }
  if (!mark.begins) {
    open_.erase(mark.scope);
  }
}

// ------------------------------------------------------------------ events

uint32_t Live::device_of(uint16_t place) {
  uint8_t type = at_or_zero(tables_.places.device_type, place);
  uint8_t index = type == 0 ? uint8_t{0} : at_or_zero(tables_.places.device_index, place);
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (devices_[i].type == type && devices_[i].index == index) {
      return static_cast<uint32_t>(i);
    }
  }
  devices_.push_back(
      {.type = type, .index = index, .now_by_category = {}, .peak = {}, .last_peak = {}});
  base_.emplace_back();
  return static_cast<uint32_t>(devices_.size() - 1);
}

LivePhase Live::phase_of(uint32_t number, uint16_t thread) {
  Scope* scope = find_scope(number);
  if (scope != nullptr && scope->phase != kUnsaid) {
    auto said = static_cast<LivePhase>(scope->phase);
    // Inside a step the main thread may run a closure: forward, loss, backward.
    bool in_closure = said == LivePhase::kOptimizer && thread == main_thread_ && !scope->in_pass;
    return in_closure ? interval_.phase : said;
  }
  if (thread != main_thread_ && nodes_seen_ && at_or_zero(trains_, thread) == 0) {
    return LivePhase::kOther;  // the thread takes no part in the training
  }
  return interval_.phase;
}

void Live::take_event(const Recording::Events& rows, size_t row) {
  ++events_;
  last_ticks_ = std::max(last_ticks_, rows.ticks[row]);
  uint64_t address = rows.address[row];
  switch (static_cast<Action>(rows.action[row])) {
    case Action::kAlloc:
      make(rows, row, false);
      break;
    case Action::kSeed:
      if (!live_.contains(address)) {
        make(rows, row, true);
      }
      break;
    case Action::kFreeRequested:
    case Action::kFreeCompleted:
      if (auto found = live_.find(address); found != live_.end()) {
        let_go(found->second, rows.scope[row], rows.ticks[row]);
      }
      break;
    case Action::kLabel:
      label(address, rows.bytes[row]);
      break;
    case Action::kSaved:
      if (uint32_t block = find_block(address); block != kNone && !blocks_[block].saved) {
        blocks_[block].saved = true;
        settle_again(blocks_[block]);
      }
      break;
    case Action::kSnapshot:
      start_device(device_of(rows.place[row]));
      break;
    case Action::kSegmentAlloc:
    case Action::kSegmentMap:
    case Action::kSeedSegment:
      devices_[device_of(rows.place[row])].reserved += static_cast<int64_t>(rows.bytes[row]);
      break;
    case Action::kSegmentFree:
    case Action::kSegmentUnmap:
      devices_[device_of(rows.place[row])].reserved -= static_cast<int64_t>(rows.bytes[row]);
      break;
    case Action::kOom:
      failed_bytes_ = rows.bytes[row];
      break;
  }
}

// The device's recording starts here: earlier events do not belong to it.
void Live::start_device(uint32_t device) {
  devices_[device].reserved = 0;
  std::vector<uint32_t> here;
  for (const auto& [address, block] : live_) {
    if (blocks_[block].device == device) {
      here.push_back(block);
    }
  }
  for (uint32_t block : here) {
    let_go(block, 0, last_ticks_);
  }
}

void Live::make(const Recording::Events& rows, size_t row, bool seed) {
  uint64_t address = rows.address[row];
  if (auto found = live_.find(address); found != live_.end()) {
    let_go(found->second, 0, rows.ticks[row]);  // it ended unseen
  }
  Block block;
  block.address = address;
  block.bytes = static_cast<int64_t>(std::min(rows.bytes[row], kMostOfOneBlock));
  block.device = device_of(rows.place[row]);
  block.from_before = seed;
  block.interval = interval_.number;
  block.in_pool = at_or_zero(tables_.places.pool_high, rows.place[row]) != 0 ||
                  at_or_zero(tables_.places.pool_low, rows.place[row]) != 0;
  block.phase = phase_of(rows.scope[row], rows.thread[row]);
  if (Scope* scope = seed ? nullptr : find_scope(rows.scope[row])) {
    block.module = scope->module != 0 ? scope->module : scope->caused;
    block.op = scope->op;
    block.op_scope = rows.scope[row];
    block.outer = scope->outer;
    block.communicates = scope->communicates;
    if (is_scratch_size(block.bytes) && !moves_.empty()) {
      const Block& last = blocks_[moves_.back().block];
      Scope* its = find_scope(last.op_scope);
      block.second = its != nullptr && its->op == scope->op &&
                     (its->outer == scope->outer || last.op_scope == block.op_scope);
    }
  }
  uint32_t number = 0;
  if (free_rows_.empty()) {
    number = static_cast<uint32_t>(blocks_.size());
    blocks_.push_back(block);
  } else {
    number = free_rows_.back();
    free_rows_.pop_back();
    blocks_[number] = block;
  }
  live_[address] = number;
  in_order_ = false;
  devices_[block.device].now += block.bytes;
  moves_.push_back({rows.ticks[row], number, false, interval_.phase});
}

void Live::let_go(uint32_t number, uint32_t scope, uint64_t ticks) {
  Block& block = blocks_[number];
  block.alive = false;
  block.freed_interval = interval_.number;
  Scope* by = find_scope(scope);
  block.by_node =
      ops_seen_ ? by != nullptr && by->in_node : interval_.phase == LivePhase::kBackward;
  live_.erase(block.address);
  devices_[block.device].now -= block.bytes;
  moves_.push_back({ticks, number, true, interval_.phase});
}

// The block that starts there; failing that, the one with the nearest start below, if it reaches
// that far.
uint32_t Live::find_block(uint64_t address) {
  if (auto found = live_.find(address); found != live_.end()) {
    return found->second;
  }
  if (!in_order_) {
    live_in_order_.assign(live_.begin(), live_.end());
    std::sort(live_in_order_.begin(), live_in_order_.end());
    in_order_ = true;
  }
  auto above = std::upper_bound(
      live_in_order_.begin(), live_in_order_.end(), std::pair(address, UINT32_MAX));
  if (above == live_in_order_.begin()) {
    return kNone;
  }
  const Block& below = blocks_[std::prev(above)->second];
  bool covers = below.alive && below.address == std::prev(above)->first &&
                address - below.address < static_cast<uint64_t>(below.bytes);
  return covers ? std::prev(above)->second : kNone;
}

void Live::label(uint64_t address, uint64_t row) {
  uint8_t category = at_or_zero(tables_.labels.category, row);
  uint32_t number = row == 0 || category == kUnknown ? kNone : find_block(address);
  if (number == kNone) {
    return;
  }
  Block& block = blocks_[number];
  bool made_outside =
      block.from_before || block.phase == LivePhase::kOther || block.phase == LivePhase::kData;
  if (category == kInputs && !made_outside) {
    return;  // a forward made the block and passes it on; it is no input
  }
  uint32_t role = at_or_zero(tables_.labels.role, row);
  bool old = at_or_zero(tables_.strings, role) == "from_before";
  bool says_more = block.label == 0 || rank_of(category) < rank_of(block.label) ||
                   (category == block.label && block.old_label);
  if (!says_more) {
    return;
  }
  block.label = category;
  block.old_label = old;
  settle_again(block);
}

// The block outlived the step that made it, and now its category is better known.
void Live::settle_again(Block& block) {
  if (!block.in_base) {
    return;
  }
  auto& sums = base_[block.device].by_category;
  sums[block.settled] -= block.bytes;
  block.in_base = false;
  block.settled = category_of(block);
  block.in_base = true;
  sums[block.settled] += block.bytes;
}

// These blocks are alive at the end of the interval that made them: only now it shows that they
// outlive it.
void Live::settle_the_provisional() {
  for (uint32_t number : provisional_) {
    if (blocks_[number].alive) {
      settle_again(blocks_[number]);
    }
  }
  provisional_.clear();
}

// The line of a block comes when its outermost op ends, perhaps in a later flush.
void Live::resolve_lines() {
  for (; resolved_ < moves_.size(); ++resolved_) {
    const Move& move = moves_[resolved_];
    if (!move.is_free && blocks_[move.block].outer != 0) {
      without_line_.emplace_back(move.block, blocks_[move.block].outer);
    }
  }
  auto is_done = [this](const std::pair<uint32_t, uint32_t>& waiting) {
    Scope* outer = find_scope(waiting.second);
    if (outer != nullptr && !outer->ended) {
      return false;
    }
    Block& block = blocks_[waiting.first];
    if (outer != nullptr && block.outer == waiting.second) {  // else another block has its row
      block.line = outer->line;
    }
    return true;
  };
  without_line_.erase(std::remove_if(without_line_.begin(), without_line_.end(), is_done),
                      without_line_.end());
}

// ------------------------------------------------------------------ categories

bool Live::is_scratch(const Block& block) const {
  return block.alive && block.second && devices_[block.device].type != 0 &&
         is_scratch_size(block.bytes) && at_or_zero(is_product_, block.op) != 0;
}

// The rules of pytracer/analysis/facts/categories.py, in their order.
uint8_t Live::category_of(const Block& block) const {
  if (block.in_base) {
    return block.settled;
  }
  auto labelled = [&](uint8_t category) { return block.label == category; };
  bool forward = block.phase == LivePhase::kForward;
  bool outside =
      block.from_before || block.phase == LivePhase::kOther || block.phase == LivePhase::kData;
  bool lasts = block.alive ? over_ || interval_.number != block.interval
                           : block.freed_interval != block.interval;
  if (labelled(kWeights) || labelled(kGradients) || labelled(kOptimizerState) ||
      labelled(kInputs)) {
    return block.label;
  }
  if (block.saved && outside) {
    return kInputs;
  }
  if (labelled(kWorkspaces)) {
    return kWorkspaces;
  }
  if (block.phase == LivePhase::kRecompute && (block.saved || block.alive)) {
    return kActivations;
  }
  if (labelled(kActivations) || block.saved || (forward && block.by_node)) {
    return kActivations;
  }
  if (is_scratch(block)) {
    return kWorkspaces;
  }
  if (labelled(kCommunication) || block.communicates) {
    return kCommunication;
  }
  if (block.in_pool) {
    return kGraphPools;
  }
  if (forward && is_kept(block.interval) && lasts) {
    return kActivations;
  }
  if (labelled(kFunctional) && (!block.old_label || block.from_before)) {
    return kFunctional;
  }
  if (labelled(kTemporaries) || (!block.from_before && !lasts)) {
    return kTemporaries;
  }
  if (block.phase == LivePhase::kData && !block.from_before) {
    return kInputs;
  }
  return block.from_before ? kUnknown : kFunctional;
}

Live::Scan Live::scan(size_t count) const {
  Scan found{std::vector<LivePeak>(devices_.size()), base_, std::vector<size_t>(devices_.size())};
  for (size_t device = 0; device < devices_.size(); ++device) {
    found.peaks[device].bytes = base_[device].total;
    found.peaks[device].by_category = base_[device].by_category;
  }
  for (size_t i = 0; i < count; ++i) {
    const Move& move = moves_[i];
    const Block& block = blocks_[move.block];
    Base& now = found.after[block.device];
    int64_t change = move.is_free ? -block.bytes : block.bytes;
    now.total += change;
    now.by_category[category_of(block)] += change;
    if (now.total > found.peaks[block.device].bytes) {
      found.peaks[block.device] = {now.total, move.ticks, step_, move.phase, now.by_category};
      found.at[block.device] = i + 1;
    }
  }
  return found;
}

// The first moves are one step, or a part of a step that is too long to keep.
void Live::close(size_t count, bool whole_step, uint64_t ticks) {
  resolve_lines();
  settle_the_provisional();
  Scan found = scan(count);
  size_t main = main_device();
  size_t until_peak = devices_.empty() ? 0 : found.at[main];
  if (main != of_device_) {  // nothing is known about this device's earlier blocks
    of_device_ = main;
    base_modules_.clear();
    base_lines_.clear();
  }
  for (size_t i = 0; i < count; ++i) {
    if (i == until_peak) {
      peak_modules_ = base_modules_;
      peak_lines_ = base_lines_;
    }
    const Block& block = blocks_[moves_[i].block];
    if (block.device == main) {
      int64_t change = moves_[i].is_free ? -block.bytes : block.bytes;
      add_to(base_modules_, block.module, change);
      add_to(base_lines_, block.line, change);
    }
  }
  if (count == until_peak) {
    peak_modules_ = base_modules_;
    peak_lines_ = base_lines_;
  }
  LiveStep done{step_, ticks, {}, {}};
  for (size_t device = 0; device < devices_.size(); ++device) {
    LiveDevice& known = devices_[device];
    known.last_peak = found.peaks[device];
    if (known.last_peak.bytes > known.peak.bytes) {
      known.peak = known.last_peak;
    }
    done.peaks.push_back(found.peaks[device].bytes);
    done.ends.push_back(found.after[device].total);
  }
  // Categories first: their rules ask for a block's state before it is settled.
  for (size_t i = 0; i < count; ++i) {
    Block& block = blocks_[moves_[i].block];
    if (!block.in_base) {
      block.settled = category_of(block);
      if (block.alive && block.interval == interval_.number) {
        provisional_.push_back(moves_[i].block);
      }
    }
  }
  base_ = found.after;
  for (size_t i = 0; i < count; ++i) {
    blocks_[moves_[i].block].in_base = true;
    if (moves_[i].is_free) {
      free_rows_.push_back(moves_[i].block);
    }
  }
  moves_.erase(moves_.begin(), moves_.begin() + static_cast<std::ptrdiff_t>(count));
  resolved_ = moves_.size();
  if (whole_step) {
    steps_.push_back(std::move(done));
    ++step_;
  }
  if (steps_.size() > kMostSteps) {
    steps_.pop_front();
  }
}

// ------------------------------------------------------------------ what is shown

std::vector<LiveDevice> Live::devices() const {
  std::vector<LiveDevice> shown = devices_;
  Scan open = scan(moves_.size());
  for (size_t device = 0; device < shown.size(); ++device) {
    shown[device].now_by_category = open.after[device].by_category;
    if (open.peaks[device].bytes > shown[device].peak.bytes) {
      shown[device].peak = open.peaks[device];
    }
  }
  return shown;
}

size_t Live::main_device() const {
  size_t best = 0;
  auto matters = [this](size_t i) {
    return std::tuple(devices_[i].type != 0, std::max(devices_[i].peak.bytes, devices_[i].now));
  };
  for (size_t i = 1; i < devices_.size(); ++i) {
    best = matters(i) > matters(best) ? i : best;
  }
  return best;
}

template <typename Key>
std::unordered_map<uint32_t, int64_t> Live::holders(const std::vector<int64_t>& at_peak,
                                                    Key key) const {
  std::unordered_map<uint32_t, int64_t> found;
  for (uint32_t row = 0; row < at_peak.size(); ++row) {
    if (at_peak[row] != 0) {
      found[row] = at_peak[row];
    }
  }
  if (steps_.empty() && at_peak.empty()) {
    size_t main = main_device();
    for (const auto& [address, number] : live_) {
      const Block& block = blocks_[number];
      if (block.device == main) {
        found[key(block)] += block.bytes;
      }
    }
  }
  return found;
}

std::unordered_map<uint32_t, int64_t> Live::modules() const {
  return holders(peak_modules_, [](const Block& block) { return block.module; });
}

std::unordered_map<uint32_t, int64_t> Live::lines() const {
  return holders(peak_lines_, [](const Block& block) { return block.line; });
}

}  // namespace pytracer
