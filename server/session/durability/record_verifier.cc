#include "server/session/durability/record_verifier.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/session/job_facts.h"
#include "spdlog/spdlog.h"

namespace optstate::session {
namespace {

v1::RecordDamage ToProto(const storage::RecordDamage& damage) {
  v1::RecordDamage proto;
  proto.set_file(damage.file);
  proto.set_offset_bytes(damage.offset_bytes);
  proto.set_bytes(damage.bytes);
  if (damage.tile < 0) {
    proto.set_kind(v1::DAMAGE_KIND_UNREADABLE);
  } else if (damage.is_parameters) {
    proto.set_kind(v1::DAMAGE_KIND_PARAMETERS);
  } else {
    proto.set_kind(v1::DAMAGE_KIND_STATE);
    proto.set_tile(static_cast<uint64_t>(damage.tile));
  }
  proto.set_first_parameter(damage.first_parameter);
  proto.set_last_parameter(damage.last_parameter);
  proto.set_reason(std::string(damage.status.message()));
  return proto;
}

// Says where the record is and what to do. The status of a read that failed
// knows of the file alone.
std::string LogText(absl::string_view job,
                    const storage::RecordDamage& damage) {
  std::string text(damage.status.message());
  if (damage.tile < 0) {
    absl::StrAppend(&text, ": the record at byte ", damage.offset_bytes, " of ",
                    damage.file, " (", damage.bytes, " bytes, of parameters \"",
                    damage.first_parameter, "\" to \"", damage.last_parameter,
                    "\") is lost unless memory has it; load the job anew from "
                    "a checkpoint");
  }
  return absl::StrCat(text, ". `optctl verify ", job,
                      "` looks whether it has been written anew since");
}

}  // namespace

bool Verification::Note(absl::string_view job,
                        const storage::VerifyResult& found) {
  const absl::MutexLock lock(&mu_);
  const uint64_t bytes = found.progress.bytes_read - progress_.bytes_read;
  progress_ = found.progress;
  while (damages_.size() < found.damages.size()) {
    damages_.push_back(found.damages[damages_.size()]);
    spdlog::error("verification: {}", LogText(job, damages_.back()));
  }
  Pace(bytes);
  return cancelled_.ok();
}

void Verification::Pace(uint64_t bytes) {
  if (bytes_per_s_ == 0) return;
  const absl::Duration least = absl::Seconds(static_cast<double>(bytes) /
                                             static_cast<double>(bytes_per_s_));
  const absl::Duration taken =
      absl::FromChrono(std::chrono::steady_clock::now() - paced_at_);
  const auto is_cancelled = [this] { return !cancelled_.ok(); };
  mu_.AwaitWithTimeout(absl::Condition(&is_cancelled), least - taken);
  paced_at_ = std::chrono::steady_clock::now();
}

void Verification::End(const absl::StatusOr<storage::VerifyResult>& result) {
  const absl::MutexLock lock(&mu_);
  if (result.ok()) {
    progress_ = result->progress;
  } else {
    status_ = cancelled_.ok() ? result.status() : cancelled_;
  }
  has_ended_ = true;
}

void Verification::Cancel(const absl::Status& why) {
  const absl::MutexLock lock(&mu_);
  cancelled_.Update(why);
}

v1::VerifyJobProgress Verification::Take() {
  v1::VerifyJobProgress taken;
  taken.set_records(progress_.records);
  taken.set_records_total(progress_.records_total);
  taken.set_skipped(progress_.skipped);
  taken.set_damaged(progress_.damaged);
  taken.set_bytes_read(progress_.bytes_read);
  while (reported_damages_ < damages_.size()) {
    *taken.add_damages() = ToProto(damages_[reported_damages_++]);
  }
  taken.set_done(has_ended_ && status_.ok());
  return taken;
}

absl::Status Verification::Await(Progress progress) {
  bool is_last = false;
  while (!is_last) {
    v1::VerifyJobProgress news;
    {
      const absl::MutexLock lock(&mu_);
      mu_.AwaitWithTimeout(absl::Condition(&has_ended_), kInterval);
      is_last = has_ended_;
      news = Take();
    }
    if (progress(news)) continue;
    Cancel(absl::CancelledError("the verification was cancelled"));
    break;
  }
  thread_.join();
  const absl::MutexLock lock(&mu_);
  return is_last ? status_ : cancelled_;
}

bool Verification::has_ended() const {
  const absl::MutexLock lock(&mu_);
  return has_ended_;
}

void Verification::AwaitEnd() const {
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&has_ended_));
}

RecordVerifier::OperatorTurn::OperatorTurn(RecordVerifier* verifier)
    : verifier_(*verifier) {
  {
    const absl::MutexLock lock(&verifier_.mu_);
    ++verifier_.operator_turns_;
  }
  verifier_.CancelScrub("an operator asked for one");
}

RecordVerifier::OperatorTurn::~OperatorTurn() {
  const absl::MutexLock lock(&verifier_.mu_);
  --verifier_.operator_turns_;
}

