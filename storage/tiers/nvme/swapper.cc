#include "storage/tiers/nvme/swapper.h"

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "storage/io/io_engine.h"
#include "storage/tiers/nvme/frame_list.h"
#include "storage/tiers/nvme/nvme_options.h"
#include "storage/tiers/nvme/record_files.h"

namespace optstate::nvme {
namespace {

// Records that are written behind a pass at once: enough to keep a disk busy.
constexpr size_t kWritesMax = 8;

}  // namespace

Swapper::Swapper(const StoreContext* context, StoreMonitor* monitor,
                 RecordCache* cache, ReadQueue* queue, FrameChecks* checks,
                 Committer* committer, const Verifier* verifier,
                 const ParameterCache* parameters, RecordMover* mover)
    : context_(*context),
      monitor_(*monitor),
      cache_(*cache),
      queue_(*queue),
      checks_(*checks),
      committer_(*committer),
      verifier_(*verifier),
      parameters_(*parameters),
      mover_(*mover) {
  unsummed_.reserve(context->frames());
}

bool Swapper::has_unsummed() const {
  monitor_.mu.AssertHeld();
  return !unsummed_.empty();
}

bool Swapper::reads_parameters() const {
  monitor_.mu.AssertHeld();
  return reads_parameters_ || context_.holds_parameters();
}

void Swapper::set_reads_parameters(bool reads_parameters) {
  monitor_.mu.AssertHeld();
  reads_parameters_ = reads_parameters;
}

void Swapper::Flush() {
  monitor_.mu.AssertHeld();
  if (!committer_.is_flushing()) return;
  StartWrites(RecordCache::List::kFlush, /*is_demanded=*/false,
              cache_.records());
}

bool Swapper::IsToVacate(uint32_t record) const {
  const RecordPlace place = cache_.place(record);
  return place.frame != RecordCache::kNoFrame &&
         place.frame >= cache_.vacated_from() && place.is_dirty;
}

bool Swapper::is_vacating() const {
  monitor_.mu.AssertHeld();
  for (uint32_t i = 0; i < cache_.records(); ++i) {
    if (IsToVacate(i)) return true;
  }
  return false;
}

uint64_t Swapper::records_to_vacate() const {
  monitor_.mu.AssertHeld();
  if (cache_.vacated_from() == RecordCache::kNoFrame) return 0;
  uint64_t count = 0;
  for (uint32_t i = 0; i < cache_.records(); ++i) {
    if (IsToVacate(i)) ++count;
  }
  return count;
}

void Swapper::Vacate() {
  monitor_.mu.AssertHeld();
  if (cache_.vacated_from() == RecordCache::kNoFrame) return;
  for (const auto list :
       {RecordCache::List::kDirty, RecordCache::List::kDirtyPending,
        RecordCache::List::kFlush}) {
    StartWrites(list, /*is_demanded=*/true, cache_.records(),
                cache_.vacated_from());
  }
}

void Swapper::Reset() {
  monitor_.mu.AssertHeld();
  unsummed_.clear();
  unsummed_.reserve(context_.frames());
}

void Swapper::ReadDemanded() {
  monitor_.mu.AssertHeld();
  while (queue_.demanded() > 0) {
    const uint32_t record = queue_.first_demanded();
    if (!cache_.IsInMemory(record) &&
        !StartRead(record, /*is_demanded=*/true)) {
      return;
    }
    queue_.PopDemanded();
  }
}

void Swapper::ReadAhead() {
  monitor_.mu.AssertHeld();
  if (queue_.demanded() > 0) return;
  while (true) {
    const uint32_t record = queue_.NextAhead();
    if (record == ReadQueue::kNone) return;
    if (!StartRead(record, /*is_demanded=*/false)) return;
  }
}

bool Swapper::StartRead(uint32_t record, bool is_demanded) {
  const uint32_t frame = cache_.TakeFrame(is_demanded);
  if (frame == RecordCache::kNoFrame) return false;
  cache_.Assign(frame, record);
  if (cache_.frame(frame).is_fresh) {
    cache_.SetLoaded(frame);
    monitor_.changed.SignalAll();
    return true;
  }
  SubmitRead(frame);
  return true;
}

void Swapper::SubmitRead(uint32_t index) {
  RecordCache::Frame& frame = cache_.frame(index);
  ++frame.attempts;
  const RecordFiles::Place place =
      context_.files->PlaceOf(frame.record, frame.slot);
  const uint64_t bytes = reads_parameters()
                             ? context_.record_layout.bytes(frame.record)
                             : context_.record_layout.state_bytes(frame.record);
  frame.request = {};
  frame.request.kind = io::IoRequest::Kind::kRead;
  frame.request.priority = io::IoPriority::kSwapIn;
  frame.request.file = place.file;
  frame.request.offset_bytes = place.offset_bytes;
  frame.request.buffer = {context_.FrameAt(index), bytes};
  monitor_.Submit(&frame.request);
}

// `is_demanded`: the frame is needed for a record that a thread waits for.
bool Swapper::MayBeWritten(uint32_t record, bool is_demanded) const {
  if (!cache_.IsWritable(record)) return false;
  const uint32_t slot = committer_.SlotToWrite(record);
  if (verifier_.IsReading(record, slot) ||
      parameters_.IsReading(record, slot) || mover_.IsCopying(record, slot)) {
    return false;
  }
  if (committer_.is_committing()) {
    return committer_.is_flushing() && cache_.record(record).must_flush;
  }
  return is_demanded || !cache_.record(record).is_pending;
}

void Swapper::WriteBehind() {
  monitor_.mu.AssertHeld();
  if (committer_.is_committing()) return;
  const size_t wanted = queue_.CountWanted(kWritesMax);
  StartWrites(RecordCache::List::kDirty, /*is_demanded=*/false, wanted);
  if (queue_.demanded() == 0 || cache_.writing() > 0) return;
  StartWrites(RecordCache::List::kDirtyPending, /*is_demanded=*/true, wanted);
}

// Skips records whose slots are being read. A frame leaves the list as its
// write begins.
void Swapper::StartWrites(RecordCache::List list, bool is_demanded,
                          size_t writing_max, uint32_t from_frame) {
  const FrameList& frames = cache_.frames(list);
  uint32_t next = frames.first();
  while (next != FrameList::kEnd && cache_.writing() < writing_max) {
    const uint32_t frame = next;
    next = frames.Next(frame);
    if (frame < from_frame) continue;
    const uint32_t record = cache_.frame(frame).record;
    if (MayBeWritten(record, is_demanded)) StartWrite(record);
  }
}

void Swapper::StartWrite(uint32_t record) {
  const uint32_t frame = cache_.place(record).frame;
  cache_.BeginWrite(frame, committer_.SlotToWrite(record));
  if (cache_.frame(frame).has_sums) {
    SubmitWrite(frame);
  } else {
    unsummed_.push_back(frame);
  }
}

void Swapper::SumOneAndWrite() {
  monitor_.mu.AssertHeld();
  const uint32_t frame = unsummed_.back();
  unsummed_.pop_back();
  if (monitor_.stop || !monitor_.failed.ok()) {
    cache_.EndWrite(frame);
    return;
  }
  checks_.Sum(frame);
  SubmitWrite(frame);
}

void Swapper::SubmitWrite(uint32_t index) {
  checks_.PutSums(index);
  RecordCache::Frame& frame = cache_.frame(index);
  const RecordFiles::Place to =
      context_.files->PlaceOf(frame.record, frame.slot);
  frame.request = {};
  frame.request.kind = io::IoRequest::Kind::kWrite;
  frame.request.priority = io::IoPriority::kSwapOut;
  frame.request.file = to.file;
  frame.request.offset_bytes = to.offset_bytes;
  frame.request.buffer = {context_.FrameAt(index),
                          context_.WrittenBytes(frame.record)};
  monitor_.Submit(&frame.request);
  frame.writes_left = mover_.Mirror(index) ? 2 : 1;
}

void Swapper::Complete(uint32_t frame) {
  monitor_.mu.AssertHeld();
  if (cache_.frame(frame).is_writing) {
    CompleteWrite(frame);
  } else {
    CompleteRead(frame);
  }
}

void Swapper::CompleteMirror(uint32_t frame) {
  monitor_.mu.AssertHeld();
  CompleteWrite(frame);
}

void Swapper::CompleteRead(uint32_t index) {
  const RecordCache::Frame& frame = cache_.frame(index);
  if (frame.request.status.ok()) {
    monitor_.counters.OnRead(frame.request.buffer.size());
    cache_.SetLoaded(index);
    return;
  }
  if (frame.attempts < kNvmeReadAttemptsMax) return SubmitRead(index);
  cache_.record(frame.record).error =
      absl::Status(frame.request.status.code(),
                   absl::StrCat(frame.request.status.message(), " (tried ",
                                kNvmeReadAttemptsMax, " times)"));
  cache_.DropLoaded(index);
}

// The write to the slot that the table names counts here. An error of
// the other one is the move's.
void Swapper::CompleteWrite(uint32_t index) {
  RecordCache::Frame& frame = cache_.frame(index);
  if (--frame.writes_left > 0) return;
  cache_.EndWrite(index);
  if (!frame.request.status.ok()) return monitor_.Fail(frame.request.status);
  monitor_.counters.OnWrite(frame.request.buffer.size());
  cache_.SetWritten(index);
  committer_.OnWritten(frame.record);
}

}  // namespace optstate::nvme
