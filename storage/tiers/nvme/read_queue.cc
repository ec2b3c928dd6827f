#include "storage/tiers/nvme/read_queue.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"

namespace optstate::nvme {

ReadQueue::ReadQueue(RecordCache* cache) : cache_(*cache) {
  demanded_.reserve(cache->records());
  pass_.reserve(cache->records());
}

bool ReadQueue::Demand(uint32_t record) {
  if (cache_.record(record).is_demanded) return false;
  cache_.record(record).is_demanded = true;
  demanded_.push_back(record);
  return true;
}

void ReadQueue::PopDemanded() {
  cache_.record(demanded_.front()).is_demanded = false;
  demanded_.erase(demanded_.begin());
}

size_t ReadQueue::BeginPass(absl::Span<const uint8_t> wanted) {
  pass_.clear();
  for (uint32_t i = 0; i < cache_.records(); ++i) {
    cache_.SetPending(i, wanted[i] != 0);
    cache_.record(i).error = absl::OkStatus();
  }
  for (const bool in_frame : {true, false}) {
    for (uint32_t i = 0; i < cache_.records(); ++i) {
      if (wanted[i] == 0 || cache_.IsInMemory(i) != in_frame) continue;
      pass_.push_back(i);
    }
  }
  read_ahead_ = 0;
  ++passes_;
  return pass_.size();
}

uint32_t ReadQueue::NextAhead() {
  for (; read_ahead_ < pass_.size(); ++read_ahead_) {
    const uint32_t record = pass_[read_ahead_];
    if (cache_.record(record).is_pending && !cache_.IsInMemory(record)) {
      return record;
    }
  }
  return kNone;
}

size_t ReadQueue::CountWanted(size_t max) const {
  size_t wanted = demanded_.size();
  for (size_t i = read_ahead_; i < pass_.size() && wanted < max; ++i) {
    if (cache_.record(pass_[i]).is_pending) ++wanted;
  }
  return std::min(wanted, max);
}

void ReadQueue::OnCommitRequested() {
  passes_before_ = std::exchange(passes_, 0);
}

}  // namespace optstate::nvme
