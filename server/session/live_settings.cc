#include "server/session/live_settings.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/admission.h"
#include "server/session/devices/device_updates.h"
#include "server/session/durability/job_storage.h"
#include "server/session/durability/store_maker.h"
#include "server/session/job_description.h"
#include "spdlog/spdlog.h"

namespace optstate::session {

absl::StatusOr<v1::SetJobReply> LiveSettings::Set(
    const v1::SetJobRequest& request) {
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  if (job_.recovery.has_value()) return job_.StillRecovering();
  if (request.host_budget_bytes() == 0 &&
      request.durability() == v1::DURABILITY_KIND_UNSPECIFIED &&
      !request.has_offload_fraction()) {
    return absl::InvalidArgumentError(
        "nothing is to be set: name a host_budget, a durability or an "
        "offload_fraction");
  }
  const JobDescription& now = job_.shape->description;
  OPTSTATE_ASSIGN_OR_RETURN(
      const v1::StorageSettings storage,
      ChangeStorage(now.storage, request, SwapSizesOf(job_, now)));
  OPTSTATE_RETURN_IF_ERROR(
      Annotate(Use(storage), absl::StrCat("job \"", job_.options.name, "\"")));
  const v1::SetJobReply reply = Reply();
  spdlog::info("settings changed: job={} frames={} {}", job_.options.name,
               reply.frames(), storage.ShortDebugString());
  return reply;
}

absl::Status LiveSettings::Use(const v1::StorageSettings& storage) {
  JobDescription next = job_.shape->description;
  const double former = OffloadFractionOf(next.storage);
  next.storage = storage;
  OPTSTATE_RETURN_IF_ERROR(CheckDeviceUpdates(next, &job_));
  const uint64_t frame_bytes =
      UsesDisk(storage) ? FrameBytesOf(storage, SwapSizesOf(job_, next)) : 0;
  const bool has_more_frames = frame_bytes > job_.tier->frames().size();
  std::optional<AdmissionLock> lock;
  if (has_more_frames || DeviceUpdateBytes(job_, next) >
                             DeviceUpdateBytes(job_, job_.shape->description)) {
    OPTSTATE_ASSIGN_OR_RETURN(lock, AdmissionLock::Take(job_.StateDir()));
    OPTSTATE_RETURN_IF_ERROR(registrar_.AdmitShape(next));
  }
  OPTSTATE_RETURN_IF_ERROR(ShareUpdates(OffloadFractionOf(storage), &job_));
  const std::string description = SerializeDescription(next);
  const absl::Status used = has_more_frames ? Grow(storage, description)
                                            : Describe(storage, description);
  if (!used.ok()) ShareUpdates(former, &job_).IgnoreError();
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
  const nvme::NvmeSizes sizes = SwapSizesOf(job_, now);
  reply.set_records(sizes.records);
  reply.set_frames(job_.tier->frames().size() / sizes.frame);
  reply.set_frame_bytes(sizes.frame);
  return reply;
}

}  // namespace optstate::session
