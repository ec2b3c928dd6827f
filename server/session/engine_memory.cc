#include "server/session/engine_memory.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/scheduler/step_scheduler.h"
#include "server/scheduler/workers/available_cores.h"
#include "server/session/durability/store_maker.h"
#include "server/session/job_description.h"
#include "server/session/job_shape.h"
#include "storage/format/checked_file.h"
#include "storage/state_folder.h"

namespace optstate::session {

uint64_t EngineBytesOf(const v1::DaemonConfig& config,
                       const std::string& directory) {
  const absl::StatusOr<storage::CheckedFile> file =
      storage::ReadCheckedFile(absl::StrCat(directory, storage::kStateFolder,
                                            "/", storage::kDescriptionFile));
  if (!file.ok()) return 0;
  const absl::StatusOr<JobDescription> description =
      ParseDescription(file->payload);
  if (!description.ok()) return 0;
  const int workers = config.engine().workers() == 0
                          ? scheduler::AvailableCores()
                          : static_cast<int>(config.engine().workers());
  return TableBytes(*description) +
         scheduler::StepScheduler::WorkspaceBytes(description->layout,
                                                  workers) +
         ParameterCacheBytesOf(config, *description).value_or(0);
}

}  // namespace optstate::session
