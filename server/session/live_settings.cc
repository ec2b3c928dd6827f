#include "server/session/live_settings.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/types/status_macros.h"
#include "server/observe/peer_log.h"
#include "server/session/admission.h"
#include "server/session/devices/device_updates.h"
#include "server/session/durability/job_storage.h"
#include "server/session/durability/store_maker.h"
#include "server/session/job_description.h"
#include "server/session/tiers/disk_rates.h"
#include "spdlog/spdlog.h"
#include "storage/record_split.h"
#include "storage/swap_sizes.h"

namespace optstate::session {
namespace {

// Returns whether devices update or keep something else from now on.
bool SharesAnew(const v1::StorageSettings& former,
                const v1::StorageSettings& storage) {
  return OffloadFractionOf(storage) != OffloadFractionOf(former) ||
         DeviceBudgetOf(storage) != DeviceBudgetOf(former);
}

// Returns whether devices need more host memory from now on: for copies as soon
// as they update anything, and for gradients of the records that stay there.
bool DevicesNeedMore(const v1::StorageSettings& former,
                     const v1::StorageSettings& storage) {
  const bool share_grows =
      OffloadFractionOf(storage) < OffloadFractionOf(former);
  const bool keeps = DeviceBudgetOf(storage) > 0;
  return (share_grows && (keeps || OffloadFractionOf(former) == 1)) ||
         DeviceBudgetOf(storage) > DeviceBudgetOf(former);
}

}  // namespace

absl::StatusOr<v1::SetJobReply> LiveSettings::Set(
    const v1::SetJobRequest& request) {
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  if (job_.recovery.has_value()) return job_.StillRecovering();
  const bool splits =
      !request.directory_weights().empty() || request.directory_weights_auto();
  const bool sets_others =
      request.host_budget_bytes() != 0 ||
      request.durability() != v1::DURABILITY_KIND_UNSPECIFIED ||
      request.has_offload_fraction() || request.has_device_budget_bytes();
  if (splits && sets_others) {
    return absl::InvalidArgumentError(
        "directory_weights has all records written anew, and is set alone: set "
        "the others before or after it");
  }
  if (splits) {
    absl::StatusOr<v1::SetJobReply> reply = Split(request);
    if (reply.ok()) return reply;
    return Annotate(reply.status(),
                    absl::StrCat("job \"", job_.options.name, "\""));
  }
  if (!sets_others) {
    return absl::InvalidArgumentError(
        "nothing is to be set: name a host_budget, a durability, "
        "directory_weights, an offload_fraction or a device_budget");
  }
  const JobDescription& now = job_.shape->description;
  OPTSTATE_ASSIGN_OR_RETURN(
      const v1::StorageSettings storage,
      ChangeStorage(now.storage, request, SwapSizesOf(job_, now)));
  OPTSTATE_RETURN_IF_ERROR(
      Annotate(Use(storage), absl::StrCat("job \"", job_.options.name, "\"")));
  // A durability holds from the present step on, which may be none of those
  // that it makes durable later.
  if (request.durability() != v1::DURABILITY_KIND_UNSPECIFIED) {
    OPTSTATE_RETURN_IF_ERROR(durability_.MakeDurableNow());
  }
  const v1::SetJobReply reply = Reply();
  observe::LogRepeated(spdlog::level::info, "settings changed",
                       absl::StrCat("job ", job_.options.name),
                       "settings changed: job={} frames={} {}",
                       job_.options.name, reply.frames(),
                       storage.ShortDebugString());
  return reply;
}

// Returns the weights of the daemon's directories, up to the last one that is
// to have records.
absl::StatusOr<std::vector<uint32_t>> LiveSettings::WeightsOf(
    const v1::SetJobRequest& request) {
  const v1::DaemonConfig& config = job_.options.config;
  const auto count = static_cast<size_t>(config.nvme().directories_size());
  std::vector<uint32_t> weights(request.directory_weights().begin(),
                                request.directory_weights().end());
  if (request.directory_weights_auto()) {
    // Measuring takes seconds, for which ranks wait.
    DiskRates rates;
    job_.MakePass([&] {
          rates =
              config.nvme().directory_weights().empty() && count > 1
                  ? MeasureDiskRates(job_.StateDir(), config, /*anew=*/false)
                  : RecordedDiskRates(job_.StateDir(), config.nvme());
          return absl::OkStatus();
        })
        .IgnoreError();  // always OK: MakePass returns what the pass does
    weights = DirectoryWeights(config.nvme(), rates);
    if (weights.empty()) weights.assign(count, 1);
  }
  OPTSTATE_RETURN_IF_ERROR(
      Annotate(storage::CheckWeights(weights, count), "directory_weights"));
  while (weights.back() == 0) weights.pop_back();
  return weights;
}

absl::StatusOr<v1::SetJobReply> LiveSettings::Split(
    const v1::SetJobRequest& request) {
  if (!job_.HasDisk()) {
    return absl::FailedPreconditionError(
        "directory_weights is for a job with records on disk (placement "
        "\"nvme\", or a durability), and this one lies in memory alone");
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint32_t> weights,
                            WeightsOf(request));
  JobDescription next = job_.shape->description;
  next.storage.set_directories(static_cast<uint32_t>(weights.size()));
  const std::vector<uint32_t> smallest = storage::SmallestWeights(weights);
  next.storage.mutable_directory_weights()->Assign(smallest.begin(),
                                                   smallest.end());
  if (next.storage.SerializeAsString() ==
      job_.shape->description.storage.SerializeAsString()) {
    job_.EndMove("the directory_weights in force were set again");
    return Reply();
  }
  OPTSTATE_ASSIGN_OR_RETURN(const RecordMoves::Moved moved, moves_.Run(next));
  // Another call may have changed the job since.
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(state_lock_.Lock());
  v1::SetJobReply reply = Reply();
  reply.set_moved_bytes(moved.bytes);
  reply.set_moved_ms(
      static_cast<uint64_t>(absl::ToInt64Milliseconds(moved.waited)));
  return reply;
}

absl::Status LiveSettings::Use(const v1::StorageSettings& storage) {
  JobDescription next = job_.shape->description;
  const v1::StorageSettings former = next.storage;
  // A job that has lost its devices may have its other settings changed.
  const bool shares_anew = SharesAnew(former, storage);
  next.storage = storage;
  if (shares_anew) OPTSTATE_RETURN_IF_ERROR(CheckDeviceUpdates(next, &job_));
  const uint64_t frame_bytes =
      UsesDisk(storage) ? FrameBytesOf(storage, SwapSizesOf(job_, next)) : 0;
  const bool has_more_frames = frame_bytes > job_.tier->frames().size();
  std::optional<AdmissionLock> lock;
  if (has_more_frames || DevicesNeedMore(former, storage)) {
    OPTSTATE_ASSIGN_OR_RETURN(lock, AdmissionLock::Take(job_.StateDir()));
    OPTSTATE_RETURN_IF_ERROR(registrar_.AdmitShape(next));
  }
  if (shares_anew) {
    absl::Status shared = ShareUpdates(storage, &job_);
    if (!shared.ok()) {
      ShareUpdates(former, &job_).IgnoreError();
      return shared;
    }
  }
  const std::string description = SerializeDescription(next);
  absl::Status used = has_more_frames ? Grow(storage, description)
                                      : Describe(storage, description);
  if (!used.ok() && shares_anew) ShareUpdates(former, &job_).IgnoreError();
  return used;
}

absl::Status LiveSettings::Describe(const v1::StorageSettings& storage,
                                    const std::string& description) {
  OPTSTATE_RETURN_IF_ERROR(WriteDescription(storage, description));
  OPTSTATE_RETURN_IF_ERROR(durability_.FitFrames());
  return state_lock_.Lock();
}

absl::Status LiveSettings::Grow(const v1::StorageSettings& storage,
                                const std::string& description) {
  const v1::StorageSettings former = job_.shape->description.storage;
  job_.shape->description.storage = storage;
  absl::Status status = durability_.FitFrames();
  if (status.ok()) status = state_lock_.Lock();
  if (status.ok()) status = WriteDescription(storage, description);
  if (status.ok()) return status;
  job_.shape->description.storage = former;
  const absl::Status restored = durability_.FitFrames();
  if (!restored.ok()) {
    spdlog::error("frames stay until the next engine: job={} error=\"{}\"",
                  job_.options.name, restored.ToString());
  }
  return status;
}

absl::Status LiveSettings::WriteDescription(const v1::StorageSettings& storage,
                                            const std::string& description) {
  OPTSTATE_RETURN_IF_ERROR(
      job_.tier->files().WriteDescription(job_.layout(), description));
  job_.shape->description.storage = storage;
  job_.shape->text = description;
  return absl::OkStatus();
}

v1::SetJobReply LiveSettings::Reply() const {
  const JobDescription& now = job_.shape->description;
  v1::SetJobReply reply;
  *reply.mutable_storage() = now.storage;
  if (!job_.HasDisk()) return reply;
  const storage::SwapSizes sizes = SwapSizesOf(job_, now);
  reply.set_records(sizes.records);
  reply.set_frames(job_.tier->frames().size() / sizes.frame);
  reply.set_frame_bytes(sizes.frame);
  return reply;
}

}  // namespace optstate::session
