// The thread that reads and writes records.

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "storage/tiers/nvme/nvme_store.h"

namespace optstate {
namespace {

// Reads that fail are tried so often.
constexpr uint8_t kAttemptsMax = 3;
// Records that are written behind a pass at once: enough to keep a disk busy.
constexpr uint32_t kWritesMax = 8;

}  // namespace

void NvmeStore::Wake() {
  has_work_ = true;
  if (is_polling_) {
    engine_->Wake();
  } else {
    work_.Signal();
  }
}

void NvmeStore::Run() {
  std::array<io::IoRequest*, 64> completed;
  const absl::MutexLock lock(&mu_);
  while (true) {
    has_work_ = false;
    if (!stop_ && failed_.ok()) Schedule();
    const bool is_idle = engine_->in_flight() == 0;
    if (stop_ && is_idle) return;
    if (is_idle) {
      while (!has_work_ && !stop_) work_.Wait(&mu_);
      continue;
    }
    is_polling_ = true;
    mu_.Unlock();
    const size_t count =
        engine_->Poll(absl::MakeSpan(completed), /*wait=*/true);
    mu_.Lock();
    is_polling_ = false;
    for (size_t i = 0; i < count; ++i) Complete(completed[i]);
    if (count > 0) changed_.SignalAll();
  }
}

void NvmeStore::Schedule() {
  AdvanceCommit();
  ReadDemanded();
  ReadAhead();
  WriteBehind();
}

void NvmeStore::ReadDemanded() {
  while (!demanded_.empty()) {
    const uint32_t record = demanded_.front();
    const bool is_wanted =
        records_[record].loaded_frame == RecordPlace::kNoFrame &&
        table_.place(record).frame == RecordPlace::kNoFrame;
    if (is_wanted && !StartRead(record, /*is_demanded=*/true)) return;
    records_[record].is_demanded = false;
    demanded_.erase(demanded_.begin());
  }
}

// Reads the next records of the pass as far as there are frames. Those that are
// waited for come first.
void NvmeStore::ReadAhead() {
  if (!demanded_.empty()) return;
  for (; read_ahead_ < pass_.size(); ++read_ahead_) {
    const uint32_t record = pass_[read_ahead_];
    if (!records_[record].is_pending ||
        records_[record].loaded_frame != RecordPlace::kNoFrame ||
        table_.place(record).frame != RecordPlace::kNoFrame) {
      continue;
    }
    if (!StartRead(record, /*is_demanded=*/false)) return;
  }
}

// Says whether a frame may be used for another record. Its record is as it is
// on disk, and no thread has it or waits for it. One that the pass is still to
// take goes only for a record that a thread waits for: that thread may be all
// there is to go on with the pass, or have left it half way.
bool NvmeStore::MayBeGivenUp(uint32_t frame, bool is_demanded) const {
  const Record& record = records_[frames_[frame].record];
  if (record.waiters > 0 || (record.is_pending && !is_demanded)) return false;
  return frames_[frame].state == FrameState::kLoaded ||
         (!frames_[frame].is_writing &&
          !table_.place(frames_[frame].record).is_dirty);
}

// Returns a frame for another record: a free one, or that of the record which
// was used longest ago and may be given up. Those that the pass is still to
// take come last. kNoFrame: there is none.
uint32_t NvmeStore::TakeFrame(bool is_demanded) {
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
        records_[record].loaded_frame = RecordPlace::kNoFrame;
        RecordPlace place = table_.place(record);
        place.frame = RecordPlace::kNoFrame;
        table_.SetPlace(record, place);
        return i;
      }
    }
  }
  return RecordPlace::kNoFrame;
}

void NvmeStore::ReleaseFrame(uint32_t frame) {
  frames_[frame].state = FrameState::kFree;
  free_.push_back(frame);
}

bool NvmeStore::StartRead(uint32_t record, bool is_demanded) {
  const uint32_t index = TakeFrame(is_demanded);
  if (index == RecordPlace::kNoFrame) return false;
  const RecordPlace place = table_.place(record);
  Frame& frame = frames_[index];
  frame.record = record;
  frame.slot = place.slot;
  frame.attempts = 0;
  frame.is_fresh = !place.is_on_disk;
  frame.is_checking = false;
  records_[record].loaded_frame = index;
  if (frame.is_fresh) {
    frame.state = FrameState::kLoaded;
    loaded_.PushBack(index);
    changed_.SignalAll();
    return true;
  }
  SubmitRead(index);
  return true;
}

void NvmeStore::SubmitRead(uint32_t index) {
  Frame& frame = frames_[index];
  frame.state = FrameState::kReading;
  ++frame.attempts;
  const RecordFiles::Place place = files_[0].PlaceOf(frame.record, frame.slot);
  const uint64_t bytes = reads_parameters_
                             ? record_layout_.bytes(frame.record)
                             : record_layout_.state_bytes(frame.record);
  frame.request = {};
  frame.request.kind = io::IoRequest::Kind::kRead;
  frame.request.priority = io::IoPriority::kSwapIn;
  frame.request.file = place.file;
  frame.request.offset_bytes = place.offset_bytes;
  frame.request.buffer = {FrameAt(index), bytes};
  engine_->Submit(&frame.request);
}

