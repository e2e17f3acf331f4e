#include "chrome_trace.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace pytracer {

namespace {

constexpr char kHexDigits[] = "0123456789abcdef";
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

void append_integer(int64_t value, std::string& out) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
}

void append_hex(uint64_t value, std::string& out) {
  char digits[24] = {'"', '0', 'x'};
  char* end = std::to_chars(digits + 3, digits + sizeof(digits), value, 16).ptr;
  *end++ = '"';
  out.append(digits, end);
}

bool is_continuation(unsigned char byte) {
  return (byte & 0xC0) == 0x80;
}

// The length of the code point that begins here, or 0 if none does: not too long, no surrogate,
// nothing above U+10FFFF.
size_t code_point(std::string_view text) {
  auto at = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  unsigned char first = at(0);
  if (first < 0x80) {
    return 1;
  }
  if (first >= 0xC2 && first <= 0xDF && is_continuation(at(1))) {
    return 2;
  }
  if (!is_continuation(at(1)) || !is_continuation(at(2))) {
    return 0;
  }
  if (first >= 0xE0 && first <= 0xEF) {
    bool too_long = first == 0xE0 && at(1) < 0xA0;
    bool surrogate = first == 0xED && at(1) >= 0xA0;
    return too_long || surrogate ? 0 : 3;
  }
  if (first >= 0xF0 && first <= 0xF4 && is_continuation(at(3))) {
    bool too_long = first == 0xF0 && at(1) < 0x90;
    bool too_large = first == 0xF4 && at(1) >= 0x90;
    return too_long || too_large ? 0 : 4;
  }
  return 0;
}

void append_escaped(unsigned char byte, std::string& out) {
  switch (byte) {
    case '"':
      out += "\\\"";
      break;
    case '\\':
      out += "\\\\";
      break;
    case '\n':
      out += "\\n";
      break;
    case '\t':
      out += "\\t";
      break;
    default:
      out += "\\u00";
      out += kHexDigits[byte >> 4];
      out += kHexDigits[byte & 15];
  }
}

bool needs_escape(unsigned char byte) {
  return byte < 0x20 || byte == '"' || byte == '\\' || byte == 0x7F;
}

}  // namespace

void append_json_string(std::string_view text, std::string& out) {
  out += '"';
  bool replaced = false;  // bytes that belong together become one U+FFFD
  for (size_t i = 0; i < text.size();) {
    size_t length = code_point(text.substr(i));
    if (length == 0) {
      bool goes_on = replaced && is_continuation(static_cast<unsigned char>(text[i]));
      out += goes_on ? std::string_view() : kReplacement;
      replaced = true;
      ++i;
      continue;
    }
    replaced = false;
    if (length == 1 && needs_escape(static_cast<unsigned char>(text[i]))) {
      append_escaped(static_cast<unsigned char>(text[i]), out);
    } else {
      out += text.substr(i, length);
    }
    i += length;
  }
  out += '"';
}

void append_microseconds(int64_t nanoseconds, std::string& out) {
  if (nanoseconds < 0) {
    out += '-';
  }
  // Negated as unsigned, which is right for the smallest number too.
  uint64_t value = static_cast<uint64_t>(nanoseconds);
  value = nanoseconds < 0 ? 0 - value : value;
  char digits[32];
  char* end = std::to_chars(digits, digits + sizeof(digits), value / 1000).ptr;
  auto rest = static_cast<unsigned>(value % 1000);
  *end++ = '.';  // NOLINT(clang-analyzer-security.ArrayBound): before it are 17 digits at most
  *end++ = static_cast<char>('0' + rest / 100);
  *end++ = static_cast<char>('0' + rest / 10 % 10);
  *end++ = static_cast<char>('0' + rest % 10);
  out.append(digits, end);
}

std::vector<int64_t> thin_samples(std::span<const int64_t> times,
                                  std::span<const std::span<const int64_t>> columns,
                                  int64_t bucket_ns) {
  for (const auto& column : columns) {
    if (column.size() != times.size()) {
      throw std::invalid_argument("samples' columns differ in length");
    }
  }
  std::vector<int64_t> kept;
  std::vector<int64_t> highest(columns.size());
  for (size_t first = 0; first < times.size();) {
    size_t past = first + 1;
    while (past < times.size() && bucket_ns > 0 && times[past] - times[first] < bucket_ns) {
      ++past;
    }
    for (size_t c = 0; c < columns.size(); ++c) {
      auto values = columns[c].subspan(first, past - first);
      highest[c] = static_cast<int64_t>(first) +
                   (std::max_element(values.begin(), values.end()) - values.begin());
    }
    size_t start = kept.size();
    kept.insert(kept.end(), highest.begin(), highest.end());
    kept.push_back(static_cast<int64_t>(past) - 1);
    std::sort(kept.begin() + static_cast<ptrdiff_t>(start), kept.end());
    kept.erase(std::unique(kept.begin() + static_cast<ptrdiff_t>(start), kept.end()), kept.end());
    first = past;
  }
  return kept;
}

