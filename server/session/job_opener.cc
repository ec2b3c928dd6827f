#include "server/session/job_opener.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/cast.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/session/admission.h"
#include "server/session/durability/disk_claim.h"
#include "server/session/durability/durable_job.h"
#include "server/session/durability/job_storage.h"
#include "server/session/durability/store_maker.h"
#include "server/session/recovery/step_files_check.h"
#include "server/session/steps/loss_scaler.h"
#include "spdlog/spdlog.h"
#include "storage/disk_folder.h"
#include "storage/next_frame_table.h"
#include "storage/state_folder.h"

namespace optstate::session {
namespace {

// Beside the state folder while that is being made from the disk: the folder is
// then not whole.
constexpr char kRestoringFile[] = "/restoring";

// Says what to do about a job whose records cannot all be read after a loss of
// power. It is not opened for a load: ranks that attach to a job that asks for
// parameters bring their own, and it would go on from its step with those.
absl::Status NotRestored(const absl::Status& why, absl::string_view job) {
  if (!absl::IsDataLoss(why)) return why;
  return absl::DataLossError(absl::StrCat(
      "job \"", job,
      "\" cannot be restored from its disks, because a record with its "
      "parameters cannot be read: ",
      why.message(), ". Nothing was changed in its records: optctl recover ",
      job, " tries again. If the damage stays, delete the job (optctl delete ",
      "job ", job, ") and load the checkpoint into a new one"));
}

}  // namespace

absl::Status JobOpener::Adopt() { return AddWayBack(AdoptFiles()); }

// Adds the way back to the last durable step to the error of a job whose files
// in memory are damaged.
absl::Status JobOpener::AddWayBack(const absl::Status& status) const {
  const std::vector<std::string> directories =
      DiskDirectoriesOf(job_.options.config, job_.options.name);
  const std::string state = job_.options.directory + storage::kStateFolder;
  const bool is_restoring =
      ::access((job_.options.directory + kRestoringFile).c_str(), F_OK) == 0;
  if (!absl::IsDataLoss(status) || directories.empty() || is_restoring ||
      absl::StrContains(status.message(), "--to-durable") ||
      ::access(state.c_str(), F_OK) != 0 ||
      ::access((directories[0] + "/commits").c_str(), F_OK) != 0) {
    return status;
  }
  return absl::DataLossError(absl::StrCat(
      status.message(), ". The last durable step is on disk: optctl recover ",
      job_.options.name, " --to-durable goes back to it"));
}

absl::Status JobOpener::AdoptFiles() {
  OPTSTATE_RETURN_IF_ERROR(DropHalfRestored());
  OPTSTATE_RETURN_IF_ERROR(GiveUpMemoryOfFormerBoot());
  OPTSTATE_RETURN_IF_ERROR(GiveUpMemoryIfAsked());
  const absl::StatusOr<storage::CheckedFile> file =
      storage::HostTier::ReadDescription(job_.options.directory);
  if (absl::IsNotFound(file.status())) {
    gradients_.DropGradientsOfAbsent();
    const absl::Status restored = RestoreFromDisk();
    return absl::IsNotFound(restored) ? absl::OkStatus() : restored;
  }
  OPTSTATE_RETURN_IF_ERROR(file.status());
  OPTSTATE_ASSIGN_OR_RETURN(JobDescription description,
                            ParseDescription(file->payload));
  OPTSTATE_RETURN_IF_ERROR(SettleArrangement(&description.storage));
  OPTSTATE_RETURN_IF_ERROR(scheduler::StepScheduler::CheckKernels(
      description.layout, description.accumulation()));
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<JobShape> shape,
                            MakeShape(std::move(description)));
  OPTSTATE_ASSIGN_OR_RETURN(
      job_.tier,
      storage::HostTier::Open(job_.options.directory, shape->description.layout,
                              HostArraysOf(shape->description), *file));
  OPTSTATE_RETURN_IF_ERROR(job_.tier->ReserveUndo(0));
  OPTSTATE_RETURN_IF_ERROR(job_.tier->ReserveSpeculation(0));
  OPTSTATE_RETURN_IF_ERROR(job_.tier->ReserveRedo(0));
  OPTSTATE_RETURN_IF_ERROR(job_.tier->ReserveFrames(0));
  OPTSTATE_RETURN_IF_ERROR(job_.tier->ReserveFrameTable(0));
  OPTSTATE_RETURN_IF_ERROR(job_.tier->ReserveGradientLog(0));
  OPTSTATE_RETURN_IF_ERROR(CheckStepFiles(job_, shape->description));
  OPTSTATE_RETURN_IF_ERROR(registrar_.UseShape(std::move(shape)));
  RepairScaler();
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_.AwaitedCount() == 0) ranks_.losses().Forget(rank);
  }
  if (ranks_.AwaitedCount() > 0) ranks_.NoteHadSession();
  // A former engine may have died between two sizes.
  job_.failure = durability_.FitFrames();
  if (job_.failure.ok()) job_.failure = durability_.CheckMemoryIsNewest();
  if (job_.failure.ok()) job_.failure = recovery_.AdoptStep();
  if (job_.failure.ok()) job_.failure = applier_.AdoptLoad();
  if (job_.failure.ok()) job_.failure = durability_.AdoptCommit();
  if (!job_.failure.ok()) spdlog::error("{}", job_.failure.ToString());
  return absl::OkStatus();
}

