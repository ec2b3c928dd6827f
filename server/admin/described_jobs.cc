#include "server/admin/described_jobs.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/session/job_facts.h"
#include "server/supervisor/permissions.h"
#include "server/supervisor/sleep/sleep_manifest.h"

namespace optstate::admin {
namespace {

using supervisor::JobSummary;

// Answers of engines that a shared question may wait for, one after the other:
// a status begins after one that is under way, asks for a list, and so does
// that.
constexpr int kSharedRounds = 4;
// No job has this key, which is that of all jobs.
constexpr char kAllJobs[] = "";

// Describes a job whose engine gave no answer, because of `why`.
v1::Job DescribeWithoutEngine(const JobSummary& summary,
                              const absl::Status& why) {
  v1::Job job;
  if (summary.sleep.has_value() && !summary.sleep->directory().empty()) {
    session::AddFromFiles(summary.sleep->directory() + supervisor::kFilesFolder,
                          &job);
    job.set_phase(v1::JOB_PHASE_ASLEEP);
    job.set_state_bytes(0);  // in memory
    return job;
  }
  session::AddFromFiles(summary.directory, &job);
  // Without an engine no rank is attached.
  job.set_ranks_unknown(summary.engine_pid != 0);
  if (summary.failed) {
    job.set_phase(v1::JOB_PHASE_FAILED);
    return job;
  }
  job.set_reason(std::string(why.message()));
  // The reason concerns the previous engine, while no engine has become ready
  // since.
  if (!summary.reason.empty()) {
    job.set_reason(absl::StrCat(job.reason(), ": ", summary.reason));
  }
  return job;
}

v1::Job Merge(const JobSummary& summary, absl::StatusOr<v1::Job> described) {
  v1::Job job;
  if (described.ok()) {
    job = *std::move(described);
    // An engine that could not open the files knows less than the files say.
    if (job.phase() == v1::JOB_PHASE_FAILED && job.parameter_count() == 0) {
      session::AddFromFiles(summary.directory, &job);
    }
  } else {
    job = DescribeWithoutEngine(summary, described.status());
  }
  if (job.reason().empty()) job.set_reason(summary.reason);
  // These fields are the supervisor's.
  job.set_name(summary.name);
  job.set_uid(summary.uid);
  job.set_engine_pid(summary.engine_pid);
  job.set_engine_restarts(summary.restarts);
  job.set_state_dir(summary.directory);
  if (summary.sleep.has_value()) *job.mutable_sleep() = *summary.sleep;
  *job.mutable_access() = summary.access;
  if (!summary.access_problem.empty()) {
    job.set_reason(absl::StrCat(job.reason(), job.reason().empty() ? "" : "; ",
                                summary.access_problem));
  }
  return job;
}

// Returns the key of one job, also of one without a name.
std::string KeyOf(const std::string& name) {
  return absl::StrCat("job ", name);
}

}  // namespace

bool DescribedJobs::MayShare(absl::Time deadline) const {
  return deadline >= absl::Now() + kSharedRounds * engine_answer_max_;
}

std::shared_ptr<const DescribedJobs::Jobs> DescribedJobs::Share(
    const std::string& key, absl::Time deadline,
    absl::FunctionRef<Jobs(absl::Time)> ask) {
  if (!MayShare(deadline)) return std::make_shared<const Jobs>(ask(deadline));
  return answers_.Get(key, [ask] { return ask(absl::InfiniteFuture()); });
}

std::shared_ptr<const DescribedJobs::Jobs> DescribedJobs::All(
    absl::Time deadline) {
  return Share(kAllJobs, deadline, [this](absl::Time until) -> Jobs {
    return Describe(control_->Jobs(), until);
  });
}

std::shared_ptr<const DescribedJobs::Jobs> DescribedJobs::One(
    const std::string& name, absl::Time deadline) {
  return Share(KeyOf(name), deadline, [this, &name](absl::Time until) -> Jobs {
    OPTSTATE_ASSIGN_OR_RETURN(const JobSummary summary,
                              control_->FindJob(name));
    std::vector<v1::Job> jobs = Describe({summary}, until);
    if (jobs.empty()) return supervisor::NoJob(name);
    return jobs;
  });
}

// Memory use is asked for separately, because it may take too long; then the
// answer lacks it.
absl::StatusOr<v1::Job> DescribedJobs::OneWithMemory(const std::string& name,
                                                     absl::Time deadline) {
  OPTSTATE_ASSIGN_OR_RETURN(const JobSummary summary, control_->FindJob(name));
  std::vector<v1::Job> described = Describe({summary}, deadline);
  if (described.empty()) return supervisor::NoJob(name);
  v1::Job job = std::move(described[0]);
  if (job.ranks_unknown()) return job;
  absl::StatusOr<v1::Job> with_memory =
      engines_->GetJob(name, deadline, /*memory=*/true);
  if (!with_memory.ok()) return job;
  return Merge(summary, std::move(with_memory));
}

size_t DescribedJobs::CountWaiting(const std::string& job) const {
  return answers_.CountWaiting(job.empty() ? kAllJobs : KeyOf(job));
}

std::vector<v1::Job> DescribedJobs::Describe(
    const std::vector<JobSummary>& summaries, absl::Time deadline) {
  const absl::Time until = std::min(deadline, absl::Now() + engine_answer_max_);
  std::vector<std::string> with_engine;
  for (const JobSummary& summary : summaries) {
    if (summary.engine_pid != 0) with_engine.push_back(summary.name);
  }
  std::vector<absl::StatusOr<v1::Job>> described =
      engines_->AwaitJobs(with_engine, until);
  std::vector<v1::Job> jobs;
  auto next = described.begin();
  for (const JobSummary& summary : summaries) {
    if (summary.engine_pid == 0) {
      jobs.push_back(Merge(summary, engines_->GetJob(summary.name, until)));
      continue;
    }
    absl::StatusOr<v1::Job> one = std::move(*next++);
    JobSummary now = summary;
    // The engine may have ended for good meanwhile, and the job with it.
    if (!one.ok()) {
      absl::StatusOr<JobSummary> found = control_->FindJob(summary.name);
      if (!found.ok()) continue;
      now = *std::move(found);
    }
    jobs.push_back(Merge(now, std::move(one)));
  }
  return jobs;
}

}  // namespace optstate::admin
