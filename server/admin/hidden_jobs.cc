#include "server/admin/hidden_jobs.h"

#include <algorithm>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "server/supervisor/permissions.h"

namespace optstate::admin {
namespace {

constexpr char kKeepsItsEngine[] =
    "a job that you may not look at keeps its engine; operators see why";

// Removes the entries that `is_hidden` holds for.
template <typename Entries, typename Predicate>
void RemoveIf(const Predicate& is_hidden, Entries* entries) {
  entries->erase(std::remove_if(entries->begin(), entries->end(), is_hidden),
                 entries->end());
}

template <typename Entries>
void RemoveNamed(const std::set<std::string>& names, Entries* entries) {
  RemoveIf([&names](const auto& entry) { return names.contains(entry.name()); },
           entries);
}

// As upgrade/engine_replacement.cc writes it: "job NAME: why".
void HideProblems(const std::set<std::string>& hidden,
                  v1::UpgradeProgress* upgrade) {
  for (std::string& problem : *upgrade->mutable_problems()) {
    absl::string_view rest = problem;
    if (!absl::ConsumePrefix(&rest, "job ")) continue;
    const std::string name(rest.substr(0, rest.find(':')));
    if (hidden.contains(name)) problem = kKeepsItsEngine;
  }
}

}  // namespace

std::set<std::string> HiddenJobs(const v1::ListJobsReply& all,
                                 const access::Caller& caller) {
  std::set<std::string> hidden;
  for (const v1::Job& job : all.jobs()) {
    if (!supervisor::MayLook(job.uid(), job.access(), caller)) {
      hidden.insert(job.name());
    }
  }
  return hidden;
}

void HideJobs(const std::set<std::string>& hidden, v1::ListJobsReply* reply) {
  if (hidden.empty()) return;
  RemoveNamed(hidden, reply->mutable_jobs());
  RemoveNamed(hidden, reply->mutable_unanswered());
}

void HideJobs(const std::set<std::string>& hidden, v1::ServerStatus* status) {
  if (hidden.empty()) return;
  RemoveNamed(hidden, status->mutable_unanswered());
  if (status->has_upgrade()) HideProblems(hidden, status->mutable_upgrade());
}

void HideJobs(const std::set<std::string>& hidden,
              v1::DescribeDevicesReply* reply) {
  if (hidden.empty()) return;
  RemoveNamed(hidden, reply->mutable_unanswered());
  for (v1::DeviceReport& device : *reply->mutable_devices()) {
    RemoveIf([&hidden](
                 const v1::DeviceJob& job) { return hidden.contains(job.job()); },
             device.mutable_jobs());
  }
}

void ShowJobs(const std::set<std::string>& shown,
              v1::DescribeTiersReply* reply) {
  const auto is_other = [&shown](const v1::TierJob& job) {
    return !shown.contains(job.job());
  };
  RemoveIf(is_other, reply->mutable_memory()->mutable_jobs());
  for (v1::DirectoryTier& directory : *reply->mutable_directories()) {
    RemoveIf(is_other, directory.mutable_jobs());
  }
}

void LeaveOutNames(v1::NodeReport* report) {
  std::set<std::string> hidden;
  std::set<std::string> shown;
  for (v1::Job& job : *report->mutable_jobs()) {
    if (!job.access().is_private()) {
      shown.insert(job.name());
      continue;
    }
    hidden.insert(job.name());
    v1::Job nameless;
    nameless.set_phase(job.phase());
    nameless.mutable_access()->set_is_private(true);
    job = nameless;
  }
  for (auto& unanswered : *report->mutable_status()->mutable_unanswered()) {
    if (hidden.contains(unanswered.name())) unanswered.Clear();
  }
  if (report->status().has_upgrade()) {
    HideProblems(hidden, report->mutable_status()->mutable_upgrade());
  }
  HideJobs(hidden, report->mutable_devices());
  ShowJobs(shown, report->mutable_tiers());
}

}  // namespace optstate::admin
