#include "storage/tiers/nvme/record_mover.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "storage/tiers/nvme/nvme_options.h"
#include "storage/tiers/nvme/record_files.h"

namespace optstate::nvme {
namespace {

// Slots that are copied side by side while nobody else uses the disks: enough
// to keep some of them busy, in a bounded memory.
constexpr uint64_t kCopiesMax = 8;
constexpr uint64_t kCopyBytesMax = uint64_t{32} << 20;

}  // namespace

absl::StatusOr<std::vector<RecordMover::SlotCopy>> RecordMover::MakeCopies()
    const {
  const uint64_t bytes = context_.record_layout.frame_bytes();
  std::vector<SlotCopy> copies(
      std::clamp(kCopyBytesMax / bytes, uint64_t{1}, kCopiesMax));
  for (SlotCopy& copy : copies) {
    copy.sums.resize(context_.record_layout.record_checksums_max());
    copy.buffer.reset(
        static_cast<std::byte*>(std::aligned_alloc(io::kSectorBytes, bytes)));
    if (copy.buffer == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for records of ", bytes, " bytes"));
    }
  }
  return copies;
}

absl::Status RecordMover::Begin(const storage::RewriteTarget* target) {
  OPTSTATE_ASSIGN_OR_RETURN(std::vector<SlotCopy> copies, MakeCopies());
  auto next = std::make_unique<NextArrangement>(&context_, target,
                                                /*keeps_frames=*/true);
  {
    const absl::MutexLock lock(&monitor_.mu);
    if (state_.has_value()) {
      return absl::FailedPreconditionError(
          "the job's records are being moved already");
    }
    state_ = storage::RewriteState();
    state_->is_move = true;
    began_at_ = std::chrono::steady_clock::now();
  }
  const absl::Status made = next->Create();
  const absl::MutexLock lock(&monitor_.mu);
  if (!made.ok()) {
    state_.reset();
    return made;
  }
  next_ = std::move(next);
  status_ = absl::OkStatus();
  phase_ = Phase::kCopying;
  bytes_ = 0;
  has_copy_.assign(context_.records(),
                   std::array<bool, FrameTable::kSlotsMax>{});
  copies_ = std::move(copies);
  cursor_ = 0;
  mirrors_ = std::vector<io::IoRequest>(context_.frames());
  syncs_ = std::vector<io::IoRequest>(next_->files().files().size());
  for (uint32_t record = 0; record < context_.records(); ++record) {
    for (uint32_t slot = 0; slot < context_.slots; ++slot) {
      if (!Counts(record, slot)) continue;
      state_->bytes_total += context_.WrittenBytes(record);
    }
  }
  return absl::OkStatus();
}

// A commit that was under way at the beginning may name a slot that was written
// before that, and whose frame is newer now. Such a slot counts until the
// commit is over, so that nothing comes to count after all else is copied:
// what becomes that of memory or of a commit later was written twice.
bool RecordMover::Counts(uint32_t record, uint32_t slot) const {
  const RecordPlace place = cache_.place(record);
  if (SlotCounts(place, committer_.durable_slot(record), slot)) return true;
  return committer_.is_committing() && place.is_on_disk && place.slot == slot;
}

bool RecordMover::IsAllCopied() const {
  for (uint32_t record = 0; record < context_.records(); ++record) {
    for (uint32_t slot = 0; slot < context_.slots; ++slot) {
      if (LacksCopy(record, slot)) return false;
    }
  }
  return true;
}

void RecordMover::NoteCopy(uint32_t record, uint32_t slot) {
  if (has_copy_[record][slot]) return;
  has_copy_[record][slot] = true;
  state_->bytes = std::min(state_->bytes + context_.WrittenBytes(record),
                           state_->bytes_total);
}

void RecordMover::Fail(const absl::Status& why) {
  status_.Update(why);
  monitor_.changed.SignalAll();
}

absl::Status RecordMover::Copy() {
  const absl::MutexLock lock(&monitor_.mu);
  monitor_.Wake();
  while (true) {
    OPTSTATE_RETURN_IF_ERROR(monitor_.failed);
    if (next_ == nullptr) {
      return absl::FailedPreconditionError(
          "the job's records are not being moved");
    }
    OPTSTATE_RETURN_IF_ERROR(status_);
    if (SlotCopy* const copy = FindLoaded(); copy != nullptr) {
      Check(copy);
      continue;
    }
    if (phase_ == Phase::kSynced && !committer_.is_committing()) {
      if (IsAllCopied()) return absl::OkStatus();
      phase_ = Phase::kCopying;
      monitor_.Wake();
    }
    monitor_.changed.Wait(&monitor_.mu);
  }
}

RecordMover::SlotCopy* RecordMover::FindLoaded() {
  for (SlotCopy& copy : copies_) {
    if (copy.phase == SlotCopy::Phase::kLoaded) return &copy;
  }
  return nullptr;
}

void RecordMover::Check(SlotCopy* copy) {
  copy->phase = SlotCopy::Phase::kChecking;
  monitor_.mu.Unlock();
  const int64_t different = context_.record_layout.FirstDifferenceOf(
      copy->record, copy->buffer.get(), context_.writes_parameters(),
      copy->sums);
  monitor_.mu.Lock();
  monitor_.Wake();
  copy->phase = SlotCopy::Phase::kIdle;
  if (std::exchange(copy->is_stale, false)) return;
  if (different >= 0) {
    cache_.SetDamaged(copy->record, copy->slot);
    return Fail(context_.DamagedError(copy->record, copy->slot, different));
  }
  context_.record_layout.PutSums(copy->record, copy->sums,
                                 context_.writes_parameters(),
                                 next_->table().checksums(copy->slot));
  copy->phase = SlotCopy::Phase::kChecked;
}

absl::Status RecordMover::Seal() {
  NextArrangement* next = nullptr;
  {
    const absl::MutexLock lock(&monitor_.mu);
    if (next_ == nullptr) {
      return absl::FailedPreconditionError(
          "the job's records are not being moved");
    }
    OPTSTATE_RETURN_IF_ERROR(status_);
    if (!IsAllCopied()) {
      return absl::FailedPreconditionError(
          "the job's records have not all been copied");
    }
    next = next_.get();
  }
  return next->Seal(committer_.last());
}

void RecordMover::End(bool is_adopted) {
  std::unique_ptr<NextArrangement> next;
  {
    const absl::MutexLock lock(&monitor_.mu);
    next = std::move(next_);
    state_.reset();
    has_copy_.clear();
    copies_.clear();
    mirrors_.clear();
    syncs_.clear();
  }
  if (next == nullptr) return;
  next->Close();
  if (is_adopted) return;
  NextArrangement::Remove(&context_.engine, next->target().arrangement);
}

void RecordMover::Cancel(const absl::Status& why) {
  const absl::MutexLock lock(&monitor_.mu);
  if (next_ != nullptr) Fail(why);
}

void RecordMover::Reset() {
  const absl::MutexLock lock(&monitor_.mu);
  if (next_ == nullptr) return;
  mirrors_ = std::vector<io::IoRequest>(context_.frames());
}

std::optional<storage::RewriteState> RecordMover::state() const {
  const absl::MutexLock lock(&monitor_.mu);
  std::optional<storage::RewriteState> state = state_;
  if (state.has_value()) {
    state->elapsed =
        absl::FromChrono(std::chrono::steady_clock::now() - began_at_);
  }
  return state;
}

const storage::RewriteTarget* RecordMover::target() const {
  const absl::MutexLock lock(&monitor_.mu);
  return next_ == nullptr ? nullptr : &next_->target();
}

uint64_t RecordMover::bytes() const {
  const absl::MutexLock lock(&monitor_.mu);
  return bytes_;
}

void RecordMover::Start() {
  monitor_.mu.AssertHeld();
  if (next_ == nullptr || !status_.ok()) return;
  for (SlotCopy& copy : copies_) {
    if (copy.phase != SlotCopy::Phase::kChecked) continue;
    if (IsBeingWritten(copy.record, copy.slot)) {
      copy.phase = SlotCopy::Phase::kIdle;
    } else {
      SubmitWrite(&copy);
    }
  }
  if (phase_ != Phase::kCopying) return;
  if (StartReads() == 0 && IsAllCopied()) BeginSync();
}

size_t RecordMover::StartReads() {
  size_t under_way = 0, busy = 0;
  for (const SlotCopy& copy : copies_) {
    if (copy.phase != SlotCopy::Phase::kIdle) ++busy;
    if (copy.phase == SlotCopy::Phase::kReading ||
        copy.phase == SlotCopy::Phase::kWriting) {
      ++under_way;
    }
  }
  const bool is_alone = context_.engine.in_flight() == under_way;
  const size_t busy_max = is_alone ? copies_.size() : 1;
  for (SlotCopy& copy : copies_) {
    if (busy >= busy_max) break;
    if (copy.phase != SlotCopy::Phase::kIdle) continue;
    if (!Choose(&copy)) break;
    SubmitRead(&copy);
    ++busy;
  }
  return busy;
}

bool RecordMover::IsBeingWritten(uint32_t record, uint32_t slot) const {
  const uint32_t index = cache_.place(record).frame;
  if (index == RecordCache::kNoFrame) return false;
  const RecordCache::Frame& frame = cache_.frame(index);
  return frame.is_writing && frame.slot == slot;
}

bool RecordMover::IsBusy(uint32_t record, uint32_t slot) const {
  if (IsBeingWritten(record, slot)) return true;
  return std::any_of(copies_.begin(), copies_.end(), [&](const SlotCopy& copy) {
    return copy.phase != SlotCopy::Phase::kIdle && copy.record == record &&
           copy.slot == slot;
  });
}

bool RecordMover::Choose(SlotCopy* copy) {
  for (uint32_t looked_at = 0; looked_at < context_.records(); ++looked_at) {
    for (uint32_t slot = 0; slot < context_.slots; ++slot) {
      if (!LacksCopy(cursor_, slot) || IsBusy(cursor_, slot)) continue;
      copy->record = cursor_;
      copy->slot = slot;
      copy->attempts = 0;
      context_.record_layout.TakeSums(cursor_, context_.table.checksums(slot),
                                      absl::MakeSpan(copy->sums));
      return true;
    }
    cursor_ = (cursor_ + 1) % context_.records();
  }
  return false;
}

// These are the mover's own, and not counted with what steps do.
void RecordMover::SubmitRead(SlotCopy* copy) {
  const RecordFiles::Place at =
      context_.files->PlaceOf(copy->record, copy->slot);
  copy->phase = SlotCopy::Phase::kReading;
  ++copy->attempts;
  copy->request = {};
  copy->request.kind = io::IoRequest::Kind::kRead;
  copy->request.priority = io::IoPriority::kBackground;
  copy->request.file = at.file;
  copy->request.offset_bytes = at.offset_bytes;
  copy->request.buffer = {copy->buffer.get(),
                          context_.WrittenBytes(copy->record)};
  context_.engine.Submit(&copy->request);
}

void RecordMover::SubmitWrite(SlotCopy* copy) {
  const RecordFiles::Place to =
      next_->files().PlaceOf(copy->record, copy->slot);
  copy->phase = SlotCopy::Phase::kWriting;
  copy->request = {};
  copy->request.kind = io::IoRequest::Kind::kWrite;
  copy->request.priority = io::IoPriority::kBackground;
  copy->request.file = to.file;
  copy->request.offset_bytes = to.offset_bytes;
  copy->request.buffer = {copy->buffer.get(),
                          context_.WrittenBytes(copy->record)};
  context_.engine.Submit(&copy->request);
}

// Most is on the medium before the switch, which syncs once more.
void RecordMover::BeginSync() {
  phase_ = Phase::kSyncing;
  syncs_left_ = syncs_.size();
  for (size_t i = 0; i < syncs_.size(); ++i) {
    syncs_[i] = {};
    syncs_[i].kind = io::IoRequest::Kind::kSync;
    syncs_[i].priority = io::IoPriority::kBackground;
    syncs_[i].file = next_->files().files()[i];
    context_.engine.Submit(&syncs_[i]);
  }
}

bool RecordMover::Mirror(uint32_t index) {
  monitor_.mu.AssertHeld();
  if (next_ == nullptr || !status_.ok()) return false;
  const RecordCache::Frame& frame = cache_.frame(index);
  DropCopyOf(frame.record, frame.slot);
  context_.record_layout.CopyChecksums(frame.record,
                                       context_.table.checksums(frame.slot),
                                       next_->table().checksums(frame.slot));
  const RecordFiles::Place to =
      next_->files().PlaceOf(frame.record, frame.slot);
  io::IoRequest& request = mirrors_[index];
  request = {};
  request.kind = io::IoRequest::Kind::kWrite;
  request.priority = io::IoPriority::kSwapOut;
  request.file = to.file;
  request.offset_bytes = to.offset_bytes;
  request.buffer = {context_.FrameAt(index),
                    context_.WrittenBytes(frame.record)};
  context_.engine.Submit(&request);
  NoteCopy(frame.record, frame.slot);
  return true;
}

void RecordMover::DropCopyOf(uint32_t record, uint32_t slot) {
  for (SlotCopy& copy : copies_) {
    if (copy.record != record || copy.slot != slot) continue;
    if (copy.phase == SlotCopy::Phase::kChecking) {
      copy.is_stale = true;
    } else if (copy.phase == SlotCopy::Phase::kLoaded ||
               copy.phase == SlotCopy::Phase::kChecked) {
      copy.phase = SlotCopy::Phase::kIdle;
    }
  }
}

bool RecordMover::IsCopying(uint32_t record, uint32_t slot) const {
  monitor_.mu.AssertHeld();
  return std::any_of(copies_.begin(), copies_.end(), [&](const SlotCopy& copy) {
    return (copy.phase == SlotCopy::Phase::kReading ||
            copy.phase == SlotCopy::Phase::kWriting) &&
           copy.record == record && copy.slot == slot;
  });
}

uint32_t RecordMover::FrameOf(const io::IoRequest* request) const {
  if (mirrors_.empty() || request < &mirrors_.front() ||
      request > &mirrors_.back()) {
    return RecordCache::kNoFrame;
  }
  return static_cast<uint32_t>(request - mirrors_.data());
}

bool RecordMover::IsSync(const io::IoRequest* request) const {
  return !syncs_.empty() && request >= &syncs_.front() &&
         request <= &syncs_.back();
}

bool RecordMover::Owns(const io::IoRequest* request) const {
  monitor_.mu.AssertHeld();
  return FrameOf(request) != RecordCache::kNoFrame || IsSync(request) ||
         std::any_of(copies_.begin(), copies_.end(), [&](const SlotCopy& copy) {
           return request == &copy.request;
         });
}

uint32_t RecordMover::Complete(const io::IoRequest* request) {
  monitor_.mu.AssertHeld();
  const uint32_t frame = FrameOf(request);
  if (frame != RecordCache::kNoFrame) {
    if (request->status.ok()) {
      bytes_ += request->buffer.size();
    } else {
      Fail(request->status);
    }
  } else if (IsSync(request)) {
    CompleteSync(*request);
  } else {
    CompleteCopy(&*std::find_if(
        copies_.begin(), copies_.end(),
        [&](const SlotCopy& copy) { return request == &copy.request; }));
  }
  return frame;
}

void RecordMover::CompleteSync(const io::IoRequest& request) {
  if (!request.status.ok()) return Fail(request.status);
  if (--syncs_left_ == 0) phase_ = Phase::kSynced;
}

void RecordMover::CompleteCopy(SlotCopy* copy) {
  const absl::Status& status = copy->request.status;
  if (copy->phase == SlotCopy::Phase::kReading) {
    if (status.ok()) {
      copy->phase = SlotCopy::Phase::kLoaded;
    } else if (copy->attempts < kNvmeReadAttemptsMax && status_.ok()) {
      SubmitRead(copy);
    } else {
      copy->phase = SlotCopy::Phase::kIdle;
      cache_.SetDamaged(copy->record, copy->slot);
      Fail(absl::Status(
          status.code(),
          absl::StrCat(status.message(), " (tried ",
                       static_cast<int>(kNvmeReadAttemptsMax), " times)")));
    }
    return;
  }
  copy->phase = SlotCopy::Phase::kIdle;
  if (!status.ok()) return Fail(status);
  bytes_ += copy->request.buffer.size();
  NoteCopy(copy->record, copy->slot);
}

}  // namespace optstate::nvme
