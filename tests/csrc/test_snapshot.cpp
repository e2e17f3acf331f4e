#include "check.h"
#include "pickle.h"
#include "snapshot.h"

#include <cstring>

namespace pytracer {
namespace {

using Kind = Pickle::Kind;
using Value = Pickle::Value;

std::vector<uint8_t> bytes_of(std::string_view text) {
  return {text.begin(), text.end()};
}

// A pickle of protocol 4 with this program; zero bytes are part of it.
template <size_t Size>
std::vector<uint8_t> program(const char (&text)[Size]) {
  return bytes_of(std::string("\x80\x04") + std::string(text, Size - 1));
}

std::string refusal(const std::vector<uint8_t>& bytes) {
  try {
    read_snapshot(bytes, "x.pickle");
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

TEST(numbers_keep_their_sign_and_width) {
  auto bytes = program(
      "(K\xFFM\xFF\xFFJ\xFF\xFF\xFF\xFF\x8A\x01\x80\x8A\x08\x01\0\0\0\0\0\0\x80"
      "\x8A\x09\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\0\x8A\0\x88l.");
  Pickle pickle(bytes, "x");
  std::vector<uint64_t> found;
  pickle.each(pickle.root(), [&](Value item) {
    uint64_t number = 7;
    CHECK(pickle.integer(item, number));
    found.push_back(number);
  });
  std::vector<uint64_t> expected = {255,
                                    65535,
                                    ~uint64_t{0},
                                    static_cast<uint64_t>(-128),
                                    0x8000000000000001,
                                    ~uint64_t{0},
                                    0,
                                    1};
  CHECK_EQ(found, expected);
}

TEST(lists_that_come_in_batches_stay_in_order) {
  auto bytes = program(
      "]\x94(K\x01K\x02"
      "e](K\x09"
      "e0h\0(K\x03"
      "eK\x04"
      "a.");
  CHECK_THROWS(Pickle(bytes, "x"), FileError, CHECK_EQ(error.kind(), FileError::Kind::kForeign));
  bytes = program(
      "(]\x94(K\x01K\x02"
      "e](K\x09"
      "eh\0(K\x03"
      "eK\x04"
      "al.");
  Pickle pickle(bytes, "x");
  std::vector<Value> lists;
  pickle.each(pickle.root(), [&](Value item) { lists.push_back(item); });
  CHECK_EQ(lists.size(), size_t{3});
  std::vector<int64_t> items;
  pickle.each(lists[2], [&](Value item) { items.push_back(item.integer()); });
  CHECK_EQ(items, (std::vector<int64_t>{1, 2, 3, 4}));
  CHECK_EQ(pickle.size(lists[0]), size_t{4});
}

TEST(a_list_may_contain_itself) {
  auto bytes = program("]\x94h\0a.");
  Pickle pickle(bytes, "x");
  CHECK_EQ(pickle.size(pickle.root()), size_t{1});
  CHECK(!refusal(bytes).empty());
}

TEST(code_is_refused_and_named) {
  CHECK_EQ(refusal(program("cposix\nsystem\n(X\x02\0\0\0lstR.")),
           "x.pickle: the pickle wants to run code: posix.system (GLOBAL at byte 2); a memory "
           "snapshot holds only data, so do not open this file with pickle either");
  CHECK(refusal(program("\x8C\x02os\x8C\x06system\x93.")).find("os.system (STACK_GLOBAL") !=
        std::string::npos);
  for (char opcode : {'R', 'b', 'i', 'o', 'P', 'Q', '\x81', '\x82', '\x83', '\x84', '\x92'}) {
    std::vector<uint8_t> bytes = program("NN");
    bytes.push_back(static_cast<uint8_t>(opcode));
    bytes.push_back('.');
    CHECK(refusal(bytes).find("wants to run code") != std::string::npos);
  }
}

TEST(what_a_file_says_is_shown_without_control_characters) {
  std::string text = refusal(program("c\x1B[31m\nbad\x07\n."));
  CHECK(text.find('\x1B') == std::string::npos);
  CHECK(text.find("?[31m.bad?") != std::string::npos);
}

TEST(a_memo_bomb_is_refused_before_it_takes_memory) {
  CHECK(refusal(program("Nr\xFF\xFF\xFF\x0F.")).find("numbers a value") != std::string::npos);
}

TEST(deep_nesting_is_refused) {
  std::vector<uint8_t> bytes = program("");
  bytes.insert(bytes.end(), 1000, '(');
  CHECK(refusal(bytes).find("nested more than 64 deep") != std::string::npos);
  // Without marks, any depth is allowed: no code walks it by recursion.
  bytes = program("");
  bytes.insert(bytes.end(), 100000, ']');
  bytes.insert(bytes.end(), 99999, 'a');
  bytes.push_back('.');
  CHECK(!refusal(bytes).empty());
}

TEST(lengths_beyond_the_end_are_refused_before_they_take_memory) {
  for (const auto& bytes : {program("X\xFF\xFF\xFF\x7F"),
                            program("\x8D\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F"),
                            program("\x8B\xFF\xFF\xFF\x7F"),
                            program("B\xFF\xFF\xFF\xFF")}) {
    CHECK(refusal(bytes).find("cut short") != std::string::npos);
  }
}

TEST(every_prefix_is_refused) {
  auto bytes = program(
      "}(\x8C\x08segments]\x8C\x0D"
      "device_traces](](}(\x8C\x06"
      "action\x8C\x05"
      "alloc\x8C\x04"
      "addrK\x08\x8C\x04sizeK\x07uee\x75.");
  CHECK_EQ(read_snapshot(bytes).entries.bytes, (std::vector<uint64_t>{7}));
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    CHECK(!refusal({bytes.begin(), bytes.begin() + static_cast<long>(cut)}).empty());
  }
}

TEST(entries_that_are_referred_to_too_often_are_refused) {
  // One device's trace, listed ten thousand times.
  std::vector<uint8_t> bytes = program(
      "}(\x8C\x08segments]\x8C\x0D"
      "device_traces](](}\x94(\x8C\x06"
      "action\x8C\x05"
      "alloc\x8C\x04"
      "addrK\x08\x8C\x04sizeK\x07u");
  for (int i = 0; i < 10000; ++i) {
    bytes.push_back('h');
    bytes.push_back(0);
  }
  auto rest = bytes_of("eeu.");
  bytes.insert(bytes.end(), rest.begin(), rest.end());
  CHECK(refusal(bytes).find("repeats its entries") != std::string::npos);
}

TEST(values_below_a_mark_are_out_of_reach) {
  for (const auto& bytes :
       {program("N(\x85."), program("](Ne."), program("(a."), program("N(\x94.")}) {
    CHECK(!refusal(bytes).empty());
  }
}

}  // namespace
}  // namespace pytracer
