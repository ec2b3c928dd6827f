#include "server/session/transfer/load_log_room.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/admission.h"
#include "server/session/tiers/node_budget.h"
#include "server/session/tiers/quota_rooms.h"

namespace optstate::session {

storage::LoadLogHeader LoadLogRoom::MakeLogHeader() const {
  storage::LoadLogHeader header;
  header.loads_finished = job_.record().loads_finished;
  header.incarnation = job_.tier->control()->incarnation;
  header.committed_step = job_.record().committed_step;
  return header;
}

void LoadLogRoom::DropLog() {
  load_.staged.Reset(MakeLogHeader());
  job_.tier->DropLoadLog();
}

// Grows the log in steps in proportion to its size; the last ones only as
// needed.
absl::StatusOr<absl::Span<std::byte>> LoadLogRoom::Grow(uint64_t bytes) {
  constexpr uint64_t kStepBytes = 64 << 10;
  const uint64_t bytes_max = StagedLoad::BytesMax(
      job_.Elements(), job_.layout(), job_.shape->partitions.size());
  if (bytes > bytes_max) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "job \"", job_.options.name,
        "\": the load is in too many parts to be kept "
        "in ",
        bytes_max, " bytes. The job is unchanged; load whole arrays"));
  }
  const uint64_t wanted = (bytes + bytes / 8 + kStepBytes - 1) / kStepBytes;
  absl::Status reserved;
  for (const uint64_t each :
       {std::min(wanted * kStepBytes, bytes_max), bytes}) {
    reserved = Reserve(each, bytes_max);
    if (reserved.ok()) return job_.tier->load_log();
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "job \"", job_.options.name, "\": no room for a load, which needs up to ",
      bytes_max, " bytes beside the state (", bytes,
      " so far): ", reserved.message(),
      ". The job is unchanged. A new one is loaded without (optctl delete job ",
      job_.options.name, ")"));
}

absl::Status LoadLogRoom::Reserve(uint64_t bytes, uint64_t bytes_max) {
  OPTSTATE_ASSIGN_OR_RETURN(const AdmissionLock lock,
                            AdmissionLock::Take(job_.StateDir()));
  const v1::DaemonConfig& config = job_.options.config;
  const uint64_t added = bytes - job_.tier->load_log().size();
  if (job_.tier->is_load_log_on_disk()) {
    // The first directory has it.
    OPTSTATE_RETURN_IF_ERROR(CheckDirectoryLimits(
        config.nvme(), job_.options.name, {&added, 1}, /*beside=*/true));
    OPTSTATE_RETURN_IF_ERROR(CheckDiskQuotas(
        {&config, job_.StateDir(), job_.options.uid, job_.options.name},
        {&added, 1}, /*beside=*/true));
    return job_.tier->ReserveLoadLog(bytes, bytes_max);
  }
  AdmissionRequest request;
  request.directory = job_.options.directory;
  request.state_dir = job_.StateDir();
  request.new_state_bytes = added;
  request.job_state_bytes = job_.tier->bytes() + added;
  request.uid = job_.options.uid;
  request.limits = config.limits();
  request.quotas = config.quotas();
  OPTSTATE_RETURN_IF_ERROR(Admit(request));
  return job_.tier->ReserveLoadLog(bytes, bytes_max);
}

}  // namespace optstate::session
