#include "server/supervisor/sleep/wake_admission.h"

#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/types/status_macros.h"
#include "server/session/admission.h"
#include "server/session/engine_memory.h"
#include "server/session/lock_admission.h"
#include "server/session/tiers/node_budget.h"
#include "server/session/tiers/quota_rooms.h"
#include "server/supervisor/sleep/sleep_manifest.h"
#include "storage/state_folder.h"
#include "storage/tmpfs_info.h"

namespace optstate::supervisor {
namespace {

// Returns the path of a file of the state, as a manifest names it.
std::string StatePath(absl::string_view file) {
  return absl::StrCat(storage::kStateFolder + 1, "/", file);
}

// Returns the bytes of the records that are swapped and lie in memory, as
// CheckNodeBudget() counts those of jobs that are awake.
uint64_t FrameBytes(const v1::SleepManifest& manifest) {
  const std::string path = StatePath("frames");
  for (const v1::SleepFile& file : manifest.files()) {
    if (file.path() == path) return file.size();
  }
  return 0;
}

// Returns the bytes that the engine will lock in memory: those of the state's
// files but for the description, which it does not map.
uint64_t LockedBytes(const v1::SleepManifest& manifest) {
  const std::string folder = StatePath("");
  const std::string description = StatePath(storage::kDescriptionFile);
  uint64_t bytes = 0;
  for (const v1::SleepFile& file : manifest.files()) {
    if (!absl::StartsWith(file.path(), folder)) continue;
    if (file.path() != description) bytes += file.allocated_bytes();
  }
  return bytes;
}

absl::Status Check(const v1::DaemonConfig& config, const SleepPlace& place,
                   const v1::SleepManifest& manifest) {
  session::AdmissionRequest request;
  request.directory = place.job_directory;
  request.state_dir = config.state_dir();
  request.job_state_bytes = MemoryBytes(manifest);
  request.new_state_bytes = request.job_state_bytes;
  request.table_bytes =
      session::EngineBytesOf(config, place.folder + kFilesFolder);
  request.uid = place.uid;
  request.limits = config.limits();
  request.quotas = config.quotas();
  OPTSTATE_RETURN_IF_ERROR(session::Admit(request));
  const uint64_t frames = FrameBytes(manifest);
  if (frames != 0) {
    OPTSTATE_RETURN_IF_ERROR(session::CheckNodeBudget(
        config.state_dir(), config.nvme(), place.job, frames));
    OPTSTATE_RETURN_IF_ERROR(session::CheckFramesQuotas(
        {&config, config.state_dir(), place.uid, place.job}, frames));
  }
  return session::AdmitLockOfNextEngine(config, place.job_directory,
                                        LockedBytes(manifest));
}

}  // namespace

absl::Status AdmitToWake(const v1::DaemonConfig& config,
                         const SleepPlace& place,
                         const v1::SleepManifest& manifest,
                         absl::FunctionRef<absl::Status()> reserve) {
  OPTSTATE_ASSIGN_OR_RETURN(const session::AdmissionLock lock,
                            session::AdmissionLock::Take(config.state_dir()));
  const std::string job = absl::StrCat("job \"", place.job, "\" stays asleep");
  OPTSTATE_RETURN_IF_ERROR(Annotate(Check(config, place, manifest), job));
  return Annotate(storage::ExplainFull(reserve(), place.job_directory), job);
}

}  // namespace optstate::supervisor
