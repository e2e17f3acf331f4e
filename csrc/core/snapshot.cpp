#include "snapshot.h"

#include "pickle.h"
#include "trace_format.h"
#include "trace_source.h"

#include <array>
#include <new>
#include <unordered_map>

namespace pytracer {
namespace {

using Kind = Pickle::Kind;
using Value = Pickle::Value;

constexpr size_t kMaxFields = 64;  // an entry has about ten
constexpr size_t kMaxDevices = 255;
constexpr size_t kBytesPerRow = 16;  // the shortest entry that torch writes takes 25
constexpr size_t kMaxFrames = 4096;  // in one stack

enum class Field : uint8_t {
  kOther,
  kAction,
  kActiveSize,
  kAddr,
  kAddress,
  kAllocatedSize,
  kAllocatorSettings,
  kBlocks,
  kCategory,
  kDevice,
  kDeviceFree,
  kDeviceTraces,
  kExternalAnnotations,
  kFilename,
  kFrames,
  kHistory,
  kIsExpandable,
  kLine,
  kName,
  kPoolId,
  kPytracer,
  kRealSize,
  kRequestedSize,
  kSegmentPoolId,
  kSegments,
  kSize,
  kStage,
  kState,
  kStream,
  kTimeUs,
  kTotalSize,
};

const std::unordered_map<std::string_view, Field>& fields() {
  static const std::unordered_map<std::string_view, Field> known = {
      {"action", Field::kAction},
      {"active_size", Field::kActiveSize},
      {"addr", Field::kAddr},
      {"address", Field::kAddress},
      {"allocated_size", Field::kAllocatedSize},
      {"allocator_settings", Field::kAllocatorSettings},
      {"blocks", Field::kBlocks},
      {"category", Field::kCategory},
      {"device", Field::kDevice},
      {"device_free", Field::kDeviceFree},
      {"device_traces", Field::kDeviceTraces},
      {"external_annotations", Field::kExternalAnnotations},
      {"filename", Field::kFilename},
      {"frames", Field::kFrames},
      {"history", Field::kHistory},
      {"is_expandable", Field::kIsExpandable},
      {"line", Field::kLine},
      {"name", Field::kName},
      {"pool_id", Field::kPoolId},
      {"pytracer", Field::kPytracer},
      {"real_size", Field::kRealSize},
      {"requested_size", Field::kRequestedSize},
      {"segment_pool_id", Field::kSegmentPoolId},
      {"segments", Field::kSegments},
      {"size", Field::kSize},
      {"stage", Field::kStage},
      {"state", Field::kState},
      {"stream", Field::kStream},
      {"time_us", Field::kTimeUs},
      {"total_size", Field::kTotalSize},
  };
  return known;
}

const std::unordered_map<std::string_view, Action>& actions() {
  static const std::unordered_map<std::string_view, Action> known = {
      {"alloc", Action::kAlloc},
      {"free_requested", Action::kFreeRequested},
      {"free_completed", Action::kFreeCompleted},
      {"segment_alloc", Action::kSegmentAlloc},
      {"segment_free", Action::kSegmentFree},
      {"segment_map", Action::kSegmentMap},
      {"segment_unmap", Action::kSegmentUnmap},
      {"snapshot", Action::kSnapshot},
      {"oom", Action::kOom},
  };
  return known;
}

struct FrameKey {
  uint32_t file;
  uint32_t function;
  uint32_t line;
  uint32_t parent;

  bool operator==(const FrameKey&) const = default;
};

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 29);
}

struct HashFrame {
  size_t operator()(const FrameKey& key) const {
    return mixed(mixed(uint64_t{key.file} << 32 | key.function, key.line), key.parent);
  }
};

class SnapshotReader {
 public:
  SnapshotReader(std::span<const uint8_t> bytes, const std::string& name)
      : pickle_(bytes, name), name_(name), most_rows_(bytes.size() / kBytesPerRow + 16) {
    field_.resize(pickle_.texts());
    for (size_t i = 0; i < field_.size(); ++i) {
      auto found = fields().find(pickle_.text(i));
      field_[i] = found == fields().end() ? Field::kOther : found->second;
    }
    row_of_text_.resize(pickle_.texts());
    stack_of_list_.resize(pickle_.containers(), kNotRead);
    out_.strings.emplace_back();
    row_of_string_.emplace("", 0);
    out_.stacks.parent.push_back(0);
    out_.stacks.file.push_back(0);
    out_.stacks.function.push_back(0);
    out_.stacks.line.push_back(0);
  }

