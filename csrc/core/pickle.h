// Reads the part of Python's pickle format that plain data needs: containers, numbers, texts.
//
// A pickle is a program for a small machine, and Python's machine runs any program. This machine
// knows no instruction that makes an object or calls anything: it refuses these, and names what
// they asked for. Guarantees:
//   - nothing is executed, imported or looked up
//   - time and memory are in proportion to the file: each instruction makes at most one value, a
//     memo index cannot exceed the file's size, and marks nest at most kMaxDepth deep
//   - values may contain themselves or be shared, so code that walks them must not recurse blindly
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pytracer {

class Pickle {
 public:
  enum class Kind : uint8_t {
    kNone,
    kBool,
    kInteger,  // fits 60 bits; others are kLarge
    kLarge,    // fits 64 bits
    kFloat,
    kText,
    kBytes,
    kTuple,
    kList,
    kDict,
  };

  // A number or a place in the document: eight bytes.
  class Value {
   public:
    Value() = default;

    Value(Kind kind, uint64_t payload) : bits_(payload << 4 | static_cast<uint64_t>(kind)) {}

    Kind kind() const { return static_cast<Kind>(bits_ & 15); }

    uint64_t payload() const { return bits_ >> 4; }

    int64_t integer() const { return static_cast<int64_t>(bits_) >> 4; }

   private:
    uint64_t bits_ = 0;
  };

  // Throws FileError; `name` stands for the path in messages. `bytes` must outlive the pickle.
  Pickle(std::span<const uint8_t> bytes, const std::string& name);

  Value root() const { return root_; }

  size_t texts() const { return texts_.size(); }

  std::string_view text(size_t number) const { return texts_[number]; }

  size_t containers() const { return containers_.size(); }

  bool is_sequence(Value value) const {
    return value.kind() == Kind::kList || value.kind() == Kind::kTuple;
  }

  // Items of a sequence, or keys and values of a dict together.
  size_t size(Value container) const;

  // Calls visit(item) for each item of a sequence or, of a dict, key and value in turn.
  template <typename Visit>
  void each(Value container, Visit visit) const {
    uint64_t number = container.payload();
    while (true) {
      const Container& part = containers_[number];
      for (uint64_t i = 0; i < part.length; ++i) {
        visit(items_[part.begin + i]);
      }
      if (part.next == 0) {
        return;
      }
      number = part.next;
    }
  }

  // Whether the value is a whole number that fits; `out` gets its 64 bits.
  bool integer(Value value, uint64_t& out) const;
  // The same for any number, rounded.
  bool number(Value value, double& out) const;

 private:
  friend class PickleReader;

  // Items lie together unless they came in several batches; then parts are chained.
  struct Container {
    uint64_t begin;
    uint64_t length;
    uint32_t next;  // 0: none; container 0 continues no other
    uint32_t last;  // of a first part: the chain's end
  };

  Value root_;
  std::vector<Value> items_;
  std::vector<Container> containers_;
  std::vector<std::string_view> texts_;
  std::vector<double> floats_;
  std::vector<uint64_t> large_;
};

}  // namespace pytracer
