// Tables give repeated things a small number. They only grow, so a number once given stays true.
// Their locks are leaves: nothing is called while one is held, so they may be taken under an
// allocator's lock.
#pragma once

#include "event.h"

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pytracer {

inline size_t hash_mix(size_t seed, uint64_t value) {
  // Fibonacci hashing with a rotate: cheap, and good enough for tables of thousands.
  seed ^= (value + 0x9e3779b97f4a7c15ULL) * 0xff51afd7ed558ccdULL;
  return (seed << 27 | seed >> 37) * 0xc4ceb9fe1a85ec53ULL;
}

struct RowHash {
  size_t operator()(const Place& p) const {
    size_t h = hash_mix(0, p.stream);
    h = hash_mix(h, p.pool_high);
    h = hash_mix(h, p.pool_low);
    return hash_mix(h, static_cast<uint64_t>(p.device_type) << 8 | p.device_index);
  }

  size_t operator()(const StackFrame& f) const {
    size_t h = hash_mix(0, static_cast<uint64_t>(f.parent) << 32 | f.file);
    return hash_mix(h, static_cast<uint64_t>(f.function) << 32 | f.line);
  }

  size_t operator()(const Label& l) const {
    size_t h = hash_mix(l.category, static_cast<uint64_t>(l.role) << 32 | l.name);
    return hash_mix(h, static_cast<uint64_t>(l.shape) << 32 | l.dtype);
  }
};

// Row 0 is always the default-constructed row: "none".
template <class Row>
class RowTable {
 public:
  RowTable() { clear(); }

  // The row's number, or `most` if the row is new and the table has `most` rows already.
  uint32_t intern(const Row& row, uint32_t most = UINT32_MAX) {
    std::lock_guard lock(mutex_);
    if (rows_.size() >= most && !numbers_.contains(row)) [[unlikely]] {
      return most;
    }
    auto [it, is_new] = numbers_.try_emplace(row, static_cast<uint32_t>(rows_.size()));
    if (is_new) {
      rows_.push_back(row);
    }
    return it->second;
  }

  std::vector<Row> rows_from(size_t first) const {
    std::lock_guard lock(mutex_);
    return {rows_.begin() + static_cast<std::ptrdiff_t>(std::min(first, rows_.size())),
            rows_.end()};
  }

  void clear() {
    std::lock_guard lock(mutex_);
    numbers_.clear();
    rows_.assign(1, Row{});
    numbers_.emplace(Row{}, 0);
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<Row, uint32_t, RowHash> numbers_;
  std::vector<Row> rows_;
};

// Row 0 is the empty string.
class StringTable {
 public:
  StringTable() { clear(); }

  uint32_t intern(std::string_view text) {
    std::lock_guard lock(mutex_);
    if (auto it = numbers_.find(text); it != numbers_.end()) {
      return it->second;
    }
    auto number = static_cast<uint32_t>(rows_.size());
    rows_.emplace_back(text);  // a deque: the views used as keys stay valid
    numbers_.emplace(rows_.back(), number);
    return number;
  }

  std::vector<std::string> rows_from(size_t first) const {
    std::lock_guard lock(mutex_);
    return {rows_.begin() + static_cast<std::ptrdiff_t>(std::min(first, rows_.size())),
            rows_.end()};
  }

  // The text of a row; the reference stays valid until clear().
  std::string_view at(uint32_t number) const {
    std::lock_guard lock(mutex_);
    return number < rows_.size() ? std::string_view(rows_[number]) : std::string_view();
  }

  void clear() {
    std::lock_guard lock(mutex_);
    numbers_.clear();
    rows_.clear();
    rows_.emplace_back();
    numbers_.emplace(rows_.back(), 0);
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string_view, uint32_t> numbers_;
  std::deque<std::string> rows_;
};

}  // namespace pytracer
