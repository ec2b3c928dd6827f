#include "storage/tiers/nvme/frame_checks.h"

#include <cstddef>
#include <cstring>

namespace optstate::nvme {

FrameChecks::FrameChecks(const StoreContext* context, StoreMonitor* monitor,
                         RecordCache* cache)
    : context_(*context), monitor_(*monitor), cache_(*cache) {
  Reset();
}

void FrameChecks::Reset() {
  sums_.resize(context_.frames() *
               context_.record_layout.record_checksums_max());
}

absl::Status FrameChecks::Check(uint32_t record, bool with_parameters) {
  monitor_.mu.AssertHeld();
  return CheckLocked(record, with_parameters);
}

absl::Status FrameChecks::CheckLocked(uint32_t record, bool with_parameters) {
  const uint32_t frame = cache_.record(record).loaded_frame;
  cache_.BeginCheck(record);
  const uint32_t slot = cache_.place(record).slot;
  const bool is_fresh = cache_.frame(frame).is_fresh;
  const StoreCounters::CallerTimer timer(&monitor_.counters);
  monitor_.mu.Unlock();
  std::byte* const bytes = context_.FrameAt(frame);
  int64_t different = -1;
  if (is_fresh) {
    std::memset(bytes, 0, context_.record_layout.bytes(record));
  } else {
    different = context_.record_layout.FirstDifference(
        record, bytes, with_parameters, context_.table.checksums(slot));
  }
  if (different < 0 && with_parameters && !context_.holds_parameters()) {
    context_.record_layout.PutParameters(record, bytes, context_.parameters);
  }
  monitor_.mu.Lock();
  monitor_.changed.SignalAll();
  if (different >= 0) {
    cache_.DropLoaded(frame);
    monitor_.Wake();
    return context_.DamagedError(record, slot, different);
  }
  cache_.EndCheck(record);
  return absl::OkStatus();
}

void FrameChecks::Sum(uint32_t frame) {
  monitor_.mu.AssertHeld();
  SumLocked(frame);
}

void FrameChecks::SumLocked(uint32_t index) {
  RecordCache::Frame& frame = cache_.frame(index);
  const uint32_t record = frame.record;
  frame.is_summing = true;
  monitor_.mu.Unlock();
  std::byte* const bytes = context_.FrameAt(index);
  const bool with_parameters = context_.writes_parameters();
  if (with_parameters && !context_.holds_parameters()) {
    context_.record_layout.TakeParameters(record, context_.parameters, bytes);
  }
  context_.record_layout.Sum(record, bytes, with_parameters, SumsOf(index));
  monitor_.mu.Lock();
  frame.is_summing = false;
  frame.has_sums = true;
  if (cache_.record(record).waiters > 0) monitor_.changed.SignalAll();
}

void FrameChecks::PutSums(uint32_t index) {
  monitor_.mu.AssertHeld();
  const RecordCache::Frame& frame = cache_.frame(index);
  context_.record_layout.PutSums(frame.record, SumsOf(index),
                                 context_.writes_parameters(),
                                 context_.table.checksums(frame.slot));
}

}  // namespace optstate::nvme
