#include "server/session/durability/record_verifier.h"

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
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

}  // namespace

void Verification::Read(storage::StateStore* store) {
  const absl::StatusOr<storage::VerifyResult> result = store->Verify(
      [this](const storage::VerifyResult& found) { return Note(found); });
  const absl::MutexLock lock(&mu_);
  if (result.ok()) {
    progress_ = result->progress;
  } else {
    status_ = cancelled_.ok() ? result.status() : cancelled_;
  }
  has_ended_ = true;
}

bool Verification::Note(const storage::VerifyResult& found) {
  const absl::MutexLock lock(&mu_);
  progress_ = found.progress;
  while (damages_.size() < found.damages.size()) {
    damages_.push_back(found.damages[damages_.size()]);
    spdlog::error("verification: {}", damages_.back().status.ToString());
  }
  return cancelled_.ok();
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

absl::StatusOr<std::shared_ptr<Verification>> RecordVerifier::Begin(
    storage::StateStore* store) {
  const absl::MutexLock lock(&mu_);
  if (last_ != nullptr && !last_->has_ended()) {
    return absl::FailedPreconditionError(
        "the job's records are being verified already");
  }
  auto next = std::make_shared<Verification>();
  try {
    next->thread_ =
        std::thread([run = next.get(), store] { run->Read(store); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no thread to verify records: ", error.what()));
  }
  last_ = next;
  return next;
}

void RecordVerifier::Cancel(absl::string_view why) {
  std::shared_ptr<Verification> last;
  {
    const absl::MutexLock lock(&mu_);
    last = last_;
  }
  if (last == nullptr) return;
  last->Cancel(
      absl::AbortedError(absl::StrCat("the verification was ended: ", why)));
  last->AwaitEnd();
}

}  // namespace optstate::session