void nest(std::span<const int64_t> thread, std::span<const int64_t> begin, std::span<int64_t> end) {
  if (begin.size() != thread.size() || end.size() != thread.size()) {
    throw std::invalid_argument("slices' columns differ in length");
  }
  std::vector<size_t> order(thread.size());
  std::iota(order.begin(), order.end(), size_t{0});
  auto before = [&](size_t a, size_t b) {
    return std::tuple<int64_t, int64_t, size_t>(thread[a], begin[a], a) <
           std::tuple<int64_t, int64_t, size_t>(thread[b], begin[b], b);
  };
  if (!std::is_sorted(order.begin(), order.end(), before)) {
    std::sort(order.begin(), order.end(), before);
  }
  std::vector<size_t> open;
  for (size_t slice : order) {
    while (!open.empty() &&
           (thread[open.back()] != thread[slice] || end[open.back()] <= begin[slice])) {
      open.pop_back();
    }
    end[slice] = std::max(end[slice], begin[slice]);
    if (!open.empty()) {
      end[slice] = std::min(end[slice], end[open.back()]);
    }
    open.push_back(slice);
  }
}

ChromeTrace::ChromeTrace(std::span<const std::string> texts, std::vector<ChromeRows> tables)
    : tables_(std::move(tables)) {
  texts_.resize(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    append_json_string(texts[i], texts_[i]);
  }
  for (const ChromeRows& rows : tables_) {
    check(rows);
  }
}

void ChromeTrace::check(const ChromeRows& rows) const {
  using Kind = ChromeRows::Kind;
  size_t count = rows.begin.size();
  auto need = [&](const std::span<const int64_t>& column, bool needed) {
    if (needed && column.size() != count) {
      throw std::invalid_argument("a table's columns differ in length");
    }
  };
  need(rows.name, true);
  need(rows.end, rows.kind != Kind::kCounter && rows.kind != Kind::kInstant);
  need(rows.thread, rows.kind == Kind::kSlice || rows.kind == Kind::kInstant);
  need(rows.id, rows.kind == Kind::kLifetime || rows.kind == Kind::kFlow);
  need(rows.from, rows.kind == Kind::kFlow);
  need(rows.to, rows.kind == Kind::kFlow);
  check_texts(rows.name);
  for (const ChromeArgument& argument : rows.arguments) {
    need(argument.values, true);
    if (argument.kind == ChromeArgument::Kind::kText) {
      check_texts(argument.values);
    }
  }
}

void ChromeTrace::check_texts(std::span<const int64_t> texts) const {
  for (int64_t text : texts) {
    if (text < 0 || static_cast<size_t>(text) >= texts_.size()) {
      throw std::invalid_argument("a text that is not there");
    }
  }
}

bool ChromeTrace::next(size_t bytes, std::string& out) {
  size_t enough = out.size() + bytes;
  while (table_ < tables_.size()) {
    const ChromeRows& rows = tables_[table_];
    if (row_ == 0) {
      keys_.clear();
      for (const ChromeArgument& argument : rows.arguments) {
        append_json_string(argument.name, keys_.emplace_back());
        keys_.back() += ':';
      }
    }
    while (row_ < rows.begin.size()) {
      if (out.size() >= enough) {
        return true;
      }
      write(rows, row_++, out);
    }
    ++table_;
    row_ = 0;
  }
  return false;
}

void ChromeTrace::write(const ChromeRows& rows, size_t row, std::string& out) {
  switch (rows.kind) {
    case ChromeRows::Kind::kSlice:
      return write_slice(rows, row, out);
    case ChromeRows::Kind::kLifetime:
      return write_lifetime(rows, row, out);
    case ChromeRows::Kind::kCounter:
      return write_counter(rows, row, out);
    case ChromeRows::Kind::kInstant:
      return write_instant(rows, row, out);
    case ChromeRows::Kind::kFlow:
      return write_flow(rows, row, out);
  }
}

// `{"ph":"X","cat":"op","name":"aten::mm","pid":1`, without its end.
void ChromeTrace::head(std::string_view phase,
                       const ChromeRows& rows,
                       size_t row,
                       std::string& out) const {
  out += "{\"ph\":\"";
  out += phase;
  out += "\",\"cat\":\"";
  out += rows.category;
  out += "\",\"name\":";
  out += texts_[static_cast<size_t>(rows.name[row])];
  out += ",\"pid\":";
  append_integer(rows.process, out);
}

