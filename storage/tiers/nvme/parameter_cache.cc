#include "storage/tiers/nvme/parameter_cache.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/status_macros.h"
#include "storage/tiers/nvme/nvme_options.h"
#include "storage/tiers/nvme/record_files.h"

namespace optstate::nvme {
namespace {

// Sections that are read at once: enough to keep a disk busy.
constexpr size_t kReadsMax = 8;

}  // namespace

ParameterCache::ParameterCache(const StoreContext* context,
                               StoreMonitor* monitor, const RecordCache* cache)
    : context_(*context),
      monitor_(*monitor),
      cache_(*cache),
      demanded_(0),
      ahead_(0),
      idle_(0) {}

absl::Status ParameterCache::Open() {
  const uint64_t section = context_.record_layout.section_bytes_max();
  if (!context_.holds_parameters() || section == 0) return absl::OkStatus();
  const auto count = static_cast<uint32_t>(std::min<uint64_t>(
      context_.options.parameter_cache_bytes / section, context_.records()));
  memory_.reset(static_cast<std::byte*>(
      std::aligned_alloc(io::kSectorBytes, count * section)));
  if (memory_ == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no memory for a parameter cache of ", count * section, " bytes"));
  }
  const absl::MutexLock lock(&monitor_.mu);
  entries_ = std::vector<Entry>(count);
  entry_of_.assign(context_.records(), kNone);
  for (uint32_t i = count; i > 0; --i) free_.push_back(i - 1);
  demanded_ = FrameList(count);
  ahead_ = FrameList(count);
  idle_ = FrameList(count);
  reading_.reserve(kReadsMax);
  return absl::OkStatus();
}

absl::StatusOr<bool> ParameterCache::Read(uint32_t record, Use use) {
  const absl::MutexLock lock(&monitor_.mu);
  const bool is_hit = entry_of_[record] != kNone;
  while (true) {
    OPTSTATE_RETURN_IF_ERROR(monitor_.failed);
    if (cache_.IsInMemory(record)) return false;
    const uint32_t i = Demand(record);
    if (i != kNone) {
      Entry& entry = entries_[i];
      if (entry.state == State::kReady) {
        ++(is_hit ? counters_.hits : counters_.misses);
        UseEntry(i, use);
        return true;
      }
      if (entry.state == State::kFailed) {
        absl::Status error = std::move(entry.error);
        Free(i);
        return error;
      }
      if (entry.state == State::kLoaded && !entry.is_checking) {
        OPTSTATE_RETURN_IF_ERROR(Check(i));
        continue;
      }
    }
    monitor_.changed.Wait(&monitor_.mu);
  }
}

uint32_t ParameterCache::Demand(uint32_t record) {
  uint32_t i = entry_of_[record];
  if (i == kNone) {
    i = TakeEntry(/*is_demanded=*/true);
    if (i == kNone) return kNone;
    Assign(i, record);
  }
  if (entries_[i].state == State::kWanted && !demanded_.Has(i)) {
    ahead_.Remove(i);
    demanded_.PushBack(i);
    monitor_.Wake();
  }
  return i;
}

absl::Status ParameterCache::Check(uint32_t i) {
  Entry& entry = entries_[i];
  const uint32_t record = entry.record;
  entry.is_checking = true;
  idle_.Remove(i);
  const StoreCounters::CallerTimer timer(&monitor_.counters);
  monitor_.mu.Unlock();
  const uint32_t sum = context_.record_layout.SectionSum(record, SectionAt(i));
  monitor_.mu.Lock();
  monitor_.changed.SignalAll();
  entry.is_checking = false;
  if (entry.is_stale) {
    Free(i);
    return absl::OkStatus();
  }
  if (sum != entry.sum) {
    const uint32_t slot = entry.slot;
    Free(i);
    return context_.DamagedError(record, slot,
                                 std::numeric_limits<int64_t>::max());
  }
  entry.state = State::kReady;
  idle_.PushBack(i);
  return absl::OkStatus();
}

void ParameterCache::UseEntry(uint32_t i, Use use) {
  Entry& entry = entries_[i];
  ++entry.users;
  idle_.Remove(i);
  monitor_.mu.Unlock();
  use(context_.record_layout.SectionView(entry.record, SectionAt(i)));
  monitor_.mu.Lock();
  if (--entry.users > 0) return;
  monitor_.changed.SignalAll();
  if (entry.is_stale) {
    Free(i);
  } else {
    idle_.PushBack(i);
  }
}

uint32_t ParameterCache::TakeEntry(bool is_demanded) {
  if (!free_.empty()) {
    const uint32_t entry = free_.back();
    free_.pop_back();
    return entry;
  }
  uint32_t found = kNone;
  for (uint32_t i = idle_.first(); i != FrameList::kEnd && found == kNone;
       i = idle_.Next(i)) {
    if (!entries_[i].is_kept) found = i;
  }
  if (is_demanded && found == kNone) {
    // An idle entry is given up for the parameter that is needed now.
    found = ahead_.first() != FrameList::kEnd ? ahead_.first() : idle_.first();
    if (found == FrameList::kEnd) found = kNone;
  }
  if (found == kNone) return kNone;
  Free(found);
  free_.pop_back();
  return found;
}

void ParameterCache::Assign(uint32_t i, uint32_t record) {
  const RecordPlace place = cache_.place(record);
  Entry& entry = entries_[i];
  entry.state = State::kWanted;
  entry.attempts = 0;
  entry.record = record;
  entry.slot = place.slot;
  entry.sum = context_.record_layout.section_sum(
      record, context_.table.checksums(place.slot));
  entry_of_[record] = i;
}

void ParameterCache::Free(uint32_t i) {
  Entry& entry = entries_[i];
  if (!entry.is_stale) entry_of_[entry.record] = kNone;
  demanded_.Remove(i);
  ahead_.Remove(i);
  idle_.Remove(i);
  entry.state = State::kFree;
  entry.is_kept = false;
  entry.is_stale = false;
  entry.error = absl::OkStatus();
  free_.push_back(i);
}

void ParameterCache::Prefetch(uint32_t record) {
  monitor_.mu.AssertHeld();
  if (entries_.empty()) return;
  if (const uint32_t i = entry_of_[record]; i != kNone) {
    entries_[i].is_kept = true;
    return;
  }
  if (cache_.IsInMemory(record) || !cache_.place(record).is_on_disk) return;
  const uint32_t i = TakeEntry(/*is_demanded=*/false);
  if (i == kNone) {
    ++counters_.refused;
    return;
  }
  Assign(i, record);
  ++counters_.prefetched;
  entries_[i].is_kept = true;
  ahead_.PushBack(i);
  monitor_.Wake();
}

void ParameterCache::Release(uint32_t record) {
  monitor_.mu.AssertHeld();
  if (entries_.empty()) return;
  if (const uint32_t i = entry_of_[record]; i != kNone) {
    entries_[i].is_kept = false;
  }
}

void ParameterCache::Drop(uint32_t record) {
  monitor_.mu.AssertHeld();
  if (entries_.empty() || entry_of_[record] == kNone) return;
  const uint32_t i = std::exchange(entry_of_[record], kNone);
  Entry& entry = entries_[i];
  entry.is_stale = true;
  if (entry.state != State::kReading && !entry.is_checking &&
      entry.users == 0) {
    Free(i);
  }
}

void ParameterCache::CountFromFrame() {
  monitor_.mu.AssertHeld();
  ++counters_.from_frames;
}

void ParameterCache::StartDemanded() {
  monitor_.mu.AssertHeld();
  Start(&demanded_);
}

void ParameterCache::StartAhead() {
  monitor_.mu.AssertHeld();
  Start(&ahead_);
}

void ParameterCache::Start(FrameList* wanted) {
  while (reading_.size() < kReadsMax && wanted->first() != FrameList::kEnd) {
    const uint32_t i = wanted->first();
    // A record that has come to a frame since may be written to its slot.
    if (cache_.IsInMemory(entries_[i].record)) {
      Free(i);
      monitor_.changed.SignalAll();
      continue;
    }
    wanted->Remove(i);
    entries_[i].state = State::kReading;
    reading_.push_back(i);
    Submit(i);
  }
}

void ParameterCache::Submit(uint32_t i) {
  Entry& entry = entries_[i];
  const RecordFiles::Place at =
      context_.files->PlaceOf(entry.record, entry.slot);
  ++entry.attempts;
  entry.request = {};
  entry.request.kind = io::IoRequest::Kind::kRead;
  entry.request.priority = io::IoPriority::kSwapIn;
  entry.request.file = at.file;
  entry.request.offset_bytes =
      at.offset_bytes + context_.record_layout.section_begin(entry.record);
  entry.request.buffer = {SectionAt(i),
                          context_.record_layout.section_bytes(entry.record)};
  monitor_.Submit(&entry.request);
}

bool ParameterCache::Owns(const io::IoRequest* request) const {
  monitor_.mu.AssertHeld();
  return std::any_of(reading_.begin(), reading_.end(), [&](uint32_t i) {
    return request == &entries_[i].request;
  });
}

void ParameterCache::Complete(const io::IoRequest* request) {
  monitor_.mu.AssertHeld();
  const auto found =
      std::find_if(reading_.begin(), reading_.end(),
                   [&](uint32_t i) { return request == &entries_[i].request; });
  const uint32_t i = *found;
  Entry& entry = entries_[i];
  const bool failed = !request->status.ok();
  if (failed && !entry.is_stale && entry.attempts < kNvmeReadAttemptsMax) {
    return Submit(i);
  }
  reading_.erase(found);
  if (entry.is_stale) return Free(i);
  if (failed) {
    entry.error = absl::Status(
        request->status.code(),
        absl::StrCat(request->status.message(), " (tried ",
                     static_cast<int>(kNvmeReadAttemptsMax), " times)"));
    entry.state = State::kFailed;
  } else {
    monitor_.counters.OnSectionRead(request->buffer.size());
    entry.state = State::kLoaded;
  }
  idle_.PushBack(i);
}

bool ParameterCache::IsReading(uint32_t record, uint32_t slot) const {
  monitor_.mu.AssertHeld();
  return std::any_of(reading_.begin(), reading_.end(), [&](uint32_t i) {
    return entries_[i].record == record && entries_[i].slot == slot;
  });
}

storage::ParameterCacheState ParameterCache::state() const {
  monitor_.mu.AssertHeld();
  return {.bytes = entries_.size() * context_.record_layout.section_bytes_max(),
          .counters = counters_};
}

}  // namespace optstate::nvme