// Has the frame table be that of the job's arrangement, and finds out how many
// directories a job of a former build has.
absl::Status JobOpener::SettleArrangement(v1::StorageSettings* storage) const {
  if (!UsesDisk(*storage)) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(storage::SettleFrameTable(
      job_.options.directory + storage::kStateFolder, storage->arrangement()));
  const std::vector<std::string> directories =
      DiskDirectoriesOf(job_.options.config, job_.options.name);
  if (storage->directories() != 0 || directories.empty()) {
    return absl::OkStatus();
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<storage::DiskIdentity> identity,
                            storage::ReadDiskIdentity(directories[0]));
  if (identity.has_value()) storage->set_directories(identity->count);
  return absl::OkStatus();
}

// Gives a scaler its state where the former engine died between the files of
// the job, or of its new shape, and that state.
void JobOpener::RepairScaler() {
  const auto& scaler = job_.shape->description.loss_scaler;
  storage::StepRecord record = job_.record();
  if (scaler.has_value() && RepairLossScaler(*scaler, &record)) {
    storage::PublishRecord(record, job_.tier->control());
  }
}

// Files of a state directory that is no tmpfs survive a reboot as far as they
// were written back, so that after a power cut each may be of another step.
// Removes them where a durable step is on disk; DATA_LOSS: there is none.
absl::Status JobOpener::GiveUpMemoryOfFormerBoot() const {
  const absl::StatusOr<std::string> boot = storage::ReadBootId();
  if (!boot.ok()) return absl::OkStatus();  // a sandbox without /proc
  const std::string path = job_.options.directory + storage::kBootFile;
  const absl::StatusOr<std::string> noted = storage::ReadDiskText(path);
  if (noted.ok() && *noted == *boot) return absl::OkStatus();
  const std::string state = job_.options.directory + storage::kStateFolder;
  // A job of a former build has no note.
  if (noted.ok() && storage::MayExist(state)) {
    const absl::Status found = FindDurable().status();
    if (absl::IsNotFound(found)) {
      return absl::DataLossError(absl::StrCat(
          "job \"", job_.options.name,
          "\": the machine has started anew since ", state,
          " was written. Its directory is not a tmpfs, so after a loss of "
          "power "
          "the files may be of different steps, and no durable step is on "
          "disk. "
          "Delete the job (optctl delete job ",
          job_.options.name,
          ") and begin it again from a checkpoint, with a durability, or with "
          "state_dir on a tmpfs"));
    }
    OPTSTATE_RETURN_IF_ERROR(found);
    spdlog::warn(
        "the machine has started anew: memory is given up for what is on disk: "
        "job={}",
        job_.options.name);
    OPTSTATE_RETURN_IF_ERROR(storage::HostTier::Remove(job_.options.directory));
  } else if (!noted.ok() && !absl::IsNotFound(noted.status())) {
    return noted.status();
  }
  return storage::WriteDurably(path, *boot);
}

// Removes the state folder when an operator has asked for the last durable step
// instead, once that step is known to be on disk.
absl::Status JobOpener::GiveUpMemoryIfAsked() const {
  const std::string note = job_.options.directory + storage::kToDurableFile;
  if (::access(note.c_str(), F_OK) != 0) return absl::OkStatus();
  const absl::StatusOr<storage::DurableCommit> commit = FindDurable();
  if (commit.ok()) {
    spdlog::warn("memory is given up for what is on disk: job={} step={}",
                 job_.options.name, commit->step);
    OPTSTATE_RETURN_IF_ERROR(storage::HostTier::Remove(job_.options.directory));
  }
  ::unlink(note.c_str());
  if (commit.ok()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("memory is kept, because the durable step cannot be had: ",
                   commit.status().message()));
}

// Finds the last durable commit of this job and its owner. NOT_FOUND: there is
// none.
absl::StatusOr<storage::DurableCommit> JobOpener::FindDurable() const {
  const std::vector<std::string> directories =
      DiskDirectoriesOf(job_.options.config, job_.options.name);
  if (directories.empty()) return absl::NotFoundError("no disk");
  const absl::Status has = CheckHasCommits(directories);
  if (absl::IsNotFound(has)) return has;
  // Directories in another order also look as if the first were not mounted.
  OPTSTATE_RETURN_IF_ERROR(CheckDiskIdentities(directories, std::nullopt,
                                               /*count=*/0));
  OPTSTATE_RETURN_IF_ERROR(has);
  OPTSTATE_RETURN_IF_ERROR(CheckDiskOwner(directories[0], job_.options.uid));
  return ReadDurableCommit(job_, directories);
}

