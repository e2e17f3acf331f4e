#include "pickle.h"

#include "trace_file.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace pytracer {
namespace {

constexpr uint8_t kNewestProtocol = 5;
constexpr size_t kMaxDepth = 64;  // a snapshot's marks nest eight deep
constexpr size_t kMaxName = 60;   // characters of a file's own words in a message

const char* forbidden_name(uint8_t opcode) {
  switch (opcode) {
    case 'c':
      return "GLOBAL";
    case 0x93:
      return "STACK_GLOBAL";
    case 'R':
      return "REDUCE";
    case 'b':
      return "BUILD";
    case 'i':
      return "INST";
    case 'o':
      return "OBJ";
    case 0x81:
      return "NEWOBJ";
    case 0x92:
      return "NEWOBJ_EX";
    case 0x82:
    case 0x83:
    case 0x84:
      return "EXT";
    case 'P':
      return "PERSID";
    case 'Q':
      return "BINPERSID";
    default:
      return nullptr;
  }
}

}  // namespace

class PickleReader {
 public:
  PickleReader(Pickle& out, std::span<const uint8_t> bytes, const std::string& name)
      : out_(out), bytes_(bytes), name_(name) {}

  void read() {
    if (bytes_.size() < 2 || bytes_[0] != 0x80) {
      fail(FileError::Kind::kForeign,
           "this is not a pickle of protocol 2 or later",
           "save the snapshot again with torch.cuda.memory._dump_snapshot");
    }
    while (true) {
      uint8_t opcode = byte();
      if (opcode == '.') {
        break;
      }
      run(opcode);
    }
    if (stack_.size() != 1 || !marks_.empty()) {
      damaged("ends in the middle of a value");
    }
    out_.root_ = stack_[0];
  }

 private:
  using Kind = Pickle::Kind;
  using Value = Pickle::Value;

  void run(uint8_t opcode) {
    switch (opcode) {
      case 0x80:
        protocol(byte());
        break;
      case 0x95:  // a frame's length, which only helps readers of pieces
        little(8);
        break;
      case 'N':
        push({Kind::kNone, 0});
        break;
      case 0x88:
        push({Kind::kBool, 1});
        break;
      case 0x89:
        push({Kind::kBool, 0});
        break;
      case 'K':
        push_integer(static_cast<int64_t>(little(1)));
        break;
      case 'M':
        push_integer(static_cast<int64_t>(little(2)));
        break;
      case 'J':
        push_integer(static_cast<int32_t>(little(4)));
        break;
      case 0x8a:
        push_long(little(1));
        break;
      case 0x8b:
        push_long(little(4));
        break;
      case 'G':
        push_float();
        break;
      case 'X':
      case 'T':
        push_text(little(4));
        break;
      case 0x8c:
      case 'U':
        push_text(little(1));
        break;
      case 0x8d:
        push_text(little(8));
        break;
      case 'B':
        skip_bytes(little(4));
        break;
      case 'C':
        skip_bytes(little(1));
        break;
      case 0x8e:
      case 0x96:
        skip_bytes(little(8));
        break;
      case '(':
        if (marks_.size() == kMaxDepth) {
          refuse("is nested more than " + std::to_string(kMaxDepth) + " deep at " + where());
        }
        marks_.push_back(stack_.size());
        break;
      case ')':
        push_container(Kind::kTuple, 0);
        break;
      case ']':
        push_container(Kind::kList, 0);
        break;
      case '}':
        push_container(Kind::kDict, 0);
        break;
      case 0x85:
      case 0x86:
      case 0x87:
        push_container(Kind::kTuple, opcode - 0x84U);
        break;
      case 't':
        push_container(Kind::kTuple, marked());
        break;
      case 'l':
        push_container(Kind::kList, marked());
        break;
      case 'd':
        push_container(Kind::kDict, even(marked()));
        break;
      case 'a':
        extend(Kind::kList, 1);
        break;
      case 'e':
        extend(Kind::kList, marked());
        break;
      case 's':
        extend(Kind::kDict, 2);
        break;
      case 'u':
        extend(Kind::kDict, even(marked()));
        break;
      case 0x94:
        memo_.push_back(top());
        break;
      case 'q':
        put(little(1));
        break;
      case 'r':
        put(little(4));
        break;
      case 'h':
        get(little(1));
        break;
      case 'j':
        get(little(4));
        break;
      default:
        forbidden(opcode);
    }
  }

  void protocol(uint8_t version) {
    if (version < 2 || version > kNewestProtocol) {
      refuse("is a pickle of protocol " + std::to_string(version));
    }
  }

