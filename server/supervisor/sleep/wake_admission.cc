#include "server/supervisor/sleep/wake_admission.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/types/status_macros.h"
#include "server/session/admission.h"
#include "server/session/tiers/node_budget.h"
#include "server/supervisor/sleep/sleep_manifest.h"
#include "storage/state_folder.h"
#include "storage/tmpfs_info.h"

namespace optstate::supervisor {
namespace {

// Returns the bytes of the records that are swapped and lie in memory.
uint64_t FrameBytes(const v1::SleepManifest& manifest) {
  const std::string path = absl::StrCat(storage::kStateFolder + 1, "/frames");
  for (const v1::SleepFile& file : manifest.files()) {
    if (file.path() == path) return file.allocated_bytes();
  }
  return 0;
}

absl::Status Check(const v1::DaemonConfig& config, const SleepPlace& place,
                   const v1::SleepManifest& manifest) {
  session::AdmissionRequest request;
  request.directory = place.job_directory;
  request.state_dir = config.state_dir();
  request.job_state_bytes = MemoryBytes(manifest);
  request.new_state_bytes = request.job_state_bytes;
  request.uid = place.uid;
  request.limits = config.limits();
  OPTSTATE_RETURN_IF_ERROR(session::Admit(request));
  const uint64_t frames = FrameBytes(manifest);
  if (frames == 0) return absl::OkStatus();
  return session::CheckNodeBudget(config.state_dir(), config.nvme(), place.job,
                                  frames);
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
