#include "trace_file.h"
#include "trace_format.h"

#include <algorithm>
#include <unordered_map>

namespace pytracer {
namespace {

// The length of the UTF-8 sequence at the text's start; 0 if there is none.
size_t utf8_length(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  if (byte(0) < 0x80) {
    return 1;
  }
  size_t length = byte(0) >= 0xF0 ? 4 : byte(0) >= 0xE0 ? 3 : 2;
  if (byte(0) < 0xC2 || byte(0) > 0xF4 || text.size() < length) {
    return 0;
  }
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) {
      return 0;
    }
  }
  // Overlong forms, surrogates and numbers beyond Unicode.
  bool bad = (byte(0) == 0xE0 && byte(1) < 0xA0) || (byte(0) == 0xED && byte(1) > 0x9F) ||
             (byte(0) == 0xF0 && byte(1) < 0x90) || (byte(0) == 0xF4 && byte(1) > 0x8F);
  return bad ? 0 : length;
}

}  // namespace

bool make_utf8(std::string& text) {
  std::string repaired;
  size_t good = 0;  // copied up to here
  bool changed = false;
  for (size_t at = 0; at < text.size();) {
    size_t length = utf8_length(std::string_view(text).substr(at));
    if (length == 0) {
      repaired.append(text, good, at - good).append("\xEF\xBF\xBD");
      good = ++at;
      changed = true;
    }
    at += length;
  }
  if (changed) {
    text = repaired.append(text, good);
  }
  return changed;
}

namespace {

class Repair {
 public:
  Repair(Recording& recording, Losses& losses, Notes& notes)
      : out_(recording), losses_(losses), notes_(notes) {}

  void run() {
    repair_text();
    add_first_rows();
    check_tables();
    check_scopes();
    check_events();
    fold_losses();
  }

 private:
  void repair_text();
  void add_first_rows();
  void check_tables();
  void check_scopes();
  void check_events();
  void fold_losses();
  template <typename Item>
  void clamp(std::vector<Item>& ids, size_t limit, std::string_view what);
  template <typename Item>
  void clamp_to_earlier(std::vector<Item>& ids, size_t first_number, std::string_view what);
  void note_count(size_t outside, std::string_view what);

