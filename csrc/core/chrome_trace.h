// Rows of events as Chrome trace JSON, a chunk at a time: what Perfetto and chrome://tracing read.
//
// This file knows the format. pytracer/export/chrome.py decides which events there are, and writes
// the text before and after them. docs/chrome-trace.md has the dialect.
//
//   - Times are whole nanoseconds, written as microseconds with three digits: a double's shortest
//     form would lose some, and viewers refuse an exponent.
//   - Texts are written as UTF-8. Bytes that are not UTF-8 (lone surrogates) become U+FFFD: viewers
//     drop all arguments of an event with an escape that they cannot read.
//   - Slices of a thread must nest, or viewers drop them; nest() sees to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pytracer {

// One argument of every row. Rows without it leave it out.
struct ChromeArgument {
  enum class Kind : uint8_t {
    kInteger,  // left out if it is kNoValue
    kHex,
    kText,         // a row of the texts, left out if that is empty
    kFlag,         // left out if 0
    kThousandths,  // written as a decimal number; left out if it is kNoValue
  };

  std::string name;
  Kind kind;
  std::span<const int64_t> values;
};

inline constexpr int64_t kNoValue = INT64_MIN;

// Rows of one kind of event. Columns that a kind does not use are empty.
struct ChromeRows {
  enum class Kind : uint8_t {
    kSlice,     // begin, end, name, thread; in Perfetto's format id joins slices of several ranks
    kLifetime,  // begin, end, name, id: an async pair of its process
    kCounter,   // begin, name; the arguments are its values
    kInstant,   // begin, name, thread
    kFlow,      // an arrow from the slice `from` at begin to the slice `to` at end; name, id
  };

  Kind kind;
  std::string category;
  uint32_t process;
  std::span<const int64_t> begin;
  std::span<const int64_t> end;
  std::span<const int64_t> name;  // rows of the texts
  std::span<const int64_t> thread;
  std::span<const int64_t> id;
  std::span<const int64_t> from;  // rows of the slices
  std::span<const int64_t> to;
  std::vector<ChromeArgument> arguments;
};

// A series has more samples than a screen has points. Keeps the last sample of each `bucket_ns`
// and, for each column, the first of its highest samples. 0 keeps all. Returns the rows to keep,
// rising.
std::vector<int64_t> thin_samples(std::span<const int64_t> times,
                                  std::span<const std::span<const int64_t>> columns,
                                  int64_t bucket_ns);

// Makes slices of a thread nest: each ends no later than the slice in which it began. If two begin
// together, the earlier row is the outer slice. No slice ends before it begins.
void nest(std::span<const int64_t> thread, std::span<const int64_t> begin, std::span<int64_t> end);

class ChromeTrace {
 public:
  // Texts and columns are views of the caller's. Slices come first, nested already. Flows without a
  // slice at one of their ends are left out.
  //
  // Throws std::invalid_argument if columns differ in length or point outside of the texts.
  ChromeTrace(std::span<const std::string> texts, std::vector<ChromeRows> tables);

  // Appends about `bytes` of events, each followed by ",\n". False if no event is left.
  bool next(size_t bytes, std::string& out);

  uint64_t events() const { return events_; }  // written so far

 private:
  void check(const ChromeRows& rows) const;
  void check_texts(std::span<const int64_t> texts) const;
  void write(const ChromeRows& rows, size_t row, std::string& out);
  void write_slice(const ChromeRows& rows, size_t row, std::string& out);
  void write_lifetime(const ChromeRows& rows, size_t row, std::string& out);
  void write_counter(const ChromeRows& rows, size_t row, std::string& out);
  void write_instant(const ChromeRows& rows, size_t row, std::string& out);
  void write_flow(const ChromeRows& rows, size_t row, std::string& out);
  void head(std::string_view phase, const ChromeRows& rows, size_t row, std::string& out) const;
  void arguments(const ChromeRows& rows, size_t row, std::string& out) const;
  const ChromeRows* slice_at(int64_t slice, int64_t time) const;

  std::vector<std::string> texts_;  // quoted and escaped
  std::vector<ChromeRows> tables_;
  std::vector<std::string> keys_;  // of the table that is being written: `"bytes":`
  size_t table_ = 0;
  size_t row_ = 0;
  uint64_t events_ = 0;
};

// Appends the text as a JSON string, quotes included.
void append_json_string(std::string_view text, std::string& out);

// Appends nanoseconds as microseconds: `1234.567`.
void append_microseconds(int64_t nanoseconds, std::string& out);

}  // namespace pytracer