  // ---------------------------------------------------------------- bytes

  uint8_t byte() {
    if (at_ == bytes_.size()) {
      damaged("is cut short: it ends without its last instruction");
    }
    return bytes_[at_++];
  }

  uint64_t little(size_t count) {
    uint64_t value = 0;
    auto from = take(count);
    for (size_t i = 0; i < count; ++i) {
      value |= uint64_t{from[i]} << (8 * i);
    }
    return value;
  }

  std::span<const uint8_t> take(uint64_t count) {
    if (count > bytes_.size() - at_) {
      damaged("is cut short: a value reaches beyond its end");
    }
    auto found = bytes_.subspan(at_, count);
    at_ += count;
    return found;
  }

  // ---------------------------------------------------------------- values

  void push(Value value) { stack_.push_back(value); }

  void push_integer(int64_t value) {
    if (value >= -(int64_t{1} << 59) && value < int64_t{1} << 59) {
      push({Kind::kInteger, static_cast<uint64_t>(value)});
      return;
    }
    push({Kind::kLarge, out_.large_.size()});
    out_.large_.push_back(static_cast<uint64_t>(value));
  }

  void push_long(uint64_t length) {
    auto digits = take(length);
    // Nine bytes are a 64-bit number whose highest bit is not its sign.
    if (length > 9 || (length == 9 && digits[8] != 0)) {
      refuse("holds a number of " + std::to_string(length) + " bytes at " + where());
    }
    uint64_t value = 0;
    for (size_t i = 0; i < std::min<size_t>(length, 8); ++i) {
      value |= uint64_t{digits[i]} << (8 * i);
    }
    if (length > 0 && length < 8 && (digits[length - 1] & 0x80) != 0) {
      value |= ~uint64_t{0} << (8 * length);
    }
    if (length == 9 && value >> 63 != 0) {
      push({Kind::kLarge, out_.large_.size()});
      out_.large_.push_back(value);
      return;
    }
    push_integer(static_cast<int64_t>(value));
  }

  void push_float() {
    auto digits = take(8);
    uint64_t bits = 0;
    for (uint8_t digit : digits) {  // big-endian, alone among them
      bits = bits << 8 | digit;
    }
    push({Kind::kFloat, out_.floats_.size()});
    out_.floats_.push_back(std::bit_cast<double>(bits));
  }

  void push_text(uint64_t length) {
    auto text = take(length);
    push({Kind::kText, out_.texts_.size()});
    out_.texts_.emplace_back(reinterpret_cast<const char*>(text.data()), text.size());
  }

  void skip_bytes(uint64_t length) {
    take(length);
    push({Kind::kBytes, 0});
  }

  Value top() {
    if (stack_.empty() || (!marks_.empty() && marks_.back() == stack_.size())) {
      damaged("uses a value that is not there");
    }
    return stack_.back();
  }

  // Removes the last mark. Returns how many values lie above it.
  size_t marked() {
    if (marks_.empty()) {
      damaged("closes a container that it did not open");
    }
    size_t count = stack_.size() - marks_.back();
    marks_.pop_back();
    return count;
  }

  size_t even(size_t count) {
    if (count % 2 != 0) {
      damaged("holds a key without a value");
    }
    return count;
  }