  Snapshot read() {
    Value root = pickle_.root();
    Value segments;
    Value traces;
    if (pickle_.is_sequence(root)) {  // torch.cuda.memory_snapshot(): the segments alone
      segments = root;
    } else {
      each_field(root, "the snapshot", [&](Field field, Value value, Value) {
        if (field == Field::kSegments) {
          segments = value;
        } else if (field == Field::kDeviceTraces) {
          traces = value;
        } else if (field == Field::kAllocatorSettings) {
          read_settings(value, "");
        } else if (field == Field::kExternalAnnotations) {
          annotations_ = value;
        } else if (field == Field::kPytracer && value.kind() == Kind::kText) {
          out_.pytracer = out_.strings[string_row(value)];
        }
      });
    }
    if (!pickle_.is_sequence(segments)) {
      refuse("has no list of segments");
    }
    if (traces.kind() != Kind::kNone && !pickle_.is_sequence(traces)) {
      refuse("has device_traces that are no list");
    }
    pickle_.each(segments, [&](Value segment) { read_segment(segment); });
    if (traces.kind() != Kind::kNone) {
      pickle_.each(traces, [&](Value trace) { read_trace(trace); });
    }
    if (pickle_.is_sequence(annotations_)) {
      pickle_.each(annotations_, [&](Value annotation) { read_annotation(annotation); });
    }
    count_losses();
    return std::move(out_);
  }

 private:
  static constexpr uint32_t kNotRead = UINT32_MAX;

  [[noreturn]] void refuse(const std::string& what) {
    throw FileError(FileError::Kind::kForeign,
                    name_,
                    "this pickle " + what + ", so it is not a memory snapshot of torch",
                    "record one with torch.cuda.memory._dump_snapshot");
  }

  void count_row() {
    // A file may refer to one row many times at little cost, but each of our rows takes memory.
    if (++rows_ > most_rows_) {
      refuse("repeats its entries more often than a file of its size can hold them");
    }
  }

  // Calls visit(field, value, key) for each field of a dict.
  template <typename Visit>
  void each_field(Value dict, const char* what, Visit visit) {
    if (dict.kind() != Kind::kDict) {
      refuse(std::string("has something in the place of ") + what);
    }
    if (pickle_.size(dict) > 2 * kMaxFields) {
      refuse(std::string("has too many fields in ") + what);
    }
    bool is_key = true;
    Value key;
    pickle_.each(dict, [&](Value item) {
      if (!is_key) {
        visit(key.kind() == Kind::kText ? field_[key.payload()] : Field::kOther, item, key);
      }
      key = item;
      is_key = !is_key;
    });
  }

  // ---------------------------------------------------------------- values

  uint32_t string_row(Value text) {
    if (text.kind() != Kind::kText) {
      return 0;
    }
    uint32_t& row = row_of_text_[text.payload()];
    if (row == 0 && !pickle_.text(text.payload()).empty()) {
      std::string whole(pickle_.text(text.payload()));
      make_utf8(whole);
      auto [at, added] = row_of_string_.emplace(whole, static_cast<uint32_t>(out_.strings.size()));
      if (added) {
        out_.strings.push_back(std::move(whole));
      }
      row = at->second;
    }
    return row;
  }

  uint64_t whole(Value value) {
    uint64_t number = 0;
    pickle_.integer(value, number);
    return number;
  }

  std::pair<uint64_t, uint64_t> pool(Value value) {
    if (!pickle_.is_sequence(value) || pickle_.size(value) != 2) {
      return {0, 0};
    }
    std::array<uint64_t, 2> found{};
    size_t at = 0;
    pickle_.each(value, [&](Value item) { found[at++] = whole(item); });
    return {found[0], found[1]};
  }

