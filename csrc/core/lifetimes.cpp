#include "lifetimes.h"

#include "address_table.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <unordered_map>

namespace pytracer {
namespace {

constexpr RowNumber kNone = -1;

struct Device {
  RowNumber snapshot = kNone;  // its recording starts at this event
  AddressTable<RowNumber> live;
  // The same blocks in order. Made only when a label misses every start, since keeping it costs
  // more than the table does.
  std::unique_ptr<std::map<uint64_t, RowNumber>> ordered;
};

class Matcher {
 public:
  Matcher(const EventColumns& events, std::span<const Place> places);
  Lifetimes run();

 private:
  using FirstTouch = std::unordered_map<uint64_t, std::pair<RowNumber, Action>>;

  size_t scan();
  std::vector<FirstTouch> first_touches() const;
  void plant_seeds();
  void step(size_t position);
  void on_seed(Device& device, size_t position);
  void on_alloc(Device& device, size_t position);
  void on_free_requested(Device& device, size_t position);
  void on_free_completed(Device& device, size_t position);
  void on_mention(Device& device, size_t position, uint64_t& unmatched);
  RowNumber begin(Device& device, size_t position, RowNumber start);
  void finish(RowNumber allocation, size_t position);
  RowNumber find_containing(Device& device, uint64_t address);

  bool known_place(size_t position) const { return events_.place[position] < device_of_.size(); }

  Device& device_at(size_t position) { return devices_[device_of_[events_.place[position]]]; }

