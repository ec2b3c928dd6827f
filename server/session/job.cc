#include "server/session/job.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/job_impl.h"

namespace optstate::session {

absl::StatusOr<std::unique_ptr<Job>> Job::Open(Options options) {
  const std::string name = options.name;
  auto job = std::make_unique<JobImpl>(std::move(options));
  job->LogWorkers();
  OPTSTATE_RETURN_IF_ERROR(
      Annotate(job->Adopt(), absl::StrCat("job \"", name, "\"")));
  job->ForgetKept();
  job->StartScrubs();
  return job;
}

}  // namespace optstate::session
