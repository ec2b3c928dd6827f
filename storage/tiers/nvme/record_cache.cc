#include "storage/tiers/nvme/record_cache.h"

#include <cstddef>

namespace optstate::nvme {

RecordCache::RecordCache(uint32_t frames, uint32_t records, FrameTable* table)
    : table_(*table),
      frames_(frames),
      records_(records),
      lists_(kLists, FrameList(frames)) {
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
    Enlist(place.frame);
  }
  for (auto i = static_cast<uint32_t>(frames_.size()); i > 0; --i) {
    if (frames_[i - 1].state == FrameState::kFree) free_.push_back(i - 1);
  }
}

void RecordCache::Reset(uint32_t frames) {
  frames_ = std::vector<Frame>(frames);
  free_.clear();
  free_.reserve(frames);
  lists_.assign(kLists, FrameList(frames));
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
  Delist(place.frame);
}

bool RecordCache::Unpin(uint32_t record) {
  if (--records_[record].pins > 0) return false;
  Enlist(table_.place(record).frame);
  return true;
}

void RecordCache::SetPending(uint32_t record, bool is_pending) {
  records_[record].is_pending = is_pending;
  EnlistFrameOf(record);
}

void RecordCache::SetMustFlush(uint32_t record, bool must_flush) {
  records_[record].must_flush = must_flush;
  EnlistFrameOf(record);
}

RecordCache::List RecordCache::ListOf(uint32_t index) const {
  const Frame& frame = frames_[index];
  const Record& record = records_[frame.record];
  if (frame.state == FrameState::kLoaded && !frame.is_checking) {
    return record.is_pending ? List::kLoadedPending : List::kLoaded;
  }
  if (frame.state != FrameState::kReady || frame.is_writing ||
      record.pins > 0) {
    return List::kNone;
  }
  if (!table_.place(frame.record).is_dirty) {
    return record.is_pending ? List::kCleanPending : List::kClean;
  }
  if (record.must_flush) return List::kFlush;
  return record.is_pending ? List::kDirtyPending : List::kDirty;
}

void RecordCache::Enlist(uint32_t frame) {
  const List list = ListOf(frame);
  if (list == frames_[frame].list) return;
  Delist(frame);
  frames_[frame].list = list;
  if (list != List::kNone) lists_[static_cast<size_t>(list)].PushBack(frame);
}

void RecordCache::Delist(uint32_t frame) {
  const List list = frames_[frame].list;
  if (list != List::kNone) lists_[static_cast<size_t>(list)].Remove(frame);
  frames_[frame].list = List::kNone;
}

void RecordCache::EnlistFrameOf(uint32_t record) {
  const uint32_t loaded = records_[record].loaded_frame;
  const uint32_t frame =
      loaded != kNoFrame ? loaded : table_.place(record).frame;
  if (frame != kNoFrame) Enlist(frame);
}

// The record of a frame that is given up is as it is on disk, and no thread has
// it or waits for it. One that the pass is still to take goes only for a record
// that a thread waits for: that thread may be all there is to go on with the
// pass, or have left it half way.
uint32_t RecordCache::TakeFrame(bool is_demanded) {
  if (!free_.empty()) {
    const uint32_t frame = free_.back();
    free_.pop_back();
    return frame;
  }
  for (const List list : {List::kLoaded, List::kClean, List::kLoadedPending,
                          List::kCleanPending}) {
    if (list == List::kLoadedPending && !is_demanded) break;
    // Each record that is passed over has a thread that waits for it.
    for (uint32_t i = frames(list).first(); i != FrameList::kEnd;
         i = frames(list).Next(i)) {
      const uint32_t record = frames_[i].record;
      if (records_[record].waiters > 0) continue;
      Delist(i);
      records_[record].loaded_frame = kNoFrame;
      RecordPlace place = table_.place(record);
      place.frame = kNoFrame;
      table_.SetPlace(record, place);
      return i;
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
  Enlist(frame);
}

void RecordCache::DropLoaded(uint32_t frame) {
  records_[frames_[frame].record].loaded_frame = kNoFrame;
  Delist(frame);
  frames_[frame].is_checking = false;
  frames_[frame].state = FrameState::kFree;
  free_.push_back(frame);
}

void RecordCache::BeginCheck(uint32_t record) {
  const uint32_t frame = records_[record].loaded_frame;
  frames_[frame].is_checking = true;
  Delist(frame);
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
  Enlist(frame);
}

bool RecordCache::IsWritable(uint32_t record) const {
  const RecordPlace place = table_.place(record);
  return place.frame != kNoFrame && place.is_dirty &&
         !frames_[place.frame].is_writing && records_[record].pins == 0;
}

void RecordCache::BeginWrite(uint32_t frame, uint32_t slot) {
  frames_[frame].slot = slot;
  frames_[frame].is_writing = true;
  Delist(frame);
  ++writing_;
}

void RecordCache::EndWrite(uint32_t frame) {
  frames_[frame].is_writing = false;
  Enlist(frame);
  --writing_;
}

void RecordCache::SetWritten(uint32_t frame) {
  table_.SetPlace(frames_[frame].record, {.frame = frame,
                                          .slot = frames_[frame].slot,
                                          .is_on_disk = true,
                                          .is_dirty = false});
  Enlist(frame);
}

// A frame that is being given up is not written again; what it had is lost with
// the slot, as if the damage had been found later.
void RecordCache::SetDamaged(uint32_t record, uint32_t slot) {
  RecordPlace place = table_.place(record);
  if (place.frame == kNoFrame || place.frame >= vacated_from_) return;
  if (place.is_dirty || !place.is_on_disk || place.slot != slot) return;
  place.is_dirty = true;
  table_.SetPlace(record, place);
  Enlist(place.frame);
}

}  // namespace optstate::nvme
