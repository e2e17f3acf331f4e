#include "check.h"
#include "chrome_trace.h"

#include <string>
#include <vector>

using namespace pytracer;

namespace {

using Column = std::vector<int64_t>;
using Kind = ChromeRows::Kind;

std::string json_string(std::string_view text) {
  std::string out;
  append_json_string(text, out);
  return out;
}

std::string microseconds(int64_t nanoseconds) {
  std::string out;
  append_microseconds(nanoseconds, out);
  return out;
}

ChromeRows table(Kind kind) {
  ChromeRows rows{};
  rows.kind = kind;
  rows.category = "test";
  rows.process = 7;
  return rows;
}

std::string all_of(ChromeTrace& trace, size_t chunk = 1 << 20) {
  std::string out;
  while (trace.next(chunk, out)) {
  }
  return out;
}

const std::vector<std::string> kTexts{"", "outer", "inner"};

// Two slices, the second inside the first, on thread 5.
struct Slices {
  Column begin{1000, 2000};
  Column end{9000, 3000};
  Column name{1, 2};
  Column thread{5, 5};

  ChromeRows rows() const {
    ChromeRows rows = table(Kind::kSlice);
    rows.begin = begin;
    rows.end = end;
    rows.name = name;
    rows.thread = thread;
    return rows;
  }
};

}  // namespace

TEST(strings_are_escaped_and_otherwise_left_alone) {
  CHECK_EQ(json_string("aten::mm"), "\"aten::mm\"");
  CHECK_EQ(json_string("a\"b\\c"), "\"a\\\"b\\\\c\"");
  CHECK_EQ(json_string(std::string_view("\n\t\0\x1f\x7f", 5)), "\"\\n\\t\\u0000\\u001f\\u007f\"");
  CHECK_EQ(json_string("größe 😀 ·"), "\"größe 😀 ·\"");
}

TEST(what_is_not_utf8_is_replaced) {
  CHECK_EQ(json_string("a\xED\xA0\x80z"), "\"a\xEF\xBF\xBDz\"");  // a lone surrogate
  CHECK_EQ(json_string("\xFFz"), "\"\xEF\xBF\xBDz\"");
  CHECK_EQ(json_string("\xC0\xAFz"), "\"\xEF\xBF\xBDz\"");          // too long a form
  CHECK_EQ(json_string("\xF4\x90\x80\x80z"), "\"\xEF\xBF\xBDz\"");  // above U+10FFFF
  CHECK_EQ(json_string("z\xE2\x82"), "\"z\xEF\xBF\xBD\"");          // cut short
  CHECK_EQ(json_string("\xE0\x80z\xF0\x9F"), "\"\xEF\xBF\xBDz\xEF\xBF\xBD\"");
}

TEST(times_are_microseconds_with_three_digits_and_no_exponent) {
  CHECK_EQ(microseconds(0), "0.000");
  CHECK_EQ(microseconds(7), "0.007");
  CHECK_EQ(microseconds(1234567), "1234.567");
  CHECK_EQ(microseconds(7889238000000001001), "7889238000000001.001");
  CHECK_EQ(microseconds(-1500), "-1.500");
  CHECK_EQ(microseconds(INT64_MIN), "-9223372036854775.808");
}

TEST(children_end_with_their_parents) {
  Column thread{1, 1, 1, 2};
  Column begin{0, 10, 20, 5};
  Column end{100, 200, 15, 300};
  nest(thread, begin, end);
  CHECK_EQ(end, (Column{100, 100, 20, 300}));
}

TEST(slices_in_any_order_nest) {
  Column thread{1, 1, 1};
  Column begin{20, 0, 20};
  Column end{25, 22, 30};
  nest(thread, begin, end);
  CHECK_EQ(end, (Column{22, 22, 22}));
}

TEST(a_slice_that_begins_where_another_ends_is_beside_it) {
  Column thread{1, 1};
  Column begin{0, 10};
  Column end{10, 20};
  nest(thread, begin, end);
  CHECK_EQ(end, (Column{10, 20}));
}

TEST(thinning_keeps_each_columns_highest_and_the_last) {
  Column times{0, 1, 2, 3, 100, 101};
  Column first{1, 9, 1, 2, 0, 5};
  Column second{4, 1, 8, 3, 7, 6};
  std::vector<std::span<const int64_t>> columns{first, second};
  CHECK_EQ(thin_samples(times, columns, 50), (Column{1, 2, 3, 4, 5}));
  CHECK_EQ(thin_samples(times, columns, 0), (Column{0, 1, 2, 3, 4, 5}));
  CHECK_EQ(thin_samples({}, {}, 50), Column{});
  CHECK_THROWS(thin_samples(times, std::vector{columns[0].first(2)}, 50),
               std::invalid_argument,
               CHECK_EQ(std::string(error.what()), "samples' columns differ in length"));
}

