// The use of memory so far, in a recording that goes on: by category, step, module and line. The
// memory for this does not grow with the recording.
//
// A block's category is known when its life is over. So a step is judged at its end: by then only
// the blocks that outlive it have no final category. The rules are those of
// pytracer/analysis/facts/categories.py, without the rules that need later events; docs/watch.md
// lists these. Totals, peaks and steps are exact.
#pragma once

#include "event.h"
#include "iterations.h"
#include "trace_file.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace pytracer {

inline constexpr size_t kCategories = 11;  // those of pytracer/schema.py
using ByCategory = std::array<int64_t, kCategories>;

enum class LivePhase : uint8_t { kOther, kData, kForward, kRecompute, kBackward, kOptimizer };

struct LivePeak {
  int64_t bytes = 0;
  uint64_t ticks = 0;
  uint64_t step = 0;
  LivePhase phase = LivePhase::kOther;
  ByCategory by_category{};
};

struct LiveDevice {
  uint8_t type;
  uint8_t index;
  int64_t reserved = 0;
  int64_t now = 0;
  ByCategory now_by_category{};
  LivePeak peak;       // of the whole recording
  LivePeak last_peak;  // of the last whole step
};

struct LiveStep {
  uint64_t number;
  uint64_t ticks;  // when it ended
  std::vector<int64_t> peaks;
  std::vector<int64_t> ends;  // per device
};

class Live {
 public:
  void take(Recording& flush);

  // The recording is over, and the last optimizer step ended the last step.
  void end();

  // The unfinished step counts, too.
  std::vector<LiveDevice> devices() const;

  // The last steps; older ones are dropped.
  const std::deque<LiveStep>& steps() const { return steps_; }

  uint64_t step() const { return step_; }

  // The position of the device that matters most: a GPU before the CPU, then the highest.
  size_t main_device() const;

  // Bytes at the last whole step's peak on that device; before the first whole step, bytes now. By
  // rows of the string table and of the stack table.
  std::unordered_map<uint32_t, int64_t> modules() const;
  std::unordered_map<uint32_t, int64_t> lines() const;

  const Recording& tables() const { return tables_; }  // the small ones; no events, no scopes

  uint64_t events() const { return events_; }

  uint64_t last_ticks() const { return last_ticks_; }

  uint64_t failed_bytes() const { return failed_bytes_; }  // of the last allocation that failed

  LivePhase phase() const { return interval_.phase; }

 private:
  static constexpr uint8_t kUnsaid = 255;

  struct Scope {
    uint32_t number = 0;
    uint32_t parent = 0;
    uint32_t module = 0;  // names
    uint32_t op = 0;      // the innermost op that computes something
    uint32_t root = 0;    // the outermost module's call
    uint32_t outer = 0;   // the outermost op, which has the line
    uint32_t caused = 0;  // of a node: the forward's module
    uint32_t name = 0;    // of an optimizer's step
    uint32_t line = 0;    // a row of the stack table
    uint16_t thread = 0;
    ScopeKind kind = ScopeKind::kOp;
    uint8_t phase = kUnsaid;
    bool in_pass = false;
    bool in_node = false;
    bool communicates = false;
    bool has_module = false;
    bool with_grad = false;  // of a module's call: some op in it ran with grad mode on
    bool ended = false;
  };

  struct Block {
    uint64_t address = 0;
    int64_t bytes = 0;
    uint32_t device = 0;
    uint32_t module = 0;
    uint32_t op = 0;
    uint32_t op_scope = 0;
    uint32_t outer = 0;
    uint32_t line = 0;
    uint32_t interval = 0;
    uint32_t freed_interval = 0;
    LivePhase phase = LivePhase::kOther;
    uint8_t label = 0;
    uint8_t settled = 0;  // its category when the step that made it was over
    bool from_before = false;
    bool old_label = false;  // the label only says that the block was there before
    bool saved = false;
    bool by_node = false;  // a node of the backward freed it
    bool communicates = false;
    bool in_pool = false;
    bool second = false;  // its op had made another one before
    bool alive = true;
    bool in_base = false;
  };

  struct Move {
    uint64_t ticks;
    uint32_t block;
    bool is_free;
    LivePhase phase;
  };

  struct Interval {
    LivePhase phase = LivePhase::kOther;
    uint32_t number = 0;
  };

  struct Mark {
    uint64_t ticks;
    uint32_t scope;
    ScopeKind kind;
    bool begins;
  };

