#include "server/admin/shown_jobs.h"

#include <algorithm>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "server/supervisor/permissions.h"

namespace optstate::admin {
namespace {

constexpr char kHiddenProblem[] =
    "a job that is not shown here keeps its engine; operators see why";

template <typename Entries, typename Predicate>
void RemoveIf(const Predicate& is_hidden, Entries* entries) {
  entries->erase(std::remove_if(entries->begin(), entries->end(), is_hidden),
                 entries->end());
}

// Leaves out entries with a field `name`.
template <typename Entries>
void ShowNamed(const std::set<std::string>& shown, Entries* entries) {
  RemoveIf(
      [&shown](const auto& entry) { return !shown.contains(entry.name()); },
      entries);
}

// Leaves out entries with a field `job`.
template <typename Entries>
void ShowOfJobs(const std::set<std::string>& shown, Entries* entries) {
  RemoveIf([&shown](const auto& entry) { return !shown.contains(entry.job()); },
           entries);
}

// A problem is "job NAME: why", as upgrade/engine_replacement.cc writes it.
void ShowProblems(const std::set<std::string>& shown,
                  v1::UpgradeProgress* upgrade) {
  for (std::string& problem : *upgrade->mutable_problems()) {
    absl::string_view rest = problem;
    if (!absl::ConsumePrefix(&rest, "job ")) continue;
    const std::string name(rest.substr(0, rest.find(':')));
    if (!shown.contains(name)) problem = kHiddenProblem;
  }
}

}  // namespace

v1::ListJobsReply ListOf(const std::vector<v1::Job>& jobs) {
  v1::ListJobsReply reply;
  AddUnanswered(jobs, reply.mutable_unanswered());
  for (const v1::Job& job : jobs) *reply.add_jobs() = job;
  return reply;
}

std::set<std::string> JobsShownTo(const access::Caller& caller,
                                  const std::vector<v1::Job>& all) {
  std::set<std::string> shown;
  for (const v1::Job& job : all) {
    if (supervisor::MayLook(job.uid(), job.access(), caller)) {
      shown.insert(job.name());
    }
  }
  return shown;
}

void ShowJobs(const std::set<std::string>& shown, v1::ListJobsReply* reply) {
  ShowNamed(shown, reply->mutable_jobs());
  ShowNamed(shown, reply->mutable_unanswered());
}

void ShowJobs(const std::set<std::string>& shown,
              v1::ListSessionsReply* reply) {
  ShowOfJobs(shown, reply->mutable_sessions());
  ShowNamed(shown, reply->mutable_unanswered());
}

void ShowJobs(const std::set<std::string>& shown, v1::ServerStatus* status) {
  ShowNamed(shown, status->mutable_unanswered());
  if (status->has_upgrade()) ShowProblems(shown, status->mutable_upgrade());
}

void ShowJobs(const std::set<std::string>& shown,
              v1::DescribeDevicesReply* reply) {
  ShowNamed(shown, reply->mutable_unanswered());
  for (v1::DeviceReport& device : *reply->mutable_devices()) {
    ShowOfJobs(shown, device.mutable_jobs());
  }
}

void ShowJobs(const std::set<std::string>& shown,
              v1::DescribeTiersReply* reply) {
  ShowOfJobs(shown, reply->mutable_memory()->mutable_jobs());
  for (v1::DirectoryTier& directory : *reply->mutable_directories()) {
    ShowOfJobs(shown, directory.mutable_jobs());
  }
}

void LeaveOutPrivateJobs(v1::NodeReport* report) {
  std::set<std::string> shown;
  for (v1::Job& job : *report->mutable_jobs()) {
    if (!job.access().is_private()) {
      shown.insert(job.name());
      continue;
    }
    v1::Job nameless;
    nameless.set_phase(job.phase());
    nameless.mutable_access()->set_is_private(true);
    job = nameless;
  }
  v1::ServerStatus& status = *report->mutable_status();
  for (v1::UnansweredJob& job : *status.mutable_unanswered()) {
    if (!shown.contains(job.name())) job.Clear();
  }
  if (status.has_upgrade()) ShowProblems(shown, status.mutable_upgrade());
  ShowJobs(shown, report->mutable_devices());
  ShowJobs(shown, report->mutable_tiers());
}

}  // namespace optstate::admin