  EventColumns events_;
  std::vector<uint32_t> device_of_;  // per place
  std::vector<Device> devices_;
  std::vector<size_t> seeds_;
  Lifetimes out_;
};

Matcher::Matcher(const EventColumns& events, std::span<const Place> places) : events_(events) {
  std::map<std::pair<DeviceType, uint8_t>, uint32_t> numbers;
  for (const Place& place : places) {
    auto key = std::pair{place.device_type, place.device_index};
    auto number = numbers.emplace(key, static_cast<uint32_t>(numbers.size())).first->second;
    device_of_.push_back(number);
  }
  devices_.resize(numbers.size());
}

// Finds snapshots and seeds; returns how many allocations there can be.
size_t Matcher::scan() {
  size_t allocations = 0;
  for (size_t i = 0; i < events_.action.size(); ++i) {
    auto action = static_cast<Action>(events_.action[i]);
    if (action == Action::kAlloc) {
      ++allocations;
    } else if (action == Action::kSeed) {
      seeds_.push_back(i);
    } else if (action == Action::kSnapshot && known_place(i)) {
      RowNumber& snapshot = device_at(i).snapshot;
      if (snapshot == kNone) {
        snapshot = static_cast<RowNumber>(i);
      }
    }
  }
  return allocations + seeds_.size();
}

// Per device: the first alloc or free at each address that is also seeded.
std::vector<Matcher::FirstTouch> Matcher::first_touches() const {
  std::vector<FirstTouch> touches(devices_.size());
  size_t last = 0;  // one past the last seed that matters
  for (size_t seed : seeds_) {
    if (known_place(seed)) {
      uint32_t device = device_of_[events_.place[seed]];
      touches[device].try_emplace(events_.address[seed], kNone, Action::kSeed);
      last = seed + 1;
    }
  }
  for (size_t i = 0; i < last; ++i) {
    auto action = static_cast<Action>(events_.action[i]);
    if (action > Action::kFreeCompleted || !known_place(i)) {
      continue;
    }
    uint32_t device = device_of_[events_.place[i]];
    if (static_cast<RowNumber>(i) < devices_[device].snapshot) {
      continue;
    }
    FirstTouch& seeded = touches[device];
    if (auto found = seeded.find(events_.address[i]);
        found != seeded.end() && found->second.first == kNone) {
      found->second = {static_cast<RowNumber>(i), action};
    }
  }
  return touches;
}

// Plants the seeds from before the first event. step() comes to the other seeds in their turn.
void Matcher::plant_seeds() {
  std::vector<FirstTouch> touches = first_touches();
  for (size_t seed : seeds_) {
    auto position = static_cast<RowNumber>(seed);
    if (!known_place(seed) || position < device_at(seed).snapshot) {
      continue;  // step() counts it
    }
    Device& device = device_at(seed);
    auto [touched, action] = touches[device_of_[events_.place[seed]]].at(events_.address[seed]);
    bool was_touched = touched != kNone && touched < position;
    bool was_there = !was_touched || (device.snapshot != kNone && action != Action::kAlloc);
    if (was_there && device.live.find(events_.address[seed]) == nullptr) {
      begin(device, seed, kNone);
    }
  }
}

Lifetimes Matcher::run() {
  size_t most = scan();
  for (auto* column : {&out_.start, &out_.end, &out_.completed}) {
    column->reserve(most);
  }
  out_.address.reserve(most);
  out_.bytes.reserve(most);
  out_.place.reserve(most);
  out_.allocation_of_event.assign(events_.action.size(), kNone);
  plant_seeds();
  for (size_t i = 0; i < events_.action.size(); ++i) {
    step(i);
  }
  return std::move(out_);
}

void Matcher::step(size_t position) {
  if (events_.action[position] >= kActions) {
    ++out_.counters.unknown_actions;
    return;
  }
  if (!known_place(position)) {
    ++out_.counters.unknown_places;
    return;
  }
  Device& device = device_at(position);
  if (static_cast<RowNumber>(position) < device.snapshot) {
    ++out_.counters.before_snapshot;
    return;
  }
  switch (static_cast<Action>(events_.action[position])) {
    case Action::kSeed:
      return on_seed(device, position);
    case Action::kAlloc:
      return on_alloc(device, position);
    case Action::kFreeRequested:
      return on_free_requested(device, position);
    case Action::kFreeCompleted:
      return on_free_completed(device, position);
    case Action::kLabel:
      return on_mention(device, position, out_.counters.unmatched_labels);
    case Action::kSaved:
      return on_mention(device, position, out_.counters.unmatched_saves);
    case Action::kSnapshot:
      out_.counters.repeated_snapshots += static_cast<RowNumber>(position) != device.snapshot;
      return;
    default:
      return;  // segments and ooms are not allocations
  }
}

void Matcher::on_seed(Device& device, size_t position) {
  if (out_.allocation_of_event[position] != kNone) {
    return;  // planted
  }
  if (device.snapshot == kNone && device.live.find(events_.address[position]) == nullptr) {
    begin(device, position, static_cast<RowNumber>(position));
  } else {
    ++out_.counters.duplicate_seeds;
  }
}

void Matcher::on_alloc(Device& device, size_t position) {
  if (RowNumber* live = device.live.find(events_.address[position])) {
    ++out_.counters.implicit_frees;
    finish(*live, position);
    device.live.erase(live);
  }
  begin(device, position, static_cast<RowNumber>(position));
}

void Matcher::on_free_requested(Device& device, size_t position) {
  RowNumber* live = device.live.find(events_.address[position]);
  if (live == nullptr) {
    ++out_.counters.unmatched_free_requests;
    return;
  }
  out_.allocation_of_event[position] = *live;
  RowNumber& end = out_.end[static_cast<size_t>(*live)];
  if (end == kNone) {
    end = static_cast<RowNumber>(position);
  } else {
    ++out_.counters.repeated_free_requests;
  }
}

void Matcher::on_free_completed(Device& device, size_t position) {
  RowNumber* live = device.live.find(events_.address[position]);
  if (live == nullptr) {
    ++(device.snapshot == kNone ? out_.counters.frees_from_before : out_.counters.unmatched_frees);
    return;
  }
  out_.allocation_of_event[position] = *live;
  finish(*live, position);
  device.live.erase(live);
  if (device.ordered) {
    device.ordered->erase(events_.address[position]);
  }
}

void Matcher::on_mention(Device& device, size_t position, uint64_t& unmatched) {
  uint64_t address = events_.address[position];
  RowNumber* live = device.live.find(address);
  RowNumber allocation = live != nullptr ? *live : find_containing(device, address);
  out_.allocation_of_event[position] = allocation;
  unmatched += allocation == kNone;
}

RowNumber Matcher::begin(Device& device, size_t position, RowNumber start) {
  auto allocation = static_cast<RowNumber>(out_.start.size());
  out_.start.push_back(start);
  out_.end.push_back(kNone);
  out_.completed.push_back(kNone);
  out_.address.push_back(events_.address[position]);
  out_.bytes.push_back(events_.bytes[position]);
  out_.place.push_back(events_.place[position]);
  out_.allocation_of_event[position] = allocation;
  device.live.insert(events_.address[position], allocation);
  if (device.ordered) {
    (*device.ordered)[events_.address[position]] = allocation;
  }
  return allocation;
}

void Matcher::finish(RowNumber allocation, size_t position) {
  auto row = static_cast<size_t>(allocation);
  out_.completed[row] = static_cast<RowNumber>(position);
  if (out_.end[row] == kNone) {
    out_.end[row] = static_cast<RowNumber>(position);
  }
}

RowNumber Matcher::find_containing(Device& device, uint64_t address) {
  if (!device.ordered) {
    device.ordered = std::make_unique<std::map<uint64_t, RowNumber>>();
    device.live.for_each(
        [&](uint64_t start, RowNumber allocation) { device.ordered->emplace(start, allocation); });
  }
  auto above = device.ordered->upper_bound(address);
  if (above == device.ordered->begin()) {
    return kNone;
  }
  auto [start, allocation] = *std::prev(above);
  return address - start < out_.bytes[static_cast<size_t>(allocation)] ? allocation : kNone;
}

}  // namespace

std::vector<std::pair<std::string_view, uint64_t>> LifetimeCounters::named() const {
  return {{"before_snapshot", before_snapshot},
          {"repeated_snapshots", repeated_snapshots},
          {"duplicate_seeds", duplicate_seeds},
          {"implicit_frees", implicit_frees},
          {"unmatched_free_requests", unmatched_free_requests},
          {"unmatched_frees", unmatched_frees},
          {"frees_from_before", frees_from_before},
          {"repeated_free_requests", repeated_free_requests},
          {"unmatched_labels", unmatched_labels},
          {"unmatched_saves", unmatched_saves},
          {"unknown_places", unknown_places},
          {"unknown_actions", unknown_actions}};
}

Lifetimes match_lifetimes(const EventColumns& events, std::span<const Place> places) {
  size_t rows = events.action.size();
  if (events.address.size() != rows || events.bytes.size() != rows || events.place.size() != rows) {
    throw std::invalid_argument("event columns differ in length");
  }
  if (rows > static_cast<size_t>(std::numeric_limits<RowNumber>::max())) {
    throw std::invalid_argument("a trace of more than 2,147,483,647 events cannot be analysed");
  }
  return Matcher(events, places).run();
}

}  // namespace pytracer