// Makes the state folder anew from the last durable commit on disk. NOT_FOUND:
// there is none.
absl::Status JobOpener::RestoreFromDisk() {
  const absl::StatusOr<storage::DurableCommit> found = FindDurable();
  if (absl::IsNotFound(found.status())) DropNeverDurable();
  OPTSTATE_RETURN_IF_ERROR(found.status());
  const storage::DurableCommit& commit = *found;
  OPTSTATE_ASSIGN_OR_RETURN(const DurableJob job, ParseDurableJob(commit.job));
  OPTSTATE_ASSIGN_OR_RETURN(JobDescription description,
                            ParseDescription(job.description));
  description.storage.set_directories(commit.paths);
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<JobShape> shape,
                            MakeShape(std::move(description)));
  const JobDescription& what = shape->description;
  const size_t parameters = what.layout.parameters().size();
  if (job.step_counts.size() != parameters ||
      (!job.scalars.empty() && job.scalars.size() != parameters)) {
    return absl::DataLossError(absl::StrCat(
        "commits: counts of ", job.step_counts.size(), " and scalars of ",
        job.scalars.size(), " parameters, the layout has ", parameters));
  }
  // Other jobs wait for the lock, so the records are read without it.
  OPTSTATE_ASSIGN_OR_RETURN(std::optional<AdmissionLock> lock,
                            AdmissionLock::Take(job_.StateDir()));
  OPTSTATE_RETURN_IF_ERROR(registrar_.AdmitShape(what));
  const std::string marker = job_.options.directory + kRestoringFile;
  const UniqueFd marked(
      ::open(marker.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  if (!marked.ok()) return OsError(errno, absl::StrCat("create ", marker));
  OPTSTATE_ASSIGN_OR_RETURN(
      job_.tier, storage::HostTier::Create(job_.options.directory, what.layout,
                                           HostArraysOf(what), job.description,
                                           commit.incarnation));
  storage::PublishRecord(job.record, job_.tier->control());
  OPTSTATE_RETURN_IF_ERROR(registrar_.UseShape(std::move(shape), &commit));
  lock.reset();
  std::copy(job.step_counts.begin(), job.step_counts.end(),
            job_.store->step_counts().begin());
  std::copy(job.scalars.begin(), job.scalars.end(),
            job_.store->scalars().begin());
  if (!job_.HoldsParametersOnDisk()) {
    absl::Status restored = job_.store->RestoreParameters();
    if (restored.ok()) restored = CastParametersFromMasters();
    if (!restored.ok()) return NotRestored(restored, job_.options.name);
  }
  // A load that the power cut has ended.
  job_.tier->DropLoadLog();
  ::unlink(marker.c_str());
  spdlog::info("job restored from disk: job={} step={}", job_.options.name,
               job_.record().committed_step);
  return absl::OkStatus();
}

// Removes what a job left on disk that was never durable, since it would keep
// the name from a new job. A job without such files has nothing to remove.
void JobOpener::DropNeverDurable() const {
  const std::vector<std::string> directories =
      DiskDirectoriesOf(job_.options.config, job_.options.name);
  if (directories.empty() || absl::IsNotFound(CheckHasCommits(directories))) {
    return;
  }
  const absl::StatusOr<std::optional<storage::DiskIdentity>> identity =
      storage::ReadDiskIdentity(directories[0]);
  if (!identity.ok()) return;
  spdlog::warn("job was never durable, its records are removed: job={}",
               job_.options.name);
  RemoveDiskFolders(directories, identity->has_value()
                                     ? std::optional((*identity)->incarnation)
                                     : std::nullopt);
}

// Parameters with float32 masters are not in records, where there is an area
// for them: they are these, rounded.
absl::Status JobOpener::CastParametersFromMasters() {
  for (uint32_t p = 0; p < job_.parameter_count(); ++p) {
    if (job_.layout().master_format(p) != MasterFormat::kFloat32) continue;
    const ParameterSpec& spec = job_.layout().parameters()[p];
    OPTSTATE_RETURN_IF_ERROR(job_.store->ForEachRecord(
        p, 0, static_cast<uint64_t>(spec.numel),
        storage::StateStore::Access::kRead,
        [&](const storage::RecordView& record, uint64_t begin, uint64_t numel) {
          kernels::CastFromFloat(
              spec.dtype,
              reinterpret_cast<const float*>(record.master(p, begin)),
              record.parameter(p, begin), numel);
        }));
  }
  return absl::OkStatus();
}

// Removes a state folder that was not made to its end from the disk.
absl::Status JobOpener::DropHalfRestored() const {
  const std::string marker = job_.options.directory + kRestoringFile;
  if (::access(marker.c_str(), F_OK) != 0) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(storage::HostTier::Remove(job_.options.directory));
  ::unlink(marker.c_str());
  return absl::OkStatus();
}

}  // namespace optstate::session
