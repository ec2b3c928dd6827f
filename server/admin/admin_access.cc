// The part of the Admin service that finds the jobs that a caller may look at,
// and describes what jobs share.

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"
#include "server/admin/admin_service.h"
#include "server/admin/described_jobs.h"
#include "server/admin/device_report.h"
#include "server/admin/shown_jobs.h"
#include "server/admin/tier_report.h"
#include "server/supervisor/permissions.h"

namespace optstate::admin {

using supervisor::JobSummary;

absl::StatusOr<JobSummary> AdminService::FindToLook(
    const std::string& name, const access::Caller& caller) {
  OPTSTATE_ASSIGN_OR_RETURN(JobSummary summary, control_->FindJob(name));
  OPTSTATE_RETURN_IF_ERROR(
      supervisor::CheckMayLook(name, summary.uid, summary.access, caller));
  return summary;
}

// The supervisor has all that this takes, so it needs no engine.
absl::Status AdminService::SetAccess(const v1::SetJobRequest& request,
                                     const access::Caller& caller) {
  OPTSTATE_RETURN_IF_ERROR(accept::CheckJobName(request.name()));
  v1::SetJobRequest others = request;
  others.clear_name();
  others.clear_access();
  others.clear_access_before();
  if (others.ByteSizeLong() == 0) {
    return control_->SetAccess(
        request.name(), request.access(),
        request.has_access_before() ? &request.access_before() : nullptr,
        caller);
  }
  OPTSTATE_RETURN_IF_ERROR(FindToLook(request.name(), caller).status());
  return absl::InvalidArgumentError(
      "who may use a job (group, private, readers) is set alone, without other "
      "settings");
}

absl::StatusOr<v1::DescribeTiersReply> AdminService::DescribeTiers(
    const v1::DescribeTiersRequest& request, const access::Caller& caller) {
  if (request.measure()) {
    OPTSTATE_RETURN_IF_ERROR(supervisor::CheckOperator(caller));
  }
  const std::vector<JobSummary> jobs = control_->Jobs();
  v1::DescribeTiersReply reply =
      admin::DescribeTiers(info_.config, jobs, request);
  // A disk may have folders of jobs that this daemon does not have.
  if (!supervisor::CheckOperator(caller).ok()) {
    std::set<std::string> shown;
    for (const JobSummary& job : jobs) {
      if (supervisor::MayLook(job.uid, job.access, caller)) {
        shown.insert(job.name);
      }
    }
    ShowJobs(shown, &reply);
  }
  return reply;
}

v1::DescribeDevicesReply AdminService::DescribeDevices(
    const access::Caller& caller, absl::Time deadline) {
  const std::shared_ptr<const DescribedJobs::Jobs> jobs =
      described_.All(deadline);
  v1::DescribeDevicesReply reply =
      admin::DescribeDevices(info_.config.devices(), ListOf(**jobs));
  ShowJobs(JobsShownTo(caller, **jobs), &reply);
  return reply;
}

v1::NodeReport AdminService::DescribeNode(absl::Time deadline) {
  const std::shared_ptr<const DescribedJobs::Jobs> jobs =
      described_.All(deadline);
  v1::ListJobsReply list = ListOf(**jobs);
  v1::NodeReport report;
  *report.mutable_status() = StatusOf(**jobs);
  *report.mutable_tiers() =
      admin::DescribeTiers(info_.config, control_->Jobs(), {});
  *report.mutable_devices() =
      admin::DescribeDevices(info_.config.devices(), list);
  report.mutable_jobs()->Swap(list.mutable_jobs());
  LeaveOutPrivateJobs(&report);
  return report;
}

}  // namespace optstate::admin