  // A list of frames, innermost first, as a row of the stack table.
  uint32_t stack_row(Value frames) {
    if (!pickle_.is_sequence(frames)) {
      return 0;
    }
    uint32_t& row = stack_of_list_[frames.payload()];
    if (row != kNotRead) {
      return row;
    }
    std::vector<uint64_t> own;
    own.reserve(pickle_.size(frames));
    uint64_t hash = 0;
    pickle_.each(frames, [&](Value frame) {
      if (frame.kind() == Kind::kDict) {
        own.push_back(frame.payload());
        hash = mixed(hash, frame.payload() + 1);
      }
    });
    // A loop has the same stack again and again: the same frames, in other lists.
    auto [at, added] = stack_of_frames_.emplace(hash, 0);
    if (added) {
      own.resize(std::min(own.size(), kMaxFrames));
      uint32_t stack = 0;
      for (auto frame = own.rbegin(); frame != own.rend(); ++frame) {
        stack = child(stack, *frame);
      }
      at->second = stack;
    }
    row = at->second;
    return row;
  }

  uint32_t child(uint32_t parent, uint64_t frame) {
    auto [known, fresh] = frames_.emplace(frame, FrameKey{});
    if (fresh) {
      FrameKey key{};
      each_field(Value(Kind::kDict, frame), "a frame", [&](Field field, Value value, Value) {
        if (field == Field::kFilename) {
          key.file = string_row(value);
        } else if (field == Field::kName) {
          key.function = string_row(value);
        } else if (field == Field::kLine) {
          key.line = static_cast<uint32_t>(whole(value));
        }
      });
      known->second = key;
    }
    FrameKey key = known->second;
    key.parent = parent;
    auto [at, added] = rows_of_stacks_.emplace(key, static_cast<uint32_t>(out_.stacks.line.size()));
    if (added) {
      out_.stacks.parent.push_back(parent);
      out_.stacks.file.push_back(key.file);
      out_.stacks.function.push_back(key.function);
      out_.stacks.line.push_back(key.line);
    }
    return at->second;
  }

  // ---------------------------------------------------------------- parts

  void read_trace(Value trace) {
    if (!pickle_.is_sequence(trace)) {
      refuse("has a device's trace that is no list");
    }
    if (out_.devices == kMaxDevices) {
      refuse("has more than " + std::to_string(kMaxDevices) + " devices");
    }
    pickle_.each(trace, [&](Value entry) { read_entry(entry); });
    ++out_.devices;
  }

  void read_entry(Value entry) {
    count_row();
    const Action* action = nullptr;
    bool is_note = false;  // about a live block, by torch.cuda.memory._annotate_memory
    uint64_t address = 0;
    uint64_t bytes = 0;
    uint64_t stream = 0;
    std::pair<uint64_t, uint64_t> pool_id{0, 0};
    int64_t time_us = -1;
    uint32_t stack = 0;
    uint32_t category = 0;
    uint32_t metadata = 0;
    bool has_bytes = false;
    each_field(entry, "an entry", [&](Field field, Value value, Value) {
      switch (field) {
        case Field::kAction:
          if (value.kind() == Kind::kText) {
            std::string_view name = pickle_.text(value.payload());
            auto found = actions().find(name);
            action = found == actions().end() ? nullptr : &found->second;
            is_note = name == "annotate";
          }
          break;
        case Field::kAddr:
        case Field::kDeviceFree:
          address = whole(value);
          break;
        case Field::kSize:
          has_bytes = pickle_.integer(value, bytes);
          break;
        case Field::kStream:
          stream = whole(value);
          break;
        case Field::kPoolId:
          pool_id = pool(value);
          break;
        case Field::kTimeUs: {
          uint64_t time = 0;
          time_us = pickle_.integer(value, time) ? static_cast<int64_t>(time) : -1;
          break;
        }
        case Field::kFrames:
          stack = stack_row(value);
          break;
        case Field::kCategory:
          category = string_row(value);
          break;
        case Field::kPytracer:
          metadata = string_row(value);
          break;
        default:
          break;
      }
    });
    if (action == nullptr) {
      unknown_actions_ += !is_note;
      return;
    }
    if (!has_bytes || bytes > kMostBytes) {
      ++unreadable_;
      return;
    }
    Snapshot::Entries& rows = out_.entries;
    rows.device.push_back(out_.devices);
    rows.action.push_back(static_cast<uint8_t>(*action));
    rows.address.push_back(address);
    rows.bytes.push_back(bytes);
    rows.stream.push_back(stream);
    rows.pool_high.push_back(pool_id.first);
    rows.pool_low.push_back(pool_id.second);
    rows.time_us.push_back(time_us);
    rows.stack.push_back(stack);
    rows.category.push_back(category);
    rows.metadata.push_back(metadata);
  }