  Recording& out_;
  Losses& losses_;
  Notes& notes_;
};

void Repair::repair_text() {
  size_t repaired = make_utf8(out_.meta) ? 1 : 0;
  for (std::string& text : out_.strings) {
    repaired += make_utf8(text);
  }
  if (repaired > 0) {
    notes_.add(std::to_string(repaired) + " texts were not UTF-8 and were repaired");
  }
}

// Reference 0 must lead somewhere, in an empty trace too.
void Repair::add_first_rows() {
  out_.strings.resize(std::max<size_t>(out_.strings.size(), 1));
  resize(out_.stacks, std::max<size_t>(rows_in(out_.stacks), 1));
  resize(out_.places, std::max<size_t>(rows_in(out_.places), 1));
  resize(out_.labels, std::max<size_t>(rows_in(out_.labels), 1));
  resize(out_.threads, std::max<size_t>(rows_in(out_.threads), 1));
}

template <typename Item>
void Repair::clamp(std::vector<Item>& ids, size_t limit, std::string_view what) {
  size_t outside = 0;
  for (Item& id : ids) {
    if (id >= limit) {
      id = 0;
      ++outside;
    }
  }
  note_count(outside, what);
}

// Parents come before their children, so no chain of parents is a circle.
template <typename Item>
void Repair::clamp_to_earlier(std::vector<Item>& ids, size_t first_number, std::string_view what) {
  size_t outside = 0;
  for (size_t row = 0; row < ids.size(); ++row) {
    if (ids[row] >= row + first_number && ids[row] != 0) {
      ids[row] = 0;
      ++outside;
    }
  }
  note_count(outside, what);
}

void Repair::note_count(size_t outside, std::string_view what) {
  if (outside > 0) {
    notes_.add(std::to_string(outside) + " rows refer to " + std::string(what) +
               " that is not there: set to none");
  }
}

void Repair::check_tables() {
  size_t strings = out_.strings.size();
  clamp_to_earlier(out_.stacks.parent, 0, "a calling frame");
  clamp(out_.stacks.file, strings, "a file name");
  clamp(out_.stacks.function, strings, "a function name");
  clamp(out_.labels.role, strings, "a role");
  clamp(out_.labels.name, strings, "a label's name");
  clamp(out_.labels.shape, strings, "a shape");
  clamp(out_.labels.dtype, strings, "a dtype");
  clamp(out_.threads.name, strings, "a thread's name");
  clamp(losses_.name, strings, "a loss counter's name");
}

void Repair::check_scopes() {
  auto& begins = out_.scope_begins;
  clamp_to_earlier(begins.parent, 1, "a parent scope");
  clamp_to_earlier(begins.forward, 1, "a forward scope");
  clamp(begins.name, out_.strings.size(), "a scope's name");
  clamp(begins.thread, rows_in(out_.threads), "a scope's thread");
  clamp(out_.scope_ends.scope, rows_in(begins) + 1, "an ended scope");
  clamp(out_.scope_ends.stack, rows_in(out_.stacks), "a stack");
  size_t unknown = 0;
  for (uint8_t& kind : begins.kind) {
    if (kind >= kScopeKinds) {
      kind = static_cast<uint8_t>(ScopeKind::kUser);
      ++unknown;
    }
  }
  if (unknown > 0) {
    notes_.add(std::to_string(unknown) + " scopes are of an unknown kind: read as user scopes");
  }
}

// An unknown action becomes a blank row: events are known by their positions, so no row may go.
void Repair::check_events() {
  auto& events = out_.events;
  clamp(events.scope, rows_in(out_.scope_begins) + 1, "an event's scope");
  clamp(events.place, rows_in(out_.places), "a place");
  clamp(events.thread, rows_in(out_.threads), "an event's thread");
  size_t unknown = 0;
  size_t unlabelled = 0;
  size_t too_large = 0;
  uint64_t room = kMostBytesInAll;
  constexpr auto kLabel = static_cast<uint8_t>(Action::kLabel);
  for (size_t i = 0; i < events.action.size(); ++i) {
    if (events.action[i] >= kActions) {
      events.action[i] = kLabel;
      events.address[i] = 0;
      events.bytes[i] = 0;
      ++unknown;
    } else if (events.action[i] == kLabel && events.bytes[i] >= rows_in(out_.labels)) {
      events.bytes[i] = 0;
      ++unlabelled;
    } else if (events.action[i] != kLabel) {
      uint64_t most = std::min(kMostBytes, room);
      too_large += events.bytes[i] > most ? 1 : 0;
      events.bytes[i] = std::min(events.bytes[i], most);
      room -= events.bytes[i];
    }
  }
  note_count(unlabelled, "a label");
  if (unknown > 0) {
    notes_.add(std::to_string(unknown) + " events are of an unknown kind and were blanked");
  }
  if (too_large > 0) {
    notes_.add(std::to_string(too_large) + " sizes are larger than can be: set to the most");
  }
}

// A later count replaces an earlier one of the same name.
void Repair::fold_losses() {
  std::unordered_map<uint32_t, size_t> rows;
  for (size_t i = 0; i < losses_.name.size(); ++i) {
    auto [found, is_new] = rows.try_emplace(losses_.name[i], out_.losses.size());
    if (is_new) {
      out_.losses.emplace_back(out_.strings[losses_.name[i]], 0);
    }
    out_.losses[found->second].second = losses_.count[i];
  }
}

}  // namespace

void make_safe(Recording& recording, Losses& losses, Notes& notes) {
  Repair(recording, losses, notes).run();
}

}  // namespace pytracer
