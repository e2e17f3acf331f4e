#include "perfetto_trace.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>

namespace pytracer {
namespace {

// Numbers of fields, from the schema.
constexpr uint32_t kPacket = 1;
constexpr uint32_t kTimestamp = 8, kSequence = 10, kEvent = 11, kInternedData = 12, kFlags = 13;
constexpr uint32_t kDescriptor = 60;
constexpr uint32_t kTrackId = 1, kTrackName = 2, kTrackParent = 5, kTrackCounter = 8;
constexpr uint32_t kTrackOrdering = 11, kTrackRank = 12;
constexpr uint32_t kCounterUnit = 3;
constexpr uint32_t kCounterScale = 7;  // y_axis_share_key
constexpr uint32_t kEventCategory = 3, kEventArgument = 4, kEventType = 9, kEventName = 10;
constexpr uint32_t kEventTrack = 11, kEventValue = 30, kEventFlow = 47, kEventFlowEnd = 48;
// Slices with the same correlation have the same colour.
constexpr uint32_t kEventCorrelation = 54;
constexpr uint32_t kArgumentName = 1, kArgumentFlag = 2, kArgumentInteger = 4, kArgumentReal = 5;
constexpr uint32_t kArgumentPointer = 7, kArgumentText = 17;
// Of interned data: names of events, categories, names and texts of arguments, correlations.
constexpr std::array<uint32_t, 5> kInternedField = {2, 1, 3, 29, 43};

constexpr int kBegin = 1, kEnd = 2, kInstant = 3, kCounter = 4;
constexpr uint64_t kExplicitOrder = 3;
constexpr uint64_t kUnitBytes = 3;
constexpr uint64_t kStateCleared = 1, kNeedsState = 2;

void varint(uint64_t value, std::string& out) {
  while (value > 127) {
    out.push_back(static_cast<char>(value | 128));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

void number(uint32_t field, uint64_t value, std::string& out) {
  varint(uint64_t{field} << 3, out);
  varint(value, out);
}

void fixed(uint32_t field, uint64_t value, std::string& out) {
  varint(uint64_t{field} << 3 | 1, out);
  for (int shift = 0; shift < 64; shift += 8) {
    out.push_back(static_cast<char>(value >> shift));
  }
}

void bytes(uint32_t field, std::string_view value, std::string& out) {
  varint(uint64_t{field} << 3 | 2, out);
  varint(value.size(), out);
  out.append(value);
}

uint64_t bits_of(double value) {
  uint64_t bits = 0;
  static_assert(sizeof(bits) == sizeof(value));
  std::copy_n(reinterpret_cast<const char*>(&value), sizeof(value), reinterpret_cast<char*>(&bits));
  return bits;
}

}  // namespace

PerfettoTrace::PerfettoTrace(std::vector<std::string> texts,
                             std::vector<PerfettoTrack> tracks,
                             std::vector<PerfettoRows> tables,
                             uint32_t sequence)
    : sequence_(sequence),
      texts_(std::move(texts)),
      tracks_(std::move(tracks)),
      tables_(std::move(tables)) {
  for (const PerfettoRows& table : tables_) {
    const ChromeRows& rows = table.rows;
    auto fits = [&](std::span<const int64_t> column) { return column.size() == rows.begin.size(); };
    bool good = fits(rows.name);
    if (rows.kind == ChromeRows::Kind::kSlice || rows.kind == ChromeRows::Kind::kLifetime) {
      good = good && fits(rows.end) && fits(rows.thread) && (rows.id.empty() || fits(rows.id));
    } else if (rows.kind == ChromeRows::Kind::kInstant) {
      good = good && fits(rows.thread);
    } else if (rows.kind == ChromeRows::Kind::kFlow) {
      good = good && fits(rows.from) && fits(rows.to) && fits(rows.id);
    } else {
      good = good && table.counters.size() == rows.arguments.size();
    }
    for (const ChromeArgument& argument : rows.arguments) {
      good = good && fits(argument.values);
    }
    if (!good) {
      throw std::invalid_argument("columns of a Perfetto trace differ in length");
    }
  }
  for (size_t i = 0; i < tracks_.size(); ++i) {
    track_rows_[tracks_[i].id] = i;
  }
  find_flows();
}

// A flow is written with the slices at its ends.
void PerfettoTrace::find_flows() {
  for (const PerfettoRows& table : tables_) {
    if (table.rows.kind != ChromeRows::Kind::kFlow) {
      continue;
    }
    uint64_t kind = table.rows.category == "backward" ? uint64_t{1} << 63 : 0;
    for (size_t row = 0; row < table.rows.from.size(); ++row) {
      uint64_t id = static_cast<uint64_t>(table.rows.id[row]) | kind;
      flows_out_[static_cast<size_t>(table.rows.from[row])].push_back(id);
      flows_in_[static_cast<size_t>(table.rows.to[row])].push_back(id);
    }
  }
}

void PerfettoTrace::begin(std::string& out) {
  packet_.clear();
  number(kSequence, sequence_, packet_);
  number(kFlags, kStateCleared, packet_);
  bytes(kPacket, packet_, out);
  for (const PerfettoTrack& track : tracks_) {
    if (!track.holds_lifetimes) {
      describe(track, track.id, out);
    }
  }
}

void PerfettoTrace::describe(const PerfettoTrack& track, uint64_t id, std::string& out) {
  std::string text;
  number(kTrackId, id, text);
  bytes(kTrackName, track.name, text);
  if (track.parent != 0) {
    number(kTrackParent, track.parent, text);
  }
  if (track.is_counter) {
    std::string unit;
    number(kCounterUnit, kUnitBytes, unit);
    if (!track.scale.empty()) {
      bytes(kCounterScale, track.scale, unit);
    }
    bytes(kTrackCounter, unit, text);
  }
  number(kTrackOrdering, kExplicitOrder, text);
  number(kTrackRank, static_cast<uint64_t>(int64_t{track.rank}), text);
  packet_.clear();
  number(kSequence, sequence_, packet_);
  bytes(kDescriptor, text, packet_);
  bytes(kPacket, packet_, out);
}

uint64_t PerfettoTrace::intern(Interned kind, std::string_view text) {
  auto [found, is_new] = interned_[kind].try_emplace(text, interned_[kind].size() + 1);
  if (is_new) {
    std::string entry;
    number(1, found->second, entry);
    bytes(2, text, entry);
    bytes(kInternedField[kind], entry, new_texts_);
  }
  return found->second;
}

void PerfettoTrace::arguments(const ChromeRows& rows, size_t row, std::string& event) {
  std::string entry;
  for (const ChromeArgument& argument : rows.arguments) {
    int64_t value = argument.values[row];
    using Kind = ChromeArgument::Kind;
    bool is_number = argument.kind == Kind::kInteger || argument.kind == Kind::kThousandths;
    bool is_text = argument.kind == Kind::kText;
    std::string_view text = is_text ? std::string_view(texts_.at(static_cast<size_t>(value))) : "";
    if ((is_number && value == kNoValue) || (is_text && text.empty()) ||
        (argument.kind == Kind::kFlag && value == 0)) {
      continue;
    }
    entry.clear();
    number(kArgumentName, intern(kArgument, argument.name), entry);
    switch (argument.kind) {
      case Kind::kInteger:
        number(kArgumentInteger, static_cast<uint64_t>(value), entry);
        break;
      case Kind::kHex:
        number(kArgumentPointer, static_cast<uint64_t>(value), entry);
        break;
      case Kind::kText:
        number(kArgumentText, intern(kValue, text), entry);
        break;
      case Kind::kFlag:
        number(kArgumentFlag, 1, entry);
        break;
      case Kind::kThousandths:
        fixed(kArgumentReal, bits_of(static_cast<double>(value) / 1000), entry);
        break;
    }
    bytes(kEventArgument, entry, event);
  }
}

// Without rows it is an end: its beginning is known.
void PerfettoTrace::event(int type,
                          uint64_t track,
                          int64_t time,
                          const ChromeRows* rows,
                          size_t row,
                          bool is_slice,
                          std::string& out) {
  ++events_;
  event_.clear();
  new_texts_.clear();
  number(kEventType, static_cast<uint64_t>(type), event_);
  number(kEventTrack, track, event_);
  if (rows != nullptr) {
    std::string_view name = texts_.at(static_cast<size_t>(rows->name[row]));
    number(kEventCategory, intern(kCategory, rows->category), event_);
    number(kEventName, intern(kName, name), event_);
    arguments(*rows, row, event_);
    if (rows->kind == ChromeRows::Kind::kLifetime) {
      auto found = track_rows_.find(static_cast<uint64_t>(rows->thread[row]));
      if (found != track_rows_.end()) {
        number(kEventCorrelation, intern(kCorrelation, tracks_[found->second].name), event_);
      }
    }
  }
  bool is_joined = rows != nullptr && rows->kind == ChromeRows::Kind::kSlice && !rows->id.empty();
  if (is_joined) {  // with the slices of other ranks that have the same id
    fixed(kEventFlow, static_cast<uint64_t>(rows->id[row]), event_);
  }
  if (is_slice) {
    auto add = [&](uint32_t field, const auto& flows) {
      if (auto found = flows.find(row); found != flows.end()) {
        for (uint64_t id : found->second) {
          fixed(field, id, event_);
        }
      }
    };
    add(kEventFlow, flows_out_);
    add(kEventFlowEnd, flows_in_);
  }
  packet_.clear();
  number(kTimestamp, static_cast<uint64_t>(time), packet_);
  number(kSequence, sequence_, packet_);
  number(kFlags, kNeedsState, packet_);
  if (!new_texts_.empty()) {
    bytes(kInternedData, new_texts_, packet_);
  }
  bytes(kEvent, event_, packet_);
  bytes(kPacket, packet_, out);
}

// The lane that has been free for longest, or a new one.
uint64_t PerfettoTrace::lane(uint64_t track, int64_t begin, int64_t end, std::string& out) {
  Lanes& lanes = lanes_[track];
  uint64_t id = 0;
  if (lanes.empty() || lanes.top().first > begin) {
    id = track + lane_counts_[track]++;
    if (auto found = track_rows_.find(track); found != track_rows_.end()) {
      describe(tracks_[found->second], id, out);
    }
  } else {
    id = lanes.top().second;
    lanes.pop();
  }
  lanes.emplace(end, id);
  return id;
}

void PerfettoTrace::write_counter(const PerfettoRows& table, size_t row, std::string& out) {
  for (size_t i = 0; i < table.counters.size(); ++i) {
    uint64_t track = table.counters[i];
    int64_t value = table.rows.arguments[i].values[row];
    auto [last, is_new] = last_values_.try_emplace(track, value);
    if (!is_new && last->second == value) {
      continue;
    }
    last->second = value;
    ++events_;
    event_.clear();
    number(kEventType, kCounter, event_);
    number(kEventTrack, track, event_);
    number(kEventValue, static_cast<uint64_t>(value), event_);
    packet_.clear();
    number(kTimestamp, static_cast<uint64_t>(table.rows.begin[row]), packet_);
    number(kSequence, sequence_, packet_);
    bytes(kEvent, event_, packet_);
    bytes(kPacket, packet_, out);
  }
}

void PerfettoTrace::write(const PerfettoRows& table, size_t row, std::string& out) {
  const ChromeRows& rows = table.rows;
  switch (rows.kind) {
    case ChromeRows::Kind::kSlice:
    case ChromeRows::Kind::kLifetime: {
      int64_t begin = rows.begin[row];
      int64_t end = std::max(rows.end[row], begin);
      auto track = static_cast<uint64_t>(rows.thread[row]);
      if (rows.kind == ChromeRows::Kind::kLifetime) {
        track = lane(track, begin, end, out);
      }
      event(kBegin, track, begin, &rows, row, &table == &tables_.front(), out);
      event(kEnd, track, end, nullptr, row, false, out);
      break;
    }
    case ChromeRows::Kind::kCounter:
      write_counter(table, row, out);
      break;
    case ChromeRows::Kind::kInstant: {
      auto track = static_cast<uint64_t>(rows.thread[row]);
      event(kInstant, track, rows.begin[row], &rows, row, false, out);
      break;
    }
    case ChromeRows::Kind::kFlow:
      break;  // with the slices
  }
}

bool PerfettoTrace::next(size_t most, std::string& out) {
  size_t until = out.size() + most;
  if (!begun_) {
    begun_ = true;
    begin(out);
  }
  while (table_ < tables_.size() && out.size() < until) {
    const PerfettoRows& table = tables_[table_];
    if (row_ == table.rows.begin.size()) {
      ++table_;
      row_ = 0;
      continue;
    }
    write(table, row_++, out);
  }
  return table_ < tables_.size();
}

}  // namespace pytracer
