#ifndef OPTSTATE_SERVER_ADMIN_HIDDEN_JOBS_H_
#define OPTSTATE_SERVER_ADMIN_HIDDEN_JOBS_H_

#include <set>
#include <string>

#include "optstate/v1/admin.pb.h"
#include "server/access/caller.h"

// Keeps private jobs out of what a caller is told. The jobs are all asked for
// together (shared_listing.h), so they are left out afterwards.
namespace optstate::admin {

// Adds the jobs whose engines gave no answer.
template <typename Jobs>
void AddUnanswered(const Jobs& jobs,
                   google::protobuf::RepeatedPtrField<v1::UnansweredJob>* to) {
  for (const v1::Job& job : jobs) {
    if (!job.ranks_unknown()) continue;
    v1::UnansweredJob* unanswered = to->Add();
    unanswered->set_name(job.name());
    unanswered->set_reason(job.reason());
  }
}

// Returns the names of those jobs of a list of all that the caller may not look
// at.
std::set<std::string> HiddenJobs(const v1::ListJobsReply& all,
                                 const access::Caller& caller);

// Leave out what is of these jobs alone. Sums stay, and so does the number of
// an upgrade's problems.
void HideJobs(const std::set<std::string>& hidden, v1::ListJobsReply* reply);
void HideJobs(const std::set<std::string>& hidden, v1::ServerStatus* status);
void HideJobs(const std::set<std::string>& hidden,
              v1::DescribeDevicesReply* reply);
// Leaves out what is of other jobs than these.
void ShowJobs(const std::set<std::string>& shown,
              v1::DescribeTiersReply* reply);

// Leaves private jobs out of a report for everybody, and folders on disks of
// jobs that it does not have. What its sums need of a private job stays, an
// entry without a name among the jobs (its phase) and among those without an
// answer.
void LeaveOutNames(v1::NodeReport* report);

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_HIDDEN_JOBS_H_
