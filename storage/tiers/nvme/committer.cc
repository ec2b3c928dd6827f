#include "storage/tiers/nvme/committer.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "proto/types/status_macros.h"

namespace optstate::nvme {

Committer::Committer(StoreContext* context, StoreMonitor* monitor,
                     RecordCache* cache, ReadQueue* queue)
    : context_(*context),
      monitor_(*monitor),
      cache_(*cache),
      queue_(*queue),
      durable_slots_(context->records(), kNoSlot),
      syncs_(context->options.directories.size()) {
  commit_.places.reserve(context->records());
  commit_.checksums.reserve(context->record_layout.checksum_count());
  // They take turns, so that a commit allocates nothing.
  commit_.job.reserve(context->options.job_bytes);
  durable_job_.reserve(context->options.job_bytes);
}

void Committer::Adopt() {
  monitor_.mu.AssertHeld();
  syncs_.resize(context_.options.directories.size());
  if (context_.log == nullptr) return;
  const storage::DurableCommit& last = context_.log->last();
  commit_.generation = last.generation;
  if (last.incarnation != context_.options.incarnation ||
      last.places.size() != durable_slots_.size()) {
    return;  // no commit of this job yet
  }
  is_durable_ = true;
  durable_step_ = last.step;
  durable_job_ = last.job;
  for (size_t i = 0; i < durable_slots_.size(); ++i) {
    if ((last.places[i] & 2) != 0) durable_slots_[i] = last.places[i] & 1;
  }
}

absl::Status Committer::Request(uint64_t step, absl::string_view job) {
  if (!context_.options.is_durable) {
    return absl::FailedPreconditionError(
        "the job is not durable: it was made with durability \"none\"");
  }
  OPTSTATE_RETURN_IF_ERROR(Await());
  const absl::MutexLock lock(&monitor_.mu);
  OPTSTATE_RETURN_IF_ERROR(monitor_.failed);
  queue_.OnCommitRequested();
  commit_.step = step;
  commit_.job.assign(job.data(), job.size());
  flushes_left_ = 0;
  for (uint32_t i = 0; i < cache_.records(); ++i) {
    const RecordPlace place = cache_.place(i);
    cache_.SetMustFlush(i,
                        place.frame != RecordPlace::kNoFrame && place.is_dirty);
    if (cache_.record(i).must_flush) ++flushes_left_;
  }
  phase_ = Phase::kFlushing;
  monitor_.Wake();
  return absl::OkStatus();
}

absl::Status Committer::Await() {
  const absl::MutexLock lock(&monitor_.mu);
  while (phase_ != Phase::kNone && monitor_.failed.ok()) {
    monitor_.changed.Wait(&monitor_.mu);
  }
  return monitor_.failed;
}

uint64_t Committer::durable_step() const {
  const absl::MutexLock lock(&monitor_.mu);
  return durable_step_;
}

std::string Committer::durable_job() const {
  const absl::MutexLock lock(&monitor_.mu);
  return durable_job_;
}

storage::DurableCommit Committer::last() const {
  const absl::MutexLock lock(&monitor_.mu);
  storage::DurableCommit commit;
  if (!is_durable_) return commit;
  commit.generation = commit_.generation;
  commit.step = durable_step_;
  commit.incarnation = context_.options.incarnation;
  commit.slots = context_.slots;
  commit.paths = static_cast<uint32_t>(context_.options.directories.size());
  commit.weights = context_.weights;
  for (const uint8_t slot : durable_slots_) {
    commit.places.push_back(slot == kNoSlot ? 0
                                            : static_cast<uint8_t>(slot | 2));
  }
  commit.job = durable_job_;
  return commit;
}

void Committer::Advance() {
  monitor_.mu.AssertHeld();
  if (phase_ != Phase::kFlushing) return;
  if (flushes_left_ == 0 && cache_.writing() == 0) BeginSync();
}

bool Committer::is_committing() const {
  monitor_.mu.AssertHeld();
  return phase_ != Phase::kNone;
}

bool Committer::is_flushing() const {
  monitor_.mu.AssertHeld();
  return phase_ == Phase::kFlushing;
}

uint64_t Committer::records_to_flush() const {
  monitor_.mu.AssertHeld();
  return phase_ == Phase::kFlushing ? flushes_left_ : 0;
}

uint8_t Committer::durable_slot(uint32_t record) const {
  monitor_.mu.AssertHeld();
  return durable_slots_[record];
}

uint32_t Committer::SlotToWrite(uint32_t record) const {
  monitor_.mu.AssertHeld();
  return durable_slots_[record] == 0 ? 1 : 0;
}

void Committer::OnWritten(uint32_t record) {
  monitor_.mu.AssertHeld();
  if (!cache_.record(record).must_flush) return;
  cache_.SetMustFlush(record, false);
  --flushes_left_;
}

void Committer::BeginSync() {
  phase_ = Phase::kSyncing;
  context_.table.SetSyncing(true);
  syncs_left_ = syncs_.size();
  for (size_t i = 0; i < syncs_.size(); ++i) {
    syncs_[i] = {};
    syncs_[i].kind = io::IoRequest::Kind::kSync;
    syncs_[i].priority = io::IoPriority::kSwapOut;
    syncs_[i].file = context_.files->files()[i];
    monitor_.Submit(&syncs_[i]);
  }
}

// Names the slots that the sync made durable. A record that has been read, or
// changed in its frame, since it was flushed still has its slot.
void Committer::NameSlots() {
  commit_.incarnation = context_.options.incarnation;
  commit_.slots = context_.slots;
  commit_.paths = static_cast<uint32_t>(context_.options.directories.size());
  commit_.weights = context_.weights;
  commit_.places.resize(cache_.records());
  commit_.checksums.resize(context_.record_layout.checksum_count());
  for (uint32_t i = 0; i < cache_.records(); ++i) {
    const RecordPlace place = cache_.place(i);
    commit_.places[i] =
        static_cast<uint8_t>(place.slot | (place.is_on_disk ? 2 : 0));
    context_.record_layout.CopyChecksums(i,
                                         context_.table.checksums(place.slot),
                                         absl::MakeSpan(commit_.checksums));
  }
}

void Committer::WriteCommit() {
  phase_ = Phase::kWriting;
  ++commit_.generation;
  const absl::StatusOr<io::IoRequest*> request = context_.log->Prepare(commit_);
  if (!request.ok()) return monitor_.Fail(request.status());
  monitor_.Submit(*request);
}

void Committer::SyncLog() {
  phase_ = Phase::kSyncingLog;
  sync_of_log_ = {};
  sync_of_log_.kind = io::IoRequest::Kind::kSync;
  sync_of_log_.priority = io::IoPriority::kSwapOut;
  sync_of_log_.file = context_.log->file();
  monitor_.Submit(&sync_of_log_);
}

void Committer::Complete(const io::IoRequest& request) {
  monitor_.mu.AssertHeld();
  if (!request.status.ok()) {
    return monitor_.Fail(absl::Status(
        request.status.code(),
        absl::StrCat(request.status.message(), ". Step ", commit_.step,
                     " is not durable; step ", durable_step_, " is")));
  }
  if (!monitor_.failed.ok()) return;
  switch (phase_) {
    case Phase::kSyncing:
      if (--syncs_left_ > 0) break;
      context_.table.SetSyncing(false);
      NameSlots();
      copies_left_ = kCommitCopies;
      WriteCommit();
      break;
    case Phase::kWriting:
      SyncLog();
      break;
    case Phase::kSyncingLog:
      if (--copies_left_ > 0) {
        WriteCommit();
      } else {
        EndCommit();
      }
      break;
    case Phase::kNone:
    case Phase::kFlushing:
      break;  // these have no requests
  }
}

void Committer::EndCommit() {
  for (size_t i = 0; i < durable_slots_.size(); ++i) {
    durable_slots_[i] = (commit_.places[i] & 2) != 0
                            ? static_cast<uint8_t>(commit_.places[i] & 1)
                            : kNoSlot;
  }
  is_durable_ = true;
  durable_step_ = commit_.step;
  durable_job_.swap(commit_.job);
  monitor_.counters.OnCommit();
  phase_ = Phase::kNone;
}

}  // namespace optstate::nvme
