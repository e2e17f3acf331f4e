#include "harvest.h"

#include <algorithm>
#include <span>
#include <tuple>

namespace pytracer {

namespace {

constexpr const char* kLossNames[std::tuple_size_v<Recorder::Losses>] = {"lost_alloc",
                                                                         "lost_free_requested",
                                                                         "lost_free_completed",
                                                                         "lost_segment_alloc",
                                                                         "lost_segment_free",
                                                                         "lost_segment_map",
                                                                         "lost_segment_unmap",
                                                                         "lost_snapshot",
                                                                         "lost_seed",
                                                                         "lost_seed_segment",
                                                                         "lost_oom",
                                                                         "lost_label",
                                                                         "lost_saved",
                                                                         "lost_scopes",
                                                                         "lost_places",
                                                                         "merged_threads",
                                                                         "forgotten_nodes"};

template <class Row, class Sink>
void add_some(const std::vector<Row>& rows, Sink& sink) {
  for (size_t i = 0; i < rows.size(); i += kMaxRowsPerChunk) {
    size_t count = std::min(kMaxRowsPerChunk, rows.size() - i);
    sink.add(std::span<const Row>(rows.data() + i, count));
  }
}

}  // namespace

// Moves `from` behind the rows that were copied: all of them, or those before a later flush's row.
// Returns false if a row on the way is still being written.
template <class Row, class Sink, class Change, class IsLater>
bool Harvest::copy(const AppendLog<Row>& log,
                   uint64_t& from,
                   Stretch stretch,
                   Sink& sink,
                   Change change,
                   IsLater is_later) {
  std::vector<Row> batch;
  while (from < stretch.to) {
    batch.clear();
    uint64_t end = std::min(stretch.to, from + kMaxRowsPerChunk);
    uint64_t reached = log.read(from, end, [&](Row row) {
      change(row);
      batch.push_back(row);
    });
    uint64_t overdue = std::min(std::max(stretch.overdue, from), from + batch.size()) - from;
    auto first = batch.begin() + static_cast<std::ptrdiff_t>(overdue);
    auto later = std::find_if(first, batch.end(), is_later);
    auto count = static_cast<size_t>(later - batch.begin());
    if (count > 0) {
      sink.add(std::span<const Row>(batch).first(count));
    }
    from += count;
    if (later != batch.end()) {
      return true;
    }
    if (reached < end) {
      return false;
    }
  }
  return true;
}

template <class Sink>
void Harvest::drain_tables(Sink& sink) {
  Recorder& recorder = Recorder::get();
  auto labels = recorder.labels.rows_from(labels_);
  auto places = recorder.places.rows_from(places_);
  auto stacks = recorder.stacks.rows_from(stacks_);
  std::vector<NamedThread> threads;
  for (const ThreadName& thread : recorder.threads_from(threads_)) {
    threads.push_back({thread.native_id, recorder.strings.intern(thread.text)});
  }
  std::vector<NamedCount> losses;
  Recorder::Losses lost = recorder.losses();
  for (size_t i = 0; i < lost.size(); ++i) {
    uint64_t count = lost[i] - lost_before_[i];
    if (count != losses_[i]) {
      losses_[i] = count;
      losses.push_back({recorder.strings.intern(kLossNames[i]), count});
    }
  }
  auto strings = recorder.strings.rows_from(strings_);
  labels_ += labels.size();
  places_ += places.size();
  stacks_ += stacks.size();
  threads_ += threads.size();
  strings_ += strings.size();
  add_some(strings, sink);
  add_some(stacks, sink);
  add_some(places, sink);
  add_some(labels, sink);
  add_some(threads, sink);
  add_some(losses, sink);
}

template <class Sink>
void Harvest::add_unfinished(Sink& sink) {
  Recorder& recorder = Recorder::get();
  NamedCount loss{recorder.strings.intern("lost_unfinished_rows"), 1};
  auto strings = recorder.strings.rows_from(strings_);
  strings_ += strings.size();
  add_some(strings, sink);
  sink.add(std::span<const NamedCount>(&loss, 1));
}

template <class Sink>
bool Harvest::drain(Sink& sink, uint64_t until) {
  Recorder& recorder = Recorder::get();
  Recorder::Positions end = recorder.end_of(session_);
  Stretch events{seen_.events, end.events};
  Stretch scope_ends{seen_.scope_ends, end.scope_ends};
  Stretch scopes{seen_.scopes, end.scopes};
  seen_ = end;
  drain_tables(sink);
  auto renumber_outer = [&](ScopeBegin& row) {
    row.parent = own_number(row.parent);
    row.forward = own_number(row.forward);
  };
  auto renumber = [&](auto& row) { row.scope = own_number(row.scope); };
  auto is_later = [&](const ScopeBegin& row) { return row.ticks > until; };
  // A clock may be read a moment too early, so references count as well.
  auto refers_later = [&](const auto& row) {
    return row.ticks > until || row.scope > read_.scopes - start_.scopes;
  };
  bool whole = copy(recorder.scopes, read_.scopes, scopes, sink, renumber_outer, is_later);
  whole &= copy(recorder.scope_ends, read_.scope_ends, scope_ends, sink, renumber, refers_later);
  whole &= copy(recorder.events, read_.events, events, sink, renumber, refers_later);
  return whole;
}

template bool Harvest::drain(TraceWriter& sink, uint64_t until);
template bool Harvest::drain(RecordingBuilder& sink, uint64_t until);
template bool Harvest::drain(Nowhere& sink, uint64_t until);
template void Harvest::add_unfinished(TraceWriter& sink);
template void Harvest::add_unfinished(RecordingBuilder& sink);

}  // namespace pytracer
