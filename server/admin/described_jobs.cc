#include "server/admin/described_jobs.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/session/job_facts.h"
#include "server/supervisor/sleep/sleep_manifest.h"

namespace optstate::admin {
namespace {

using supervisor::JobSummary;

// Answers of engines that a shared question may wait for, one after the other:
// a status begins after one that is under way, asks for a list, and so does
// that.
constexpr int kSharedRounds = 4;
// The one key of lists.
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
  if (summary.start_disk_bytes != 0) {
    job.mutable_engine_start()->set_disk_bytes(summary.start_disk_bytes);
  }
  if (!summary.access_problem.empty()) {
    job.set_reason(absl::StrCat(job.reason(), job.reason().empty() ? "" : "; ",
                                summary.access_problem));
  }
  return job;
}

}  // namespace

bool DescribedJobs::MayShare(absl::Time deadline) const {
  return deadline >= absl::Now() + kSharedRounds * engine_answer_max_;
}

absl::Time DescribedJobs::EngineDeadline(absl::Time deadline) const {
  return std::min(deadline, absl::Now() + engine_answer_max_);
}

std::shared_ptr<const DescribedJobs::Jobs> DescribedJobs::All(
    absl::Time deadline, absl::Duration age_max) {
  const auto ask = [this, age_max](absl::Time until) -> Jobs {
    return Describe(control_->Jobs(), until, age_max);
  };
  // An answer that may be of some age is not shared: others may want it
  // younger.
  if (age_max > absl::ZeroDuration() || !MayShare(deadline)) {
    return std::make_shared<const Jobs>(ask(deadline));
  }
  return lists_.Get(kAllJobs, [&ask] { return ask(absl::InfiniteFuture()); });
}

absl::StatusOr<v1::Job> DescribedJobs::One(const JobSummary& summary,
                                           absl::Time deadline,
                                           absl::Duration age_max) {
  const std::shared_ptr<const v1::Job> kept = FindKept(summary, age_max);
  if (kept != nullptr) return Merge(summary, *kept);
  const absl::Time asked_at = kept_.Now();
  absl::StatusOr<v1::Job> answer = AskEngine(summary, deadline);
  if (age_max > absl::ZeroDuration() && answer.ok()) {
    kept_.Keep(summary.name, summary.engine_pid, asked_at, *answer);
  }
  return Put(summary, std::move(answer));
}

std::shared_ptr<const v1::Job> DescribedJobs::FindKept(
    const JobSummary& summary, absl::Duration age_max) const {
  if (age_max <= absl::ZeroDuration() || summary.engine_pid == 0) {
    return nullptr;
  }
  return kept_.Find(summary.name, summary.engine_pid, age_max);
}

// Each call that shares an answer has a summary of its own, which no call of
// another can make too old.
absl::StatusOr<v1::Job> DescribedJobs::AskEngine(const JobSummary& summary,
                                                 absl::Time deadline) {
  const std::string& name = summary.name;
  // Nothing is waited for.
  if (summary.engine_pid == 0) {
    return engines_->GetJob(name, EngineDeadline(deadline));
  }
  const auto ask = [this, &name](absl::Time until) {
    return std::move(engines_->AwaitJobs({name}, EngineDeadline(until))[0]);
  };
  if (!MayShare(deadline)) return ask(deadline);
  return *answers_.Get(name, [&ask] { return ask(absl::InfiniteFuture()); });
}

absl::StatusOr<v1::Job> DescribedJobs::Put(const JobSummary& summary,
                                           absl::StatusOr<v1::Job> answer) {
  // The engine may have ended for good meanwhile, and the job with it. Or its
  // name is another user's by now, whose engine has answered: who may look at
  // that job is in its own summary.
  const bool is_of_summary = answer.ok() && answer->uid() == summary.uid;
  if (is_of_summary || summary.engine_pid == 0) {
    return Merge(summary, std::move(answer));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const JobSummary now,
                            control_->FindJob(summary.name));
  return Merge(now, std::move(answer));
}

// Memory use is asked for separately, because it may take too long; then the
// answer lacks it.
absl::StatusOr<v1::Job> DescribedJobs::OneWithMemory(const std::string& name,
                                                     absl::Time deadline) {
  OPTSTATE_ASSIGN_OR_RETURN(const JobSummary summary, control_->FindJob(name));
  OPTSTATE_ASSIGN_OR_RETURN(v1::Job job, One(summary, deadline));
  if (job.ranks_unknown()) return job;
  absl::StatusOr<v1::Job> with_memory =
      engines_->GetJob(name, deadline, /*memory=*/true);
  if (!with_memory.ok()) return job;
  return Put(summary, std::move(with_memory));
}

size_t DescribedJobs::CountWaiting(const std::string& job) const {
  return job.empty() ? lists_.CountWaiting(kAllJobs)
                     : answers_.CountWaiting(job);
}

std::vector<v1::Job> DescribedJobs::Describe(
    const std::vector<JobSummary>& summaries, absl::Time deadline,
    absl::Duration age_max) {
  const absl::Time until = EngineDeadline(deadline);
  const absl::Time asked_at = kept_.Now();
  std::vector<std::shared_ptr<const v1::Job>> kept;
  std::vector<std::string> to_ask;
  for (const JobSummary& summary : summaries) {
    kept.push_back(FindKept(summary, age_max));
    if (summary.engine_pid != 0 && kept.back() == nullptr) {
      to_ask.push_back(summary.name);
    }
  }
  std::vector<absl::StatusOr<v1::Job>> answers =
      engines_->AwaitJobs(to_ask, until);
  std::vector<v1::Job> jobs;
  auto next = answers.begin();
  for (size_t i = 0; i < summaries.size(); ++i) {
    const JobSummary& summary = summaries[i];
    absl::StatusOr<v1::Job> answer;
    if (summary.engine_pid == 0) {
      answer = engines_->GetJob(summary.name, until);
    } else if (kept[i] != nullptr) {
      answer = *kept[i];
    } else {
      answer = std::move(*next++);
      if (age_max > absl::ZeroDuration() && answer.ok()) {
        kept_.Keep(summary.name, summary.engine_pid, asked_at, *answer);
      }
    }
    absl::StatusOr<v1::Job> job = Put(summary, std::move(answer));
    if (job.ok()) jobs.push_back(*std::move(job));
  }
  return jobs;
}

}  // namespace optstate::admin
