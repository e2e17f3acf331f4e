// A growing array that any thread may append to without a lock.
//
//  * One fetch_add claims a row's position: the order of the log *is* the order of claims,
//    recorded and never inferred from clocks. Whoever holds a lock while appending (an allocator
//    holds its device's) gets positions in the order of that lock.
//  * A row is whole or absent: its ready word is stored last and is never zero.
//  * Rows never move. Memory grows by chunks and is given back chunk by chunk, once every row of
//    a chunk has been read.
//  * When `limit` rows have been claimed, the log refuses further rows and the caller counts them.
//    Nothing already recorded is overwritten or hidden. A refused row claims no position: so a
//    limit may be raised later, and a reader meets no hole. Threads that append at that very
//    moment may each put one row beyond the limit.
#pragma once

#include "event.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace pytracer {

// Where each row keeps the 64-bit word that says "written".
template <class Row>
inline constexpr size_t kReadyWord = 1;  // ScopeEnd: `scope` is never 0
template <>
inline constexpr size_t kReadyWord<Event> = 2;  // the `ready` byte
template <>
inline constexpr size_t kReadyWord<ScopeBegin> = 2;  // the top bit of `flags_and_ready`

template <class Row>
class AppendLog {
 public:
  // 512 KiB of events: large enough that growing is rare, small enough to leave little unused.
  static constexpr uint64_t kChunkRows = uint64_t{1} << 14;
  static constexpr uint64_t kMaxChunks = uint64_t{1} << 18;  // 2^32 rows: scopes are 32 bits wide
  static constexpr uint64_t kRefused = UINT64_MAX;
  // The rest is room for rows beyond the limit: more rows than Linux has threads.
  static constexpr uint64_t kMostRows = kChunkRows * kMaxChunks - (uint64_t{1} << 22);

  // calloc: the directory is 2 MiB of which a recording touches a few words.
  AppendLog()
      : chunks_(static_cast<std::atomic<uint64_t*>*>(
            std::calloc(kMaxChunks, sizeof(std::atomic<uint64_t*>)))) {
    if (chunks_ == nullptr) {
      throw std::bad_alloc();
    }
  }

  ~AppendLog() {
    clear();
    std::free(chunks_);
  }

  AppendLog(const AppendLog&) = delete;  // rows are addressed by other threads
  AppendLog& operator=(const AppendLog&) = delete;

  // Returns the row's position, or kRefused.
  uint64_t append(const Row& row) {
    uint64_t limit = limit_.load(std::memory_order_relaxed);
    if (limit == kFull) [[unlikely]] {
      return kRefused;
    }
    uint64_t position = next_.fetch_add(1, std::memory_order_relaxed);
    if (position + 1 >= limit) [[unlikely]] {
      // The last row that fits. If the limit has changed meanwhile, the new one counts.
      limit_.compare_exchange_strong(limit, kFull, std::memory_order_relaxed);
    }
    uint64_t* chunk = chunks_[position / kChunkRows].load(std::memory_order_acquire);
    if (chunk == nullptr) [[unlikely]] {
      chunk = add_chunk(position / kChunkRows);
      if (chunk == nullptr) {
        return kRefused;
      }
    }
    const std::array<uint64_t, kWords> words = words_of(row);
    uint64_t* slot = chunk + (position % kChunkRows) * kWords;
#pragma GCC unroll 4  // then the words stay in registers
    for (size_t i = 0; i < kWords; ++i) {
      if (i != kReadyWord<Row>) {
        __atomic_store_n(slot + i, words[i], __ATOMIC_RELAXED);
      }
    }
    __atomic_store_n(slot + kReadyWord<Row>, words[kReadyWord<Row>], __ATOMIC_RELEASE);
    // The next rows lie in lines that are in no cache. A write that waits for such a line holds up
    // the next locked instruction of the program.
    __builtin_prefetch(slot + kAhead, /*for writing=*/1);
    return position;
  }

  // Positions claimed so far. Rows just below this may not be whole yet.
  uint64_t size() const {
    return std::min(next_.load(std::memory_order_acquire), end_.load(std::memory_order_relaxed));
  }

  // Calls read(row) for the whole rows from `from` on, up to `to`; stops at the first that is
  // not whole yet. Returns the position after the last row read.
  template <class Reader>
  uint64_t read(uint64_t from, uint64_t to, Reader&& reader) const {
    for (; from < to; ++from) {
      const uint64_t* chunk = chunks_[from / kChunkRows].load(std::memory_order_acquire);
      if (chunk == nullptr) {
        break;
      }
      const uint64_t* slot = chunk + (from % kChunkRows) * kWords;
      uint64_t words[kWords];
      words[kReadyWord<Row>] = __atomic_load_n(slot + kReadyWord<Row>, __ATOMIC_ACQUIRE);
      if (words[kReadyWord<Row>] == 0) {
        break;
      }
      for (size_t i = 0; i < kWords; ++i) {
        if (i != kReadyWord<Row>) {
          words[i] = __atomic_load_n(slot + i, __ATOMIC_RELAXED);
        }
      }
      Row row;
      std::memcpy(&row, words, sizeof(Row));
      reader(row);
    }
    return from;
  }

