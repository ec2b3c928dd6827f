#include "storage/tiers/nvme/verifier.h"

#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/layout.h"
#include "storage/tiers/nvme/nvme_options.h"
#include "storage/tiers/nvme/record_files.h"

namespace optstate::nvme {

absl::StatusOr<storage::VerifyResult> Verifier::Verify(
    absl::FunctionRef<bool(const storage::VerifyResult&)> progress) {
  const uint64_t bytes = context_.record_layout.frame_bytes();
  const std::unique_ptr<std::byte, decltype(&std::free)> buffer(
      static_cast<std::byte*>(std::aligned_alloc(io::kSectorBytes, bytes)),
      &std::free);
  if (buffer == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a record of ", bytes, " bytes"));
  }
  Verification verification;
  verification.buffer = {buffer.get(), bytes};
  verification.sums.resize(context_.record_layout.record_checksums_max());
  {
    const absl::MutexLock lock(&monitor_.mu);
    if (verification_ != nullptr) {
      return absl::FailedPreconditionError(
          "the job's records are being verified already");
    }
    verification_ = &verification;
  }
  storage::VerifyResult result;
  result.progress.records_total = context_.sub_groups.size();
  absl::Status status;
  for (uint32_t i = 0; i < context_.sub_groups.size() && status.ok(); ++i) {
    status = VerifyRecord(i, &verification, &result);
    if (status.ok() && !progress(result)) {
      status = absl::CancelledError(
          absl::StrCat("cancelled after ", i + 1, " of ",
                       context_.sub_groups.size(), " records"));
    }
  }
  const absl::MutexLock lock(&monitor_.mu);
  verification_ = nullptr;
  if (!status.ok()) return status;
  return result;
}

absl::Status Verifier::VerifyRecord(uint32_t record, Verification* verification,
                                    storage::VerifyResult* result) {
  using Phase = Verification::Phase;
  {
    const absl::MutexLock lock(&monitor_.mu);
    verification->record = record;
    verification->attempts = 0;
    verification->phase = Phase::kWanted;
    monitor_.Wake();
    while (verification->phase == Phase::kReading ||
           (verification->phase == Phase::kWanted && monitor_.failed.ok())) {
      monitor_.changed.Wait(&monitor_.mu);
    }
    if (verification->phase == Phase::kWanted) {
      verification->phase = Phase::kIdle;
      return monitor_.failed;
    }
  }
  ++result->progress.records;
  const bool is_skipped = verification->phase == Phase::kSkipped;
  const bool is_read = !is_skipped && verification->request.status.ok();
  int64_t different = -1;
  if (is_skipped) ++result->progress.skipped;
  if (is_read) {
    result->progress.bytes_read += verification->request.buffer.size();
    different = context_.record_layout.FirstDifferenceOf(
        record, verification->buffer.data(), context_.writes_parameters(),
        verification->sums);
  }
  const bool is_damaged = !is_skipped && (!is_read || different >= 0);
  if (is_damaged) NoteDamage(*verification, different, result);
  const absl::MutexLock lock(&monitor_.mu);
  if (is_damaged) cache_.SetDamaged(record, verification->slot);
  verification->phase = Phase::kIdle;
  if (is_suspended_) monitor_.changed.SignalAll();
  return absl::OkStatus();
}

bool Verifier::IsAtRecord() const {
  using Phase = Verification::Phase;
  return verification_ != nullptr && verification_->phase != Phase::kIdle &&
         verification_->phase != Phase::kWanted;
}

void Verifier::Suspend() {
  const absl::MutexLock lock(&monitor_.mu);
  is_suspended_ = true;
  while (IsAtRecord()) monitor_.changed.Wait(&monitor_.mu);
}

void Verifier::Resume() {
  const absl::MutexLock lock(&monitor_.mu);
  is_suspended_ = false;
  monitor_.Wake();
}

void Verifier::NoteDamage(const Verification& verification, int64_t tile,
                          storage::VerifyResult* result) const {
  ++result->progress.damaged;
  if (result->damages.size() == storage::kVerifyDamagesMax) return;
  const uint32_t record = verification.record;
  const SubGroup& range = context_.sub_groups[record];
  storage::RecordDamage damage;
  damage.file = context_.FileOf(record);
  damage.offset_bytes = verification.request.offset_bytes;
  damage.bytes = verification.request.buffer.size();
  damage.tile = tile;
  damage.is_parameters =
      tile >= 0 && static_cast<uint64_t>(tile) * kTileElements >=
                       static_cast<uint64_t>(range.elements());
  damage.first_parameter =
      context_.layout.parameters()[range.first_parameter].name;
  damage.last_parameter =
      context_.layout.parameters()[range.end_parameter - 1].name;
  damage.status =
      tile >= 0
          ? context_.DamagedError(record, verification.slot, tile)
          : absl::Status(
                verification.request.status.code(),
                absl::StrCat(verification.request.status.message(), " (tried ",
                             kNvmeReadAttemptsMax, " times)"));
  result->damages.push_back(std::move(damage));
}

void Verifier::Start() {
  monitor_.mu.AssertHeld();
  if (is_suspended_ || verification_ == nullptr ||
      verification_->phase != Verification::Phase::kWanted) {
    return;
  }
  const uint32_t record = verification_->record;
  const RecordPlace place = cache_.place(record);
  const bool has_frame = place.frame != RecordPlace::kNoFrame;
  if (context_.options.is_durable) {
    verification_->slot = committer_.durable_slot(record);
  } else {
    verification_->slot =
        place.is_on_disk && !place.is_dirty ? place.slot : Committer::kNoSlot;
    if (has_frame && cache_.frame(place.frame).is_writing) return;
  }
  if (verification_->slot == Committer::kNoSlot) {
    verification_->phase = Verification::Phase::kSkipped;
    monitor_.changed.SignalAll();
    return;
  }
  context_.record_layout.TakeSums(record,
                                  context_.table.checksums(verification_->slot),
                                  absl::MakeSpan(verification_->sums));
  verification_->phase = Verification::Phase::kReading;
  Submit();
}

void Verifier::Submit() {
  const uint32_t record = verification_->record;
  const RecordFiles::Place at =
      context_.files->PlaceOf(record, verification_->slot);
  ++verification_->attempts;
  io::IoRequest& request = verification_->request;
  request = {};
  request.kind = io::IoRequest::Kind::kRead;
  request.priority = io::IoPriority::kBackground;
  request.file = at.file;
  request.offset_bytes = at.offset_bytes;
  request.buffer = verification_->buffer.first(context_.WrittenBytes(record));
  monitor_.Submit(&request);
}

bool Verifier::Owns(const io::IoRequest* request) const {
  monitor_.mu.AssertHeld();
  return verification_ != nullptr && request == &verification_->request;
}

void Verifier::Complete() {
  monitor_.mu.AssertHeld();
  if (!verification_->request.status.ok() &&
      verification_->attempts < kNvmeReadAttemptsMax) {
    return Submit();
  }
  verification_->phase = Verification::Phase::kDone;
}

bool Verifier::IsReading(uint32_t record, uint32_t slot) const {
  monitor_.mu.AssertHeld();
  return verification_ != nullptr &&
         verification_->phase == Verification::Phase::kReading &&
         verification_->record == record && verification_->slot == slot;
}

}  // namespace optstate::nvme
