// Makes a step durable: flush, sync, name, sync.

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/tiers/nvme/nvme_store.h"

namespace optstate {

absl::Status NvmeStore::RequestCommit(uint64_t step, std::string job) {
  if (!options_.is_durable) {
    return absl::FailedPreconditionError(
        "the job is not durable: it was made with durability \"none\"");
  }
  OPTSTATE_RETURN_IF_ERROR(AwaitCommit());
  const absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(failed_);
  commit_.step = step;
  commit_.job = std::move(job);
  flushes_left_ = 0;
  for (uint32_t i = 0; i < records_.size(); ++i) {
    const RecordPlace place = table_.place(i);
    records_[i].must_flush =
        place.frame != RecordPlace::kNoFrame && place.is_dirty;
    if (records_[i].must_flush) ++flushes_left_;
  }
  phase_ = CommitPhase::kFlushing;
  Wake();
  return absl::OkStatus();
}

absl::Status NvmeStore::AwaitCommit() {
  const absl::MutexLock lock(&mu_);
  while (phase_ != CommitPhase::kNone && failed_.ok()) changed_.Wait(&mu_);
  return failed_;
}

void NvmeStore::AdvanceCommit() {
  if (phase_ != CommitPhase::kFlushing) return;
  if (flushes_left_ == 0 && writing_ == 0) return BeginSync();
  for (uint32_t i = unpinned_.first(); i != FrameList::kEnd;
       i = unpinned_.Next(i)) {
    const uint32_t record = frames_[i].record;
    if (MayBeWritten(record, /*is_demanded=*/false)) StartWrite(record);
  }
}

void NvmeStore::BeginSync() {
  phase_ = CommitPhase::kSyncing;
  table_.SetSyncing(true);
  syncs_left_ = syncs_.size();
  for (size_t i = 0; i < syncs_.size(); ++i) {
    syncs_[i] = {};
    syncs_[i].kind = io::IoRequest::Kind::kSync;
    syncs_[i].priority = io::IoPriority::kSwapOut;
    syncs_[i].file = files_[0].files()[i];
    engine_->Submit(&syncs_[i]);
  }
}

// Names the slots that the sync made durable. A record that has been read, or
// changed in its frame, since it was flushed still has its slot.
void NvmeStore::WriteCommit() {
  phase_ = CommitPhase::kWriting;
  ++commit_.generation;
  commit_.incarnation = options_.incarnation;
  commit_.slots = slots_;
  commit_.paths = static_cast<uint32_t>(options_.directories.size());
  commit_.places.resize(records_.size());
  commit_.checksums.resize(record_layout_.checksum_count());
  for (uint32_t i = 0; i < records_.size(); ++i) {
    const RecordPlace place = table_.place(i);
    commit_.places[i] =
        static_cast<uint8_t>(place.slot | (place.is_on_disk ? 2 : 0));
    record_layout_.CopyChecksums(i, table_.checksums(place.slot),
                                 absl::MakeSpan(commit_.checksums));
  }
  const absl::StatusOr<io::IoRequest*> request = log_->Prepare(commit_);
  if (!request.ok()) return Fail(request.status());
  engine_->Submit(*request);
}

void NvmeStore::CompleteCommitRequest(const io::IoRequest& request) {
  if (!request.status.ok()) {
    return Fail(absl::Status(
        request.status.code(),
        absl::StrCat(request.status.message(), ". Step ", commit_.step,
                     " is not durable; step ", durable_step_, " is")));
  }
  switch (phase_) {
    case CommitPhase::kSyncing:
      if (--syncs_left_ > 0) break;
      table_.SetSyncing(false);
      WriteCommit();
      break;
    case CommitPhase::kWriting:
      phase_ = CommitPhase::kSyncingLog;
      sync_of_log_ = {};
      sync_of_log_.kind = io::IoRequest::Kind::kSync;
      sync_of_log_.priority = io::IoPriority::kSwapOut;
      sync_of_log_.file = log_->file();
      engine_->Submit(&sync_of_log_);
      break;
    case CommitPhase::kSyncingLog:
      EndCommit();
      break;
    case CommitPhase::kNone:
    case CommitPhase::kFlushing:
      break;  // the store has failed meanwhile
  }
}

void NvmeStore::EndCommit() {
  for (size_t i = 0; i < records_.size(); ++i) {
    durable_slots_[i] = (commit_.places[i] & 2) != 0
                            ? static_cast<uint8_t>(commit_.places[i] & 1)
                            : kNoSlot;
  }
  durable_step_ = commit_.step;
  ++counters_.commits;
  phase_ = CommitPhase::kNone;
}

}  // namespace optstate