  void read_segment(Value segment) {
    count_row();
    Value blocks;
    uint64_t device = 0;
    uint64_t address = 0;
    uint64_t bytes = 0;
    uint64_t allocated = 0;
    uint64_t requested = 0;
    uint64_t stream = 0;
    uint64_t expandable = 0;
    std::pair<uint64_t, uint64_t> pool_id{0, 0};
    each_field(segment, "a segment", [&](Field field, Value value, Value) {
      switch (field) {
        case Field::kBlocks:
          blocks = value;
          break;
        case Field::kDevice:
          device = whole(value);
          break;
        case Field::kAddress:
          address = whole(value);
          break;
        case Field::kTotalSize:
          bytes = whole(value);
          break;
        case Field::kAllocatedSize:
          allocated = whole(value);
          break;
        case Field::kRequestedSize:
          requested = whole(value);
          break;
        case Field::kStream:
          stream = whole(value);
          break;
        case Field::kIsExpandable:
          expandable = whole(value);
          break;
        case Field::kSegmentPoolId:
          pool_id = pool(value);
          break;
        default:
          break;
      }
    });
    // Blocks that adjoin are one segment: it may be larger than any of them.
    if (device >= kMaxDevices || bytes > room_ || !pickle_.is_sequence(blocks)) {
      refuse("has a segment without blocks, or of an impossible size");
    }
    room_ -= bytes;
    Snapshot::Segments& rows = out_.segments;
    rows.device.push_back(static_cast<uint32_t>(device));
    rows.address.push_back(address);
    rows.bytes.push_back(bytes);
    rows.allocated.push_back(allocated);
    rows.requested.push_back(requested);
    rows.stream.push_back(stream);
    rows.pool_high.push_back(pool_id.first);
    rows.pool_low.push_back(pool_id.second);
    rows.expandable.push_back(expandable != 0 ? 1 : 0);
    // Blocks lie one after the other; older versions do not give their addresses.
    pickle_.each(blocks, [&](Value block) { address += read_block(block, address); });
  }

  uint64_t read_block(Value block, uint64_t address) {
    count_row();
    uint64_t bytes = 0;
    uint64_t requested = 0;
    uint64_t given = 0;
    bool has_requested = false;
    bool has_address = false;
    uint8_t state = 0;
    uint32_t stack = 0;
    Value history;
    each_field(block, "a block", [&](Field field, Value value, Value) {
      switch (field) {
        case Field::kSize:
          bytes = whole(value);
          break;
        case Field::kRequestedSize:
          has_requested = pickle_.integer(value, requested);
          break;
        case Field::kAddress:
          has_address = pickle_.integer(value, given);
          break;
        case Field::kState:
          if (value.kind() == Kind::kText) {
            std::string_view text = pickle_.text(value.payload());
            state = text == "active_allocated"                                        ? 1
                    : text == "active_pending_free" || text == "active_awaiting_free" ? 2
                                                                                      : 0;
          }
          break;
        case Field::kFrames:
          stack = stack_row(value);
          break;
        case Field::kHistory:
          history = value;
          break;
        default:
          break;
      }
    });
    if (pickle_.is_sequence(history) && pickle_.size(history) == 1) {  // torch 2.0 and 2.1
      pickle_.each(history, [&](Value item) {
        each_field(item, "a block's history", [&](Field field, Value value, Value) {
          if (field == Field::kRealSize && !has_requested) {
            has_requested = pickle_.integer(value, requested);
          } else if (field == Field::kFrames && stack == 0) {
            stack = stack_row(value);
          }
        });
      });
    }
    requested = has_requested ? requested : bytes;
    // A free block, or a rounded size, may be larger than an event can hold.
    if (bytes > room_of_blocks_ || (state != 0 && requested > kMostBytes)) {
      refuse("has a block of an impossible size");
    }
    room_of_blocks_ -= bytes;
    Snapshot::Blocks& rows = out_.blocks;
    rows.segment.push_back(static_cast<uint32_t>(out_.segments.device.size() - 1));
    rows.address.push_back(has_address ? given : address);
    rows.bytes.push_back(bytes);
    rows.requested.push_back(requested);
    rows.state.push_back(state);
    rows.stack.push_back(stack);
    return bytes;
  }