absl::StatusOr<std::shared_ptr<Verification>> RecordVerifier::Begin(
    storage::StateStore* store) {
  const absl::MutexLock lock(&mu_);
  return BeginFor(Asker::kOperator, /*bytes_per_s=*/0, store);
}

absl::StatusOr<std::shared_ptr<Verification>> RecordVerifier::BeginScrub(
    storage::StateStore* store, uint64_t bytes_per_s) {
  const absl::MutexLock lock(&mu_);
  if (operator_turns_ != 0) {
    return absl::FailedPreconditionError(
        "an operator has asked for a verification");
  }
  return BeginFor(Asker::kScrub, bytes_per_s, store);
}

absl::StatusOr<std::shared_ptr<Verification>> RecordVerifier::BeginFor(
    Asker asker, uint64_t bytes_per_s, storage::StateStore* store) {
  if (last_ != nullptr && !last_->has_ended()) {
    return absl::FailedPreconditionError(
        "the job's records are being verified already");
  }
  auto next = std::make_shared<Verification>(bytes_per_s);
  try {
    next->thread_ = std::thread(
        [this, asker, store, run = next.get()] { Run(asker, store, run); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no thread to verify records: ", error.what()));
  }
  last_ = next;
  last_asker_ = asker;
  return next;
}

// Notes the result first, because a caller that waits for the end may ask for
// it.
void RecordVerifier::Run(Asker asker, storage::StateStore* store,
                         Verification* run) {
  const absl::StatusOr<storage::VerifyResult> result =
      store->Verify([this, run](const storage::VerifyResult& found) {
        return run->Note(job_, found);
      });
  if (result.ok()) NoteWhole(asker, result->progress);
  run->End(result);
}

void RecordVerifier::NoteWhole(Asker asker,
                               const storage::VerifyProgress& found) {
  std::string folder;
  VerifyNote note;
  {
    const absl::MutexLock lock(&mu_);
    counted_from_ = clock_();
    note_.counted_from = wall_clock_();
    note_.is_verified = true;
    note_.damaged_records = found.damaged;
    if (asker == Asker::kScrub) ++scrubs_;
    folder = note_folder_;
    note = note_;
  }
  if (!folder.empty()) WriteNote(folder, note);
  if (asker != Asker::kScrub) return;
  spdlog::info("scrub: job={} records={} skipped={} damaged={} bytes={}", job_,
               found.records, found.skipped, found.damaged, found.bytes_read);
}

// Without a note the next engine verifies earlier or later than it would.
void RecordVerifier::WriteNote(const std::string& folder,
                               const VerifyNote& note) const {
  const absl::Status written = WriteVerifyNote(folder, note);
  if (written.ok()) return;
  spdlog::warn("when the records were verified is not noted: job={} error={}",
               job_, written.ToString());
}

void RecordVerifier::UseNote(const std::string& folder, uint64_t incarnation) {
  const absl::MutexLock lock(&mu_);
  if (folder == note_folder_ && incarnation == note_.incarnation) return;
  note_folder_ = folder;
  const auto found = ReadVerifyNote(folder);
  if (!found.ok()) spdlog::warn("{}", found.status().ToString());
  if (found.ok() && found->has_value() &&
      (*found)->incarnation == incarnation) {
    note_ = **found;
    // A wall clock that was set back says nothing.
    counted_from_ = clock_() - std::max(absl::ZeroDuration(),
                                        wall_clock_() - note_.counted_from);
    return;
  }
  note_ = {.incarnation = incarnation, .counted_from = wall_clock_()};
  counted_from_ = clock_();
  WriteNote(folder, note_);
}

void RecordVerifier::End(Verification* verification, absl::string_view why) {
  verification->Cancel(
      absl::AbortedError(absl::StrCat("the verification was ended: ", why)));
  verification->AwaitEnd();
}

void RecordVerifier::Cancel(absl::string_view why) {
  std::shared_ptr<Verification> last;
  {
    const absl::MutexLock lock(&mu_);
    last = last_;
  }
  if (last != nullptr) End(last.get(), why);
}

void RecordVerifier::CancelScrub(absl::string_view why) {
  std::shared_ptr<Verification> scrub;
  {
    const absl::MutexLock lock(&mu_);
    if (last_asker_ == Asker::kScrub) scrub = last_;
  }
  if (scrub != nullptr) End(scrub.get(), why);
}

std::optional<absl::Time> RecordVerifier::counted_from() const {
  const absl::MutexLock lock(&mu_);
  return counted_from_;
}

void RecordVerifier::Describe(v1::DiskState* disk) const {
  const absl::MutexLock lock(&mu_);
  if (note_.is_verified) {
    SetTimestamp(absl::ToUnixNanos(note_.counted_from),
                 disk->mutable_last_verified_at());
  }
  disk->set_damaged_records(note_.damaged_records);
  disk->set_scrubs(scrubs_);
}

}  // namespace optstate::session