  // Frees the chunks that lie wholly below `position`. Their rows must all have been read: then no
  // writer can still be inside them. A few chunks are kept for the next writer.
  void release_below(uint64_t position) {
    std::lock_guard lock(growth_);
    for (; (first_chunk_ + 1) * kChunkRows <= position; ++first_chunk_) {
      uint64_t* chunk = chunks_[first_chunk_].exchange(nullptr, std::memory_order_acq_rel);
      if (chunk == nullptr) {
        continue;
      }
      if (spare_.size() < 4) {
        std::memset(chunk, 0, kChunkRows * sizeof(Row));
        spare_.push_back(chunk);
      } else {
        std::free(chunk);
      }
    }
  }

  void set_limit(uint64_t rows) {
    std::lock_guard lock(growth_);
    rows = std::min({rows, kMostRows, end_.load(std::memory_order_relaxed)});
    bool full = next_.load(std::memory_order_relaxed) >= rows;
    limit_.store(full ? kFull : rows, std::memory_order_relaxed);
  }

  // Forgets everything. Only when no thread can append (see Recorder::quiesce).
  void clear() {
    std::lock_guard lock(growth_);
    for (uint64_t i = first_chunk_; i < next_chunk_; ++i) {
      std::free(chunks_[i].exchange(nullptr));
    }
    for (uint64_t* chunk : spare_) {
      std::free(chunk);
    }
    spare_.clear();
    first_chunk_ = 0;
    next_chunk_ = 0;
    next_.store(0);
    end_.store(kChunkRows * kMaxChunks);
    limit_.store(kMostRows);
  }

  uint64_t bytes_held() const {
    uint64_t rows = size();
    uint64_t chunks = (rows + kChunkRows - 1) / kChunkRows - first_chunk_;
    return chunks * kChunkRows * sizeof(Row);
  }

 private:
  static constexpr size_t kWords = sizeof(Row) / sizeof(uint64_t);
  static_assert(sizeof(Row) % sizeof(uint64_t) == 0);

  static constexpr size_t kAhead = 32;  // words
  static constexpr uint64_t kFull = 0;  // as a limit: refuse, and claim nothing

  // Asks for all pages of a chunk at once. Faults one by one cost twice as much, in a virtual
  // machine 2 us each. Linux before 5.14 cannot do this, and has the faults.
  static uint64_t* new_chunk() {
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE; old headers lack the name
    static const auto kPage = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    auto* chunk = static_cast<uint64_t*>(std::calloc(kChunkRows * kWords, sizeof(uint64_t)));
    uintptr_t from = (reinterpret_cast<uintptr_t>(chunk) + kPage - 1) & ~(kPage - 1);
    uintptr_t to = (reinterpret_cast<uintptr_t>(chunk) + kChunkRows * sizeof(Row)) & ~(kPage - 1);
    if (chunk != nullptr) {
      (void)madvise(reinterpret_cast<void*>(from), to - from, kPopulateWrite);
    }
    return chunk;
  }

  // In order: the log ends where memory ran out, and no row lies behind a missing chunk.
  uint64_t* add_chunk(uint64_t index) {
    std::lock_guard lock(growth_);
    while (next_chunk_ <= index && next_chunk_ * kChunkRows < end_.load()) {
      uint64_t* chunk = nullptr;
      if (!spare_.empty()) {
        chunk = spare_.back();
        spare_.pop_back();
      } else {
        chunk = new_chunk();
      }
      if (chunk == nullptr) {
        end_.store(next_chunk_ * kChunkRows);
        limit_.store(kFull);
        break;
      }
      chunks_[next_chunk_++].store(chunk, std::memory_order_release);
    }
    return chunks_[index].load(std::memory_order_acquire);
  }

  // The claim counter is the one line that every thread writes: it gets a line of its own.
  alignas(64) std::atomic<uint64_t> next_{0};
  alignas(64) std::atomic<uint64_t> limit_{kMostRows};
  std::atomic<uint64_t*>* chunks_;  // null: not there yet, or freed
  std::mutex growth_;
  std::vector<uint64_t*> spare_;
  uint64_t first_chunk_ = 0;                            // freed below this
  uint64_t next_chunk_ = 0;                             // not there yet from here on
  std::atomic<uint64_t> end_{kChunkRows * kMaxChunks};  // no row will ever be here or behind
};

}  // namespace pytracer