  // The last values, which must lie above the last mark, as items of one container.
  uint64_t take_items(size_t count) {
    size_t floor = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() < count || stack_.size() - count < floor) {
      damaged("uses a value that is not there");
    }
    uint64_t begin = out_.items_.size();
    auto first = stack_.end() - static_cast<std::ptrdiff_t>(count);
    out_.items_.insert(out_.items_.end(), first, stack_.end());
    stack_.erase(first, stack_.end());
    return begin;
  }

  uint32_t new_container(uint64_t begin, uint64_t length) {
    // The shortest container that a real writer makes takes more than two bytes.
    if (out_.containers_.size() > bytes_.size() / 2 || out_.containers_.size() >= UINT32_MAX) {
      refuse("holds more containers than a file of its size can need");
    }
    out_.containers_.push_back({begin, length, 0, 0});
    return static_cast<uint32_t>(out_.containers_.size() - 1);
  }

  void push_container(Kind kind, size_t count) {
    uint64_t begin = take_items(count);
    push({kind, new_container(begin, count)});
  }

  void extend(Kind kind, size_t count) {
    uint64_t begin = take_items(count);
    Value container = top();
    if (container.kind() != kind) {
      damaged("adds to something that is no container of that kind");
    }
    uint64_t number = container.payload();
    if (count == 0) {
      return;
    }
    if (out_.containers_[number].length == 0) {
      out_.containers_[number].begin = begin;
      out_.containers_[number].length = count;
      return;
    }
    uint32_t last = out_.containers_[number].last;
    Pickle::Container& end = out_.containers_[last != 0 ? last : number];
    if (end.begin + end.length == begin) {  // nothing came in between: it grows where it is
      end.length += count;
      return;
    }
    uint32_t part = new_container(begin, count);
    out_.containers_[last != 0 ? last : number].next = part;
    out_.containers_[number].last = part;
  }

  // ---------------------------------------------------------------- memo

  void put(uint64_t index) {
    Value value = top();
    if (index > at_) {
      refuse("numbers a value " + std::to_string(index) + " before that many can be there");
    }
    if (index >= memo_.size()) {
      memo_.resize(index + 1);
    }
    memo_[index] = value;
  }

  void get(uint64_t index) {
    if (index >= memo_.size()) {
      damaged("refers to a value that was not numbered");
    }
    push(memo_[index]);
  }

  // ---------------------------------------------------------------- refusals

  std::string where() const { return "byte " + std::to_string(at_ - 1); }

  [[noreturn]] void fail(FileError::Kind kind, const std::string& what, const std::string& advice) {
    throw FileError(kind, name_, what, advice);
  }

  [[noreturn]] void damaged(const std::string& what) {
    fail(FileError::Kind::kDamaged, "the pickle " + what, "copy or record it again");
  }

  [[noreturn]] void refuse(const std::string& what) {
    fail(FileError::Kind::kForeign,
         "the pickle " + what,
         "a memory snapshot of torch is not like that, so it is not read");
  }

  [[noreturn]] void forbidden(uint8_t opcode) {
    const char* name = forbidden_name(opcode);
    if (name == nullptr) {
      refuse("holds the instruction " + std::to_string(opcode) + " at " + where());
    }
    std::string at = where();
    std::string wants = asked_for(opcode);
    fail(FileError::Kind::kForeign,
         "the pickle wants to run code" + (wants.empty() ? "" : ": " + wants) + " (" + name +
             " at " + at + ")",
         "a memory snapshot holds only data, so do not open this file with pickle either");
  }

  std::string asked_for(uint8_t opcode) {
    if (opcode == 'c' || opcode == 'i') {
      std::string module = line();
      return module + "." + line();
    }
    if (opcode == 0x93 && stack_.size() >= 2) {
      Value module = stack_[stack_.size() - 2];
      Value what = stack_.back();
      if (module.kind() == Kind::kText && what.kind() == Kind::kText) {
        return shown(out_.texts_[module.payload()]) + "." + shown(out_.texts_[what.payload()]);
      }
    }
    return "";
  }

  std::string line() {
    size_t begin = at_;
    while (at_ < bytes_.size() && bytes_[at_] != '\n') {
      ++at_;
    }
    auto text = bytes_.subspan(begin, at_ - begin);
    at_ = std::min(at_ + 1, bytes_.size());
    return shown({reinterpret_cast<const char*>(text.data()), text.size()});
  }

  // A file's own words, safe to print.
  static std::string shown(std::string_view text) {
    std::string safe;
    for (char c : text.substr(0, kMaxName)) {
      safe += c >= ' ' && c < 127 ? c : '?';
    }
    return safe;
  }

  Pickle& out_;
  std::span<const uint8_t> bytes_;
  const std::string& name_;
  size_t at_ = 0;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;
  std::vector<Value> memo_;
};

Pickle::Pickle(std::span<const uint8_t> bytes, const std::string& name) {
  PickleReader(*this, bytes, name).read();
}

size_t Pickle::size(Value container) const {
  size_t total = 0;
  uint64_t number = container.payload();
  while (true) {
    total += containers_[number].length;
    if (containers_[number].next == 0) {
      return total;
    }
    number = containers_[number].next;
  }
}

bool Pickle::integer(Value value, uint64_t& out) const {
  switch (value.kind()) {
    case Kind::kBool:
    case Kind::kInteger:
      out = static_cast<uint64_t>(value.integer());
      return true;
    case Kind::kLarge:
      out = large_[value.payload()];
      return true;
    default:
      return false;
  }
}

bool Pickle::number(Value value, double& out) const {
  uint64_t whole = 0;
  if (value.kind() == Kind::kFloat) {
    out = floats_[value.payload()];
    return std::isfinite(out);
  }
  if (integer(value, whole)) {
    out = static_cast<double>(static_cast<int64_t>(whole));
    return true;
  }
  return false;
}

}  // namespace pytracer
