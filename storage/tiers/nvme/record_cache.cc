#include "storage/tiers/nvme/record_cache.h"

#include <cstddef>

namespace optstate::nvme {

RecordCache::RecordCache(uint32_t frames, uint32_t records, FrameTable* table)
    : table_(*table),
      frames_(frames),
      records_(records),
      unpinned_(frames),
      loaded_(frames) {
  free_.reserve(frames);
}

void RecordCache::Adopt() {
  for (uint32_t i = 0; i < records_.size(); ++i) {
    const RecordPlace place = table_.place(i);
    if (place.frame == kNoFrame) continue;
    Frame& frame = frames_[place.frame];
    frame.state = FrameState::kReady;
    frame.record = i;
    frame.slot = place.slot;
    unpinned_.PushBack(place.frame);
  }
  for (auto i = static_cast<uint32_t>(frames_.size()); i > 0; --i) {
    if (frames_[i - 1].state == FrameState::kFree) free_.push_back(i - 1);
  }
}

void RecordCache::Reset(uint32_t frames) {
  frames_ = std::vector<Frame>(frames);
  free_.clear();
  free_.reserve(frames);
  unpinned_ = FrameList(frames);
  loaded_ = FrameList(frames);
  writing_ = 0;
  vacated_from_ = kNoFrame;
  for (Record& record : records_) record.loaded_frame = kNoFrame;
  Adopt();
}

bool RecordCache::IsInMemory(uint32_t record) const {
  return records_[record].loaded_frame != kNoFrame ||
         table_.place(record).frame != kNoFrame;
}

uint32_t RecordCache::FrameOf(const io::IoRequest* request) const {
  const auto* const first = &frames_.front().request;
  const auto* const last = &frames_.back().request;
  if (request < first || request > last) return kNoFrame;
  const auto offset = reinterpret_cast<const std::byte*>(request) -
                      reinterpret_cast<const std::byte*>(first);
  return static_cast<uint32_t>(static_cast<size_t>(offset) / sizeof(Frame));
}

bool RecordCache::MayPin(uint32_t record,
                         storage::StateStore::Access access) const {
  const Frame& frame = frames_[table_.place(record).frame];
  return access == storage::StateStore::Access::kRead ||
         (!frame.is_writing && !frame.is_summing &&
          !records_[record].must_flush);
}

void RecordCache::Pin(uint32_t index, storage::StateStore::Access access,
                      bool is_of_pass) {
  Record& record = records_[index];
  RecordPlace place = table_.place(index);
  if (access != storage::StateStore::Access::kRead) {
    if (!place.is_dirty) {
      place.is_dirty = true;
      table_.SetPlace(index, place);
    }
    frames_[place.frame].has_sums = false;
    record.is_of_pass = is_of_pass;
  }
  ++record.pins;
  record.is_pending = false;
  unpinned_.Remove(place.frame);
}

bool RecordCache::Unpin(uint32_t record) {
  if (--records_[record].pins > 0) return false;
  unpinned_.PushBack(table_.place(record).frame);
  return true;
}

// Says whether a frame may be used for another record. Its record is as it is
// on disk, and no thread has it or waits for it. One that the pass is still to
// take goes only for a record that a thread waits for: that thread may be all
// there is to go on with the pass, or have left it half way.
bool RecordCache::MayBeGivenUp(uint32_t frame, bool is_demanded) const {
  const Record& record = records_[frames_[frame].record];
  if (record.waiters > 0 || (record.is_pending && !is_demanded)) return false;
  return frames_[frame].state == FrameState::kLoaded ||
         (!frames_[frame].is_writing &&
          !table_.place(frames_[frame].record).is_dirty);
}

uint32_t RecordCache::TakeFrame(bool is_demanded) {
  if (!free_.empty()) {
    const uint32_t frame = free_.back();
    free_.pop_back();
    return frame;
  }
  for (const bool may_be_pending : {false, true}) {
    if (may_be_pending && !is_demanded) break;
    for (FrameList* const list : {&loaded_, &unpinned_}) {
      for (uint32_t i = list->first(); i != FrameList::kEnd;
           i = list->Next(i)) {
        if (!MayBeGivenUp(i, may_be_pending)) continue;
        list->Remove(i);
        const uint32_t record = frames_[i].record;
        records_[record].loaded_frame = kNoFrame;
        RecordPlace place = table_.place(record);
        place.frame = kNoFrame;
        table_.SetPlace(record, place);
        return i;
      }
    }
  }
  return kNoFrame;
}

void RecordCache::Assign(uint32_t index, uint32_t record) {
  const RecordPlace place = table_.place(record);
  Frame& frame = frames_[index];
  frame.state = FrameState::kReading;
  frame.record = record;
  frame.slot = place.slot;
  frame.attempts = 0;
  frame.is_fresh = !place.is_on_disk || records_[record].is_overwritten;
  frame.is_checking = false;
  frame.has_sums = false;
  records_[record].loaded_frame = index;
}

void RecordCache::SetLoaded(uint32_t frame) {
  frames_[frame].state = FrameState::kLoaded;
  loaded_.PushBack(frame);
}

void RecordCache::DropLoaded(uint32_t frame) {
  records_[frames_[frame].record].loaded_frame = kNoFrame;
  frames_[frame].is_checking = false;
  frames_[frame].state = FrameState::kFree;
  free_.push_back(frame);
}

void RecordCache::BeginCheck(uint32_t record) {
  const uint32_t frame = records_[record].loaded_frame;
  frames_[frame].is_checking = true;
  loaded_.Remove(frame);
}

void RecordCache::EndCheck(uint32_t index) {
  Record& record = records_[index];
  const uint32_t frame = record.loaded_frame;
  frames_[frame].is_checking = false;
  record.loaded_frame = kNoFrame;
  frames_[frame].state = FrameState::kReady;
  RecordPlace place = table_.place(index);
  place.frame = frame;
  place.is_dirty = frames_[frame].is_fresh;
  table_.SetPlace(index, place);
  unpinned_.PushBack(frame);
}

bool RecordCache::IsWritable(uint32_t record) const {
  const RecordPlace place = table_.place(record);
  return place.frame != kNoFrame && place.is_dirty &&
         !frames_[place.frame].is_writing && records_[record].pins == 0;
}

void RecordCache::BeginWrite(uint32_t frame, uint32_t slot) {
  frames_[frame].slot = slot;
  frames_[frame].is_writing = true;
  ++writing_;
}

void RecordCache::EndWrite(uint32_t frame) {
  frames_[frame].is_writing = false;
  --writing_;
}

void RecordCache::SetWritten(uint32_t frame) {
  table_.SetPlace(frames_[frame].record, {.frame = frame,
                                          .slot = frames_[frame].slot,
                                          .is_on_disk = true,
                                          .is_dirty = false});
}

// A frame that is being given up is not written again; what it had is lost with
// the slot, as if the damage had been found later.
void RecordCache::SetDamaged(uint32_t record, uint32_t slot) {
  RecordPlace place = table_.place(record);
  if (place.frame == kNoFrame || place.frame >= vacated_from_) return;
  if (place.is_dirty || !place.is_on_disk || place.slot != slot) return;
  place.is_dirty = true;
  table_.SetPlace(record, place);
}

}  // namespace optstate::nvme
