#include "server/session/durability/rearrangement.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/types/status_macros.h"
#include "server/session/durability/disk_claim.h"
#include "server/session/durability/durable_job.h"
#include "server/session/durability/job_extents.h"
#include "server/session/durability/job_storage.h"
#include "server/session/durability/store_maker.h"
#include "server/session/tiers/node_budget.h"
#include "server/session/tiers/quota_rooms.h"
#include "spdlog/spdlog.h"
#include "storage/next_frame_table.h"
#include "storage/record_split.h"
#include "storage/state_folder.h"

namespace optstate::session {
namespace {

// Says what to do where two arrangements do not fit.
absl::Status WithAdvice(const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) return status;
  return absl::ResourceExhaustedError(absl::StrCat(
      status.message(),
      ". While records are written anew, those that are there stay, so both "
      "need room: the job is as it was. Where there cannot be more, take a "
      "state_dict, delete the job and load it into a new one"));
}

std::string StateFolderOf(const JobContext& job) {
  return job.options.directory + storage::kStateFolder;
}

std::optional<storage::RewriteState> RewriteOf(const JobContext& job) {
  if (job.store == nullptr) return std::nullopt;
  return job.store->rewriting();
}

std::string TextOf(const storage::RewriteState& state) {
  std::string text = "records are written anew";
  if (state.is_move) absl::StrAppend(&text, ", training goes on");
  if (state.bytes_total == 0) return text;
  constexpr double kMiB = 1 << 20;
  const auto done = static_cast<double>(state.bytes);
  const auto total = static_cast<double>(state.bytes_total);
  const double s = absl::ToDoubleSeconds(state.elapsed);
  absl::StrAppendFormat(&text, ": %.0f of %.0f MiB (%.0f%%)", done / kMiB,
                        total / kMiB, 100 * done / total);
  if (done == 0 || s <= 0) return text;
  absl::StrAppendFormat(&text, " at %.0f MiB/s, %.0f s left", done / kMiB / s,
                        s * (total - done) / done);
  return text;
}

}  // namespace

void DescribeRewrite(const JobContext& job, v1::Job* described) {
  const std::optional<storage::RewriteState> state = RewriteOf(job);
  if (!state.has_value()) return;
  v1::RecordRewrite* rewrite = described->mutable_record_rewrite();
  rewrite->set_bytes(state->bytes);
  rewrite->set_bytes_total(state->bytes_total);
  rewrite->set_elapsed_ns(
      static_cast<uint64_t>(absl::ToInt64Nanoseconds(state->elapsed)));
  described->set_open_load(TextOf(*state));
}

Rearrangement::Rearrangement(JobContext* job, JobDescription next)
    : job_(*job),
      next_(std::move(next)),
      former_count_(DirectoryCountOf(job->options.config,
                                     job->shape->description.storage)) {
  next_.storage.set_arrangement(job->shape->description.storage.arrangement() +
                                1);
  text_ = SerializeDescription(next_);
  sizes_ = SwapSizesOf(*job, next_);
}

absl::StatusOr<std::unique_ptr<Rearrangement>> Rearrangement::Prepare(
    JobContext* job, JobDescription next) {
  std::unique_ptr<Rearrangement> rearrangement(
      new Rearrangement(job, std::move(next)));
  // The destructor removes what was made before an error.
  const absl::Status made = rearrangement->Make();
  if (!made.ok()) return WithAdvice(made);
  return rearrangement;
}

absl::Status Rearrangement::Make() {
  const v1::NvmeSettings& nvme = job_.options.config.nvme();
  OPTSTATE_ASSIGN_OR_RETURN(
      folders_,
      OwnDirectoriesOf(job_.options.config, job_.options.name, next_.storage));
  OPTSTATE_RETURN_IF_ERROR(CheckDirectoryLimits(
      nvme, job_.options.name, sizes_.directories, /*beside=*/true));
  OPTSTATE_RETURN_IF_ERROR(
      CheckDiskQuotas({&job_.options.config, job_.StateDir(), job_.options.uid,
                       job_.options.name},
                      sizes_.directories, /*beside=*/true));
  const uint32_t number = next_.storage.arrangement();
  if (folders_.size() > former_count_) {
    OPTSTATE_RETURN_IF_ERROR(ClaimDiskFolders(
        folders_, {.incarnation = job_.tier->control()->incarnation,
                   .owner = job_.options.uid,
                   .job_directory = job_.options.directory,
                   .is_new = true,
                   .devices = DevicesOf(nvme),
                   .first = former_count_}));
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      target_.arrangement.extents,
      TakeExtents(nvme, job_.options.name, sizes_.records_by_directory, number,
                  /*is_new=*/true));
  if (IsDurable(next_.storage)) OPTSTATE_RETURN_IF_ERROR(MarkDurable(folders_));
  OPTSTATE_ASSIGN_OR_RETURN(
      table_,
      storage::MakeNextFrameTable(StateFolderOf(job_), number, sizes_.table));
  target_.layout = &next_.layout;
  target_.sub_group_elements = SubGroupElements(job_, next_);
  target_.arrangement.number = number;
  target_.arrangement.directories = folders_;
  const auto& weights = next_.storage.directory_weights();
  target_.arrangement.weights = {weights.begin(), weights.end()};
  target_.table = {table_->data(), table_->size()};
  return absl::OkStatus();
}

absl::Status Rearrangement::DescribeCommit() {
  OPTSTATE_RETURN_IF_ERROR(
      job_.MakePass([this] { return job_.store->AwaitCommit(); }));
  OPTSTATE_ASSIGN_OR_RETURN(target_.job, TextOfCommit());
  target_.job_bytes = DurableJobBytes(next_.layout, text_);
  return absl::OkStatus();
}