  void read_annotation(Value annotation) {
    count_row();
    uint64_t device = 0;
    uint64_t time_us = 0;
    uint32_t name = 0;
    uint32_t stage = 0;
    each_field(annotation, "an annotation", [&](Field field, Value value, Value) {
      if (field == Field::kDevice) {
        device = whole(value);
      } else if (field == Field::kTimeUs) {
        time_us = whole(value);
      } else if (field == Field::kName) {
        name = string_row(value);
      } else if (field == Field::kStage) {
        stage = string_row(value);
      }
    });
    Snapshot::Annotations& rows = out_.annotations;
    rows.device.push_back(static_cast<uint32_t>(device));
    rows.time_us.push_back(static_cast<int64_t>(time_us));
    rows.name.push_back(name);
    rows.stage.push_back(stage);
  }

  void read_settings(Value settings, const std::string& prefix) {
    if (settings.kind() != Kind::kDict) {
      return;
    }
    each_field(settings, "the settings", [&](Field, Value value, Value key) {
      std::string name = prefix + out_.strings[string_row(key)];
      uint64_t number = 0;
      double fraction = 0;
      if (value.kind() == Kind::kDict && prefix.empty()) {
        read_settings(value, name + ".");
      } else if (value.kind() == Kind::kText) {
        out_.settings.emplace_back(name, out_.strings[string_row(value)]);
      } else if (pickle_.integer(value, number)) {
        out_.settings.emplace_back(name, std::to_string(static_cast<int64_t>(number)));
      } else if (pickle_.number(value, fraction)) {
        out_.settings.emplace_back(name, std::to_string(fraction));
      }
    });
  }

  void count_losses() {
    if (unknown_actions_ > 0) {
      out_.losses.emplace_back("unknown_actions", unknown_actions_);
    }
    if (unreadable_ > 0) {
      out_.losses.emplace_back("unreadable_entries", unreadable_);
    }
  }

  Pickle pickle_;
  const std::string& name_;
  size_t most_rows_;
  size_t rows_ = 0;
  uint64_t unknown_actions_ = 0;
  uint64_t unreadable_ = 0;
  uint64_t room_ = kMostBytesInAll;  // of all segments together
  uint64_t room_of_blocks_ = kMostBytesInAll;
  Snapshot out_;
  Value annotations_;
  std::vector<Field> field_;           // per text
  std::vector<uint32_t> row_of_text_;  // 0: not interned yet, or empty
  std::unordered_map<std::string, uint32_t> row_of_string_;
  std::vector<uint32_t> stack_of_list_;  // per container
  std::unordered_map<uint64_t, uint32_t> stack_of_frames_;
  std::unordered_map<uint64_t, FrameKey> frames_;  // per dict
  std::unordered_map<FrameKey, uint32_t, HashFrame> rows_of_stacks_;
};

}  // namespace

Snapshot read_snapshot(std::span<const uint8_t> bytes, const std::string& name) {
  return SnapshotReader(bytes, name).read();
}

Snapshot read_snapshot(const std::string& path) {
  try {
    Source file(path);
    return read_snapshot(file.read(0, file.size_of_data()), path);
  } catch (const std::bad_alloc&) {
    throw no_memory_for(path);
  }
}

}  // namespace pytracer
