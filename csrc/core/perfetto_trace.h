// The rows of chrome_trace.h in Perfetto's own format, a piece at a time. The format is protobuf.
// Unlike JSON it has the order of tracks, and tracks inside of tracks.
// https://perfetto.dev/docs/reference/synthetic-track-event describes the messages.
#pragma once

#include "chrome_trace.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pytracer {

struct PerfettoTrack {
  uint64_t id;
  uint64_t parent;  // 0: none
  std::string name;
  int32_t rank;  // its place among its parent's tracks
  bool is_counter;
  // If so, there are as many such tracks as lives overlap, numbered from `id` on. Their bars have
  // one colour.
  bool holds_lifetimes;
  // Counters of one parent with the same text here have one scale; "": a scale of its own.
  std::string scale;
};

// A table's rows and their tracks. For slices, instants and lifetimes the `thread` column has the
// track's id. A counter has one track for each argument.
struct PerfettoRows {
  ChromeRows rows;
  std::vector<uint64_t> counters;
};

class PerfettoTrace {
 public:
  // Texts must be UTF-8. Slices nest already and come first; flows refer to their rows. Files of
  // different sequences (not 0) may be put together, one behind the other.
  PerfettoTrace(std::vector<std::string> texts,
                std::vector<PerfettoTrack> tracks,
                std::vector<PerfettoRows> tables,
                uint32_t sequence);

  // Appends about that many bytes. False if nothing is left.
  bool next(size_t bytes, std::string& out);

  uint64_t events() const { return events_; }

 private:
  // Lives that overlap lie on lanes of their own. For each track: its lanes, by the time when they
  // become free.
  using Lane = std::pair<int64_t, uint64_t>;
  using Lanes = std::priority_queue<Lane, std::vector<Lane>, std::greater<>>;

  enum Interned : uint8_t { kName, kCategory, kArgument, kValue, kCorrelation, kInternedKinds };

  void begin(std::string& out);
  void describe(const PerfettoTrack& track, uint64_t id, std::string& out);
  void find_flows();
  void write(const PerfettoRows& table, size_t row, std::string& out);
  void write_counter(const PerfettoRows& table, size_t row, std::string& out);
  void event(int type,
             uint64_t track,
             int64_t time,
             const ChromeRows* rows,
             size_t row,
             bool is_slice,
             std::string& out);
  uint64_t lane(uint64_t track, int64_t begin, int64_t end, std::string& out);
  uint64_t intern(Interned kind, std::string_view text);
  void arguments(const ChromeRows& rows, size_t row, std::string& event);

  uint32_t sequence_;
  std::vector<std::string> texts_;
  std::vector<PerfettoTrack> tracks_;
  std::unordered_map<uint64_t, size_t> track_rows_;
  std::vector<PerfettoRows> tables_;
  std::unordered_map<std::string_view, uint64_t> interned_[kInternedKinds];
  std::unordered_map<uint64_t, Lanes> lanes_;
  std::unordered_map<uint64_t, uint64_t> lane_counts_;
  std::unordered_map<uint64_t, int64_t> last_values_;            // of counters
  std::unordered_map<size_t, std::vector<uint64_t>> flows_out_;  // per row of the slices
  std::unordered_map<size_t, std::vector<uint64_t>> flows_in_;
  std::string new_texts_;  // interned by the packet that is being made
  std::string event_, packet_;
  size_t table_ = 0;
  size_t row_ = 0;
  bool begun_ = false;
  uint64_t events_ = 0;
};

}  // namespace pytracer
