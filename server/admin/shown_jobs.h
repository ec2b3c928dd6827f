#ifndef OPTSTATE_SERVER_ADMIN_SHOWN_JOBS_H_
#define OPTSTATE_SERVER_ADMIN_SHOWN_JOBS_H_

#include <set>
#include <string>
#include <vector>

#include "optstate/v1/admin.pb.h"
#include "server/access/caller.h"

// Keeps private jobs out of what a caller is told. All jobs are asked for
// together (described_jobs.h), so they are left out afterwards.
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

// Returns a list of jobs, and of those whose engines gave no answer.
v1::ListJobsReply ListOf(const std::vector<v1::Job>& jobs);

// Returns the names of those jobs that the caller may look at.
std::set<std::string> JobsShownTo(const access::Caller& caller,
                                  const std::vector<v1::Job>& all);

// Each leaves out what is of other jobs than these. Sums stay as they are.
void ShowJobs(const std::set<std::string>& shown, v1::ListJobsReply* reply);
void ShowJobs(const std::set<std::string>& shown, v1::ListSessionsReply* reply);
void ShowJobs(const std::set<std::string>& shown, v1::ServerStatus* status);
void ShowJobs(const std::set<std::string>& shown,
              v1::DescribeDevicesReply* reply);
void ShowJobs(const std::set<std::string>& shown,
              v1::DescribeTiersReply* reply);

// Leaves private jobs out of a report that everybody may read, and the names of
// jobs that it does not have. What sums are made of stays of a private job: an
// entry without a name among the jobs, with its phase, and one among those
// without an answer.
void LeaveOutPrivateJobs(v1::NodeReport* report);

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_SHOWN_JOBS_H_