TEST(slices_as_text) {
  Slices slices;
  Column bytes{kNoValue, 12};
  Column where{0, 1};
  ChromeRows rows = slices.rows();
  rows.arguments = {{"bytes", ChromeArgument::Kind::kInteger, bytes},
                    {"where", ChromeArgument::Kind::kText, where},
                    {"address", ChromeArgument::Kind::kHex, bytes},
                    {"flag", ChromeArgument::Kind::kFlag, where},
                    {"ms", ChromeArgument::Kind::kThousandths, bytes}};
  ChromeTrace trace(kTexts, {rows});
  CHECK_EQ(all_of(trace),
           "{\"ph\":\"X\",\"cat\":\"test\",\"name\":\"outer\",\"pid\":7,\"tid\":5,\"ts\":1.000,"
           "\"dur\":8.000,\"args\":{\"address\":\"0x8000000000000000\"}},\n"
           "{\"ph\":\"X\",\"cat\":\"test\",\"name\":\"inner\",\"pid\":7,\"tid\":5,\"ts\":2.000,"
           "\"dur\":1.000,\"args\":{\"bytes\":12,\"where\":\"outer\",\"address\":\"0xc\","
           "\"flag\":true,\"ms\":0.012}},\n");
  CHECK_EQ(trace.events(), 2u);
}

TEST(lifetimes_are_pairs_of_their_process) {
  Column begin{5000};
  Column end{4000};  // a clock that went back: it lasted no time
  Column name{1};
  Column id{42};
  ChromeRows rows = table(Kind::kLifetime);
  rows.begin = begin;
  rows.end = end;
  rows.name = name;
  rows.id = id;
  ChromeTrace trace(kTexts, {rows});
  CHECK_EQ(all_of(trace),
           "{\"ph\":\"b\",\"cat\":\"test\",\"name\":\"outer\",\"pid\":7,\"tid\":7,"
           "\"id2\":{\"local\":\"42\"},\"ts\":5.000},\n"
           "{\"ph\":\"e\",\"cat\":\"test\",\"name\":\"outer\",\"pid\":7,\"tid\":7,"
           "\"id2\":{\"local\":\"42\"},\"ts\":5.000},\n");
}

TEST(arrows_need_a_slice_at_both_ends) {
  Slices slices;
  Column begin{1000, 1000, 1000, 9000, 1000};
  Column end{2000, 3000, 2000, 9500, 500};
  Column name{0, 0, 0, 0, 0};
  Column id{1, 2, 3, 4, 5};
  Column from{0, 0, -1, 0, 0};  // the second ends too late, the third has no slice, ...
  Column to{1, 1, 1, 0, 0};
  ChromeRows rows = table(Kind::kFlow);
  rows.begin = begin;
  rows.end = end;
  rows.name = name;
  rows.id = id;
  rows.from = from;
  rows.to = to;
  ChromeTrace trace(kTexts, {slices.rows(), rows});
  std::string text = all_of(trace);
  CHECK_EQ(trace.events(), 4u);
  CHECK_EQ(text.substr(text.find("{\"ph\":\"s\"")),
           "{\"ph\":\"s\",\"cat\":\"test\",\"name\":\"\",\"pid\":7,\"tid\":5,\"id\":1,"
           "\"ts\":1.000},\n"
           "{\"ph\":\"f\",\"cat\":\"test\",\"name\":\"\",\"pid\":7,\"tid\":5,\"id\":1,"
           "\"ts\":2.000,\"bp\":\"e\"},\n");
}

TEST(small_chunks_are_the_same_text) {
  Slices slices;
  ChromeTrace whole(kTexts, {slices.rows()});
  ChromeTrace pieces(kTexts, {slices.rows()});
  CHECK_EQ(all_of(pieces, 1), all_of(whole));
}

TEST(columns_that_do_not_fit_are_refused) {
  Slices slices;
  slices.name = {1, 3};
  CHECK_THROWS(ChromeTrace(kTexts, {slices.rows()}),
               std::invalid_argument,
               CHECK_EQ(std::string(error.what()), "a text that is not there"));
  slices.name = {1};
  CHECK_THROWS(ChromeTrace(kTexts, {slices.rows()}),
               std::invalid_argument,
               CHECK_EQ(std::string(error.what()), "a table's columns differ in length"));
}