// While a commit is made, only what belongs to it is written: the slots that
// are not durable hold the step that is being committed. `is_demanded`: the
// frame is needed for a record that a thread waits for.
bool NvmeStore::MayBeWritten(uint32_t record, bool is_demanded) const {
  const RecordPlace place = table_.place(record);
  if (place.frame == RecordPlace::kNoFrame || !place.is_dirty ||
      frames_[place.frame].is_writing || records_[record].pins > 0) {
    return false;
  }
  if (phase_ != CommitPhase::kNone) {
    return phase_ == CommitPhase::kFlushing && records_[record].must_flush;
  }
  return is_demanded || !records_[record].is_pending;
}

// Writes records that the pass is done with, as many as there are frames
// wanted, so that frames are there when the next records are read. Those that
// the pass is still to take are written where a thread waits for another
// record, and there is nothing else to write.
void NvmeStore::WriteBehind() {
  if (phase_ != CommitPhase::kNone) return;
  uint64_t wanted = demanded_.size();
  for (size_t i = read_ahead_; i < pass_.size() && wanted < kWritesMax; ++i) {
    if (records_[pass_[i]].is_pending) ++wanted;
  }
  wanted = std::min<uint64_t>(wanted, kWritesMax);
  for (const bool is_demanded : {false, true}) {
    if (is_demanded && (demanded_.empty() || writing_ > 0)) return;
    for (uint32_t i = unpinned_.first();
         i != FrameList::kEnd && writing_ < wanted; i = unpinned_.Next(i)) {
      const uint32_t record = frames_[i].record;
      if (MayBeWritten(record, is_demanded)) StartWrite(record);
    }
  }
}

void NvmeStore::StartWrite(uint32_t record) {
  const RecordPlace place = table_.place(record);
  Frame& frame = frames_[place.frame];
  std::byte* const bytes = FrameAt(place.frame);
  const bool is_durable = options_.is_durable;
  frame.slot = durable_slots_[record] == 0 ? 1 : 0;
  if (is_durable) {
    record_layout_.TakeParameters(record, arrays().parameters, bytes);
  }
  record_layout_.Checksum(record, bytes, is_durable,
                          table_.checksums(frame.slot));
  frame.is_writing = true;
  ++writing_;
  const RecordFiles::Place to = files_[0].PlaceOf(record, frame.slot);
  frame.request = {};
  frame.request.kind = io::IoRequest::Kind::kWrite;
  frame.request.priority = io::IoPriority::kSwapOut;
  frame.request.file = to.file;
  frame.request.offset_bytes = to.offset_bytes;
  frame.request.buffer = {bytes, is_durable
                                     ? record_layout_.bytes(record)
                                     : record_layout_.state_bytes(record)};
  engine_->Submit(&frame.request);
}

void NvmeStore::Complete(io::IoRequest* request) {
  const auto* const first = &frames_.front().request;
  const auto* const last = &frames_.back().request;
  if (request < first || request > last) {
    return CompleteCommitRequest(*request);
  }
  const auto offset = reinterpret_cast<std::byte*>(request) -
                      reinterpret_cast<std::byte*>(&frames_.front().request);
  const auto frame =
      static_cast<uint32_t>(static_cast<size_t>(offset) / sizeof(Frame));
  if (frames_[frame].is_writing) {
    CompleteWrite(frame);
  } else {
    CompleteRead(frame);
  }
}

void NvmeStore::CompleteRead(uint32_t index) {
  Frame& frame = frames_[index];
  if (frame.request.status.ok()) {
    counters_.bytes_read += frame.request.buffer.size();
    ++counters_.records_read;
    frame.state = FrameState::kLoaded;
    loaded_.PushBack(index);
    return;
  }
  if (frame.attempts < kAttemptsMax) return SubmitRead(index);
  Record& record = records_[frame.record];
  record.error =
      absl::Status(frame.request.status.code(),
                   absl::StrCat(frame.request.status.message(), " (tried ",
                                kAttemptsMax, " times)"));
  record.loaded_frame = RecordPlace::kNoFrame;
  ReleaseFrame(index);
}

void NvmeStore::CompleteWrite(uint32_t index) {
  Frame& frame = frames_[index];
  frame.is_writing = false;
  --writing_;
  if (!frame.request.status.ok()) return Fail(frame.request.status);
  counters_.bytes_written += frame.request.buffer.size();
  ++counters_.records_written;
  table_.SetPlace(frame.record, {.frame = index,
                                 .slot = frame.slot,
                                 .is_on_disk = true,
                                 .is_dirty = false});
  Record& record = records_[frame.record];
  if (!record.must_flush) return;
  record.must_flush = false;
  --flushes_left_;
}

// Nothing is written after this: what is durable stands, and what was not
// written is in its frame.
void NvmeStore::Fail(const absl::Status& why) {
  if (failed_.ok()) failed_ = why;
  phase_ = CommitPhase::kNone;
  changed_.SignalAll();
}

}  // namespace optstate
