// The calls of the Admin service that delete jobs.

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"
#include "server/admin/admin_service.h"
#include "server/supervisor/job_deletion.h"

namespace optstate::admin {
namespace {

// Interval between two reports.
constexpr absl::Duration kReportInterval = absl::Milliseconds(250);

}  // namespace

absl::Status AdminService::HoldToDelete(const std::string& name, bool force,
                                        const access::Caller& caller,
                                        absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(accept::CheckJobName(name));
  OPTSTATE_RETURN_IF_ERROR(control_->HoldJob(name, caller));
  if (force) return absl::OkStatus();
  absl::Status status =
      CheckNoSessions(name, deadline, "end them first, or force the deletion");
  if (!status.ok()) control_->ReleaseJob(name);
  return status;
}

absl::Status AdminService::DeleteJob(const std::string& name, bool force,
                                     const access::Caller& caller,
                                     absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(HoldToDelete(name, force, caller, deadline));
  return control_->DeleteHeldJob(name, deadline);
}

absl::Status AdminService::DeleteJobWatched(
    const std::string& name, bool force, const access::Caller& caller,
    absl::Time deadline,
    absl::FunctionRef<bool(const v1::DeleteProgress&)> pass) {
  OPTSTATE_RETURN_IF_ERROR(HoldToDelete(name, force, caller, deadline));
  const std::shared_ptr<supervisor::JobDeletion> deletion =
      control_->BeginDeletion(name);
  while (true) {
    const bool ended = deletion->AwaitEnd(absl::Now() + kReportInterval);
    if (ended && !deletion->status().ok()) return deletion->status();
    if (!pass(deletion->progress())) {
      return absl::CancelledError(absl::StrCat("the caller has gone; job \"",
                                               name, "\" is being deleted"));
    }
    if (ended) return absl::OkStatus();
  }
}

absl::Status AdminService::CheckNoSessions(const std::string& name,
                                           absl::Time deadline,
                                           absl::string_view advice) {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::Job job, DescribeOne(name, deadline));
  // Without an engine there is no session.
  if (job.engine_pid() == 0) return absl::OkStatus();
  if (job.session_count() != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("job \"", name, "\" has ", job.session_count(),
                     " ranks attached: ", advice));
  }
  if (!job.ranks_unknown()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the engine of job \"", name,
                   "\" does not say whether ranks are attached (", job.reason(),
                   "): try again; if there are some, ", advice));
}

}  // namespace optstate::admin