void ChromeTrace::write_slice(const ChromeRows& rows, size_t row, std::string& out) {
  head("X", rows, row, out);
  out += ",\"tid\":";
  append_integer(rows.thread[row], out);
  out += ",\"ts\":";
  append_microseconds(rows.begin[row], out);
  out += ",\"dur\":";
  append_microseconds(rows.end[row] - rows.begin[row], out);
  arguments(rows, row, out);
  out += "},\n";
  ++events_;
}

void ChromeTrace::write_lifetime(const ChromeRows& rows, size_t row, std::string& out) {
  // With a plain `id` the track would be global, and not shown with its process.
  auto one = [&](std::string_view phase, int64_t time) {
    head(phase, rows, row, out);
    out += ",\"tid\":";
    append_integer(rows.process, out);
    out += ",\"id2\":{\"local\":\"";
    append_integer(rows.id[row], out);
    out += "\"},\"ts\":";
    append_microseconds(time, out);
  };
  one("b", rows.begin[row]);
  arguments(rows, row, out);
  out += "},\n";
  one("e", std::max(rows.begin[row], rows.end[row]));
  out += "},\n";
  events_ += 2;
}

void ChromeTrace::write_counter(const ChromeRows& rows, size_t row, std::string& out) {
  head("C", rows, row, out);
  out += ",\"ts\":";
  append_microseconds(rows.begin[row], out);
  arguments(rows, row, out);
  out += "},\n";
  ++events_;
}

void ChromeTrace::write_instant(const ChromeRows& rows, size_t row, std::string& out) {
  head("i", rows, row, out);
  out += ",\"s\":\"t\",\"tid\":";
  append_integer(rows.thread[row], out);
  out += ",\"ts\":";
  append_microseconds(rows.begin[row], out);
  arguments(rows, row, out);
  out += "},\n";
  ++events_;
}

void ChromeTrace::write_flow(const ChromeRows& rows, size_t row, std::string& out) {
  const ChromeRows* from = slice_at(rows.from[row], rows.begin[row]);
  const ChromeRows* to = slice_at(rows.to[row], rows.end[row]);
  if (from == nullptr || to == nullptr || rows.end[row] < rows.begin[row]) {
    return;
  }
  auto one = [&](std::string_view phase, int64_t slice, int64_t time) {
    head(phase, rows, row, out);
    out += ",\"tid\":";
    append_integer(tables_[0].thread[static_cast<size_t>(slice)], out);
    out += ",\"id\":";
    append_integer(rows.id[row], out);
    out += ",\"ts\":";
    append_microseconds(time, out);
  };
  one("s", rows.from[row], rows.begin[row]);
  out += "},\n";
  one("f", rows.to[row], rows.end[row]);
  out += ",\"bp\":\"e\"},\n";  // it ends in the slice around it, not in the next one
  events_ += 2;
}

// The slices, or null if that slice is not open at that time: an arrow without a slice is an error.
const ChromeRows* ChromeTrace::slice_at(int64_t slice, int64_t time) const {
  const ChromeRows& slices = tables_[0];
  if (slices.kind != ChromeRows::Kind::kSlice || slice < 0 ||
      static_cast<size_t>(slice) >= slices.begin.size()) {
    return nullptr;
  }
  auto row = static_cast<size_t>(slice);
  return slices.begin[row] <= time && time < slices.end[row] ? &slices : nullptr;
}

void ChromeTrace::arguments(const ChromeRows& rows, size_t row, std::string& out) const {
  std::string_view separator = ",\"args\":{";
  for (size_t i = 0; i < rows.arguments.size(); ++i) {
    const ChromeArgument& argument = rows.arguments[i];
    int64_t value = argument.values[row];
    using Kind = ChromeArgument::Kind;
    bool missing = argument.kind == Kind::kText   ? texts_[static_cast<size_t>(value)].size() == 2
                   : argument.kind == Kind::kFlag ? value == 0
                   : argument.kind == Kind::kHex  ? false
                                                  : value == kNoValue;
    if (missing) {
      continue;
    }
    out += separator;
    separator = ",";
    out += keys_[i];
    switch (argument.kind) {
      case Kind::kInteger:
        append_integer(value, out);
        break;
      case Kind::kHex:
        append_hex(static_cast<uint64_t>(value), out);
        break;
      case Kind::kText:
        out += texts_[static_cast<size_t>(value)];
        break;
      case Kind::kFlag:
        out += "true";
        break;
      case Kind::kThousandths:
        append_microseconds(value, out);  // which writes this very form
        break;
    }
  }
  if (separator == ",") {
    out += '}';
  }
}

}  // namespace pytracer