  struct Base {  // the bytes that were alive when the last whole step ended
    int64_t total = 0;
    ByCategory by_category{};
  };

  // The sums of a stretch of moves, on each device.
  struct Scan {
    std::vector<LivePeak> peaks;
    std::vector<Base> after;
    std::vector<size_t> at;  // how many moves lead to the peak
  };

  void take_tables(Recording& flush);
  void take_scopes(const Recording& flush);
  void add_scope(const Recording::ScopeBegins& rows, size_t row);
  void end_scope(uint32_t number, uint32_t stack, uint64_t ticks);
  Scope* find_scope(uint32_t number);
  void choose_main_thread(const Scope& scope);
  bool is_mark(const Scope& scope);
  void apply(const Mark& mark);
  Interval new_interval(LivePhase phase);
  void take_event(const Recording::Events& rows, size_t row);
  void make(const Recording::Events& rows, size_t row, bool seed);
  void let_go(uint32_t block, uint32_t scope, uint64_t ticks);
  void label(uint64_t address, uint64_t row);
  void settle_again(Block& block);
  void settle_the_provisional();
  uint32_t find_block(uint64_t address);
  uint32_t device_of(uint16_t place);
  void start_device(uint32_t device);
  LivePhase phase_of(uint32_t scope, uint16_t thread);
  void resolve_lines();
  bool is_kept(uint32_t interval) const;
  uint8_t category_of(const Block& block) const;
  bool is_scratch(const Block& block) const;
  Scan scan(size_t moves) const;
  void close(size_t moves, bool whole_step, uint64_t ticks);
  template <typename Key>
  std::unordered_map<uint32_t, int64_t> holders(const std::vector<int64_t>& base, Key key) const;

  static constexpr size_t kRecent = size_t{1} << 16;  // scopes that are kept after their end
  static constexpr size_t kMostOpen = size_t{1} << 16;
  static constexpr size_t kMostMoves = size_t{1} << 18;
  static constexpr size_t kMostSteps = 4096;

  Recording tables_;
  std::vector<Scope> recent_ = std::vector<Scope>(kRecent);
  std::map<uint32_t, Scope> open_;  // open scopes older than those in `recent_`
  uint32_t scopes_ = 0;
  std::vector<Mark> marks_;

  std::vector<Block> blocks_;
  std::vector<uint32_t> free_rows_;
  std::unordered_map<uint64_t, uint32_t> live_;               // by address
  std::vector<std::pair<uint64_t, uint32_t>> live_in_order_;  // made when a label misses
  bool in_order_ = false;
  std::vector<Move> moves_;                                  // of the step that is not over
  std::vector<std::pair<uint32_t, uint32_t>> without_line_;  // a block, and the op with its line
  std::vector<uint32_t> provisional_;   // blocks whose category may still change
  size_t resolved_ = 0;                 // how many of the lines are known
  std::vector<uint8_t> is_collective_;  // per row of the string table
  std::vector<uint8_t> is_factory_;
  std::vector<uint8_t> is_product_;
  std::vector<uint8_t> trains_;  // per thread
  std::vector<LiveDevice> devices_;
  std::vector<Base> base_;
  std::vector<int64_t> base_modules_, base_lines_;  // of the main device
  std::vector<int64_t> peak_modules_, peak_lines_;
  size_t of_device_ = 0;  // the device of these

  Interval interval_;
  Interval around_;   // the interval around forward and backward
  Interval forward_;  // one that lasts until a backward begins; number 0 for none
  Interval before_data_;
  uint32_t intervals_ = 0;
  std::vector<uint8_t> kept_ = std::vector<uint8_t>(kRecent);  // a backward followed it
  int main_thread_rank_ = 0;
  uint16_t main_thread_ = 0;
  bool nodes_seen_ = false;
  bool ops_seen_ = false;

  bool marked_steps_ = false;
  bool pending_ = false;  // an optimizer's step has ended; whether the step has is not known yet
  bool went_forward_ = false;  // since then
  Iterations iterations_;
  size_t pending_moves_ = 0;
  uint64_t pending_ticks_ = 0;
  uint64_t step_ = 0;
  std::deque<LiveStep> steps_;
  bool over_ = false;
  uint64_t events_ = 0;
  uint64_t last_ticks_ = 0;
  uint64_t failed_bytes_ = 0;
};

}  // namespace pytracer