// New parameters begin without steps, and are to be loaded.
absl::StatusOr<std::string> Rearrangement::TextOfCommit() const {
  const std::string last = job_.store->durable_job();
  if (last.empty()) return last;
  OPTSTATE_ASSIGN_OR_RETURN(DurableJob job, ParseDurableJob(last));
  const size_t parameters = next_.layout.parameters().size();
  job.record.load_required_from =
      std::min(job.record.load_required_from, job_.parameter_count());
  job.description = text_;
  job.step_counts.resize(parameters, 0);
  if (!job.scalars.empty()) job.scalars.resize(parameters, 0);
  return SerializeDurableJob(job);
}

Rearrangement::~Rearrangement() {
  if (is_adopted_) return;
  const uint32_t number = next_.storage.arrangement();
  if (store_ != nullptr) {
    store_->EndMove();
  } else if (job_.store != nullptr &&
             !target_.arrangement.directories.empty()) {
    job_.store->RemoveAnew(target_.arrangement);
  }
  table_.reset();
  storage::RemoveNextFrameTable(StateFolderOf(job_), number);
  RemoveOthers(former_count_, number - 1);
}

void Rearrangement::RemoveOthers(uint32_t count, uint32_t arrangement) const {
  RemoveOtherArrangements(
      {.folders = DiskDirectoriesOf(job_.options.config, job_.options.name),
       .count = count,
       .number = arrangement,
       .incarnation = job_.tier->control()->incarnation});
}

std::string Rearrangement::Describe(absl::string_view why) const {
  return absl::StrCat("job=", job_.options.name, " why=\"", why,
                      "\" directories=", folders_.size(), " weights=",
                      storage::WeightsText(target_.arrangement.weights));
}

absl::Status Rearrangement::Begin() {
  store_ = job_.store.get();
  return WithAdvice(
      job_.MakePass([this] { return store_->BeginMove(target_); }));
}

absl::Status Rearrangement::Copy() { return WithAdvice(store_->CopyRecords()); }

void Rearrangement::Cancel(const absl::Status& why) {
  if (store_ != nullptr) store_->CancelMove(why);
}

absl::StatusOr<uint64_t> Rearrangement::Switch() {
  job_.verifier.Cancel("the job's records move to other files");
  // Other settings may have been set since the move began.
  JobDescription description = job_.shape->description;
  v1::StorageSettings& storage = description.storage;
  storage.set_directories(next_.storage.directories());
  *storage.mutable_directory_weights() = next_.storage.directory_weights();
  storage.set_arrangement(next_.storage.arrangement());
  text_ = SerializeDescription(description);
  OPTSTATE_RETURN_IF_ERROR(DescribeCommit());
  absl::StatusOr<uint64_t> bytes = uint64_t{0};
  const absl::Status switched = job_.MakePass([&] {
    bytes = store_->FinishMove([&] {
      // Operators may look at the job while a pass is made.
      const absl::MutexLock lock(&job_.lock.mu);
      OPTSTATE_RETURN_IF_ERROR(
          job_.tier->files().WriteDescription(job_.layout(), text_));
      job_.shape->description.storage = storage;
      job_.shape->text = text_;
      Adopt();
      return absl::OkStatus();
    });
    return bytes.status();
  });
  // Once the job has the new files, it is not as it was.
  OPTSTATE_RETURN_IF_ERROR(is_adopted_ ? switched : WithAdvice(switched));
  const absl::Status claimed = ClaimDiskFolders(
      folders_, {.incarnation = job_.tier->control()->incarnation,
                 .owner = job_.options.uid,
                 .job_directory = job_.options.directory});
  // After a loss of power the first folder says how many there are, so none
  // goes before it does.
  if (!claimed.ok()) {
    spdlog::error(
        "{}; what was the former arrangement's stays until the job's next "
        "engine removes it: {}",
        claimed.ToString(), Describe("directory_weights"));
    return bytes;
  }
  RemoveOthers(static_cast<uint32_t>(folders_.size()),
               next_.storage.arrangement());
  return bytes;
}

absl::Status Rearrangement::WriteAnew() {
  job_.verifier.Cancel("the job's records are written anew");
  OPTSTATE_RETURN_IF_ERROR(DescribeCommit());
  const std::string what = Describe("parameters are added");
  spdlog::info("records are written anew, training waits: {}", what);
  const absl::Time began_at = job_.options.clock();
  uint64_t bytes = 0;
  absl::Status status = job_.MakePass([&] {
    const absl::StatusOr<uint64_t> written = job_.store->WriteAnew(target_);
    if (written.ok()) bytes = *written;
    return written.status();
  });
  if (!status.ok()) {
    status = WithAdvice(status);
    spdlog::error("records were not written anew: {} error=\"{}\"", what,
                  status.ToString());
    return status;
  }
  spdlog::info("records were written anew: {} bytes={} ms={}", what, bytes,
               absl::ToInt64Milliseconds(job_.options.clock() - began_at));
  return status;
}

void Rearrangement::Adopt() {
  is_adopted_ = true;
  const absl::Status settled = storage::SettleFrameTable(
      StateFolderOf(job_), next_.storage.arrangement());
  // The next engine does it again.
  if (!settled.ok()) spdlog::error("{}", settled.ToString());
  job_.tier->files().UseFrameTable(*std::move(table_));
  table_.reset();
}

}  // namespace optstate::session
