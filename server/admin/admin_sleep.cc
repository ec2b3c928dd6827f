// The calls of the Admin service that put jobs to sleep and wake them.

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"
#include "server/admin/admin_service.h"

namespace optstate::admin {
namespace {

using supervisor::SleepOperation;

// Interval between two reports.
constexpr absl::Duration kReportInterval = absl::Milliseconds(250);
// Ranks that an error names.
constexpr int kRanksNamedMax = 8;

std::string RanksOf(const v1::Job& job) {
  std::string text;
  for (int i = 0; i < job.sessions_size() && i < kRanksNamedMax; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", job.sessions(i).rank(), " (pid ",
                    job.sessions(i).pid(), ")");
  }
  if (job.sessions_size() > kRanksNamedMax) absl::StrAppend(&text, ", ...");
  return text;
}

// Returns why the described job cannot be put to sleep; empty: it can.
std::string WhyNotToSleep(const v1::Job& job) {
  if (job.engine_pid() == 0) {
    return absl::StrCat("it has no engine just now",
                        job.reason().empty() ? "" : ": ", job.reason());
  }
  if (job.ranks_unknown()) {
    return absl::StrCat("its engine does not say how it is: ", job.reason());
  }
  if (job.session_count() != 0) {
    return absl::StrCat(job.session_count(),
                        " ranks are attached: ", RanksOf(job),
                        ". End them first");
  }
  switch (job.phase()) {
    case v1::JOB_PHASE_READY:
      break;
    case v1::JOB_PHASE_EMPTY:
      return "it has no state yet";
    case v1::JOB_PHASE_LOADING:
      return "its ranks have not loaded it yet";
    case v1::JOB_PHASE_FAILED:
      return absl::StrCat("it is FAILED: ", job.reason());
    case v1::JOB_PHASE_RECOVERING:
      return absl::StrCat("a step is to be finished: ", job.open_step());
    default:
      return "its phase is not known";
  }
  if (!job.open_step().empty()) {
    return absl::StrCat("a step is open: ", job.open_step());
  }
  if (!job.open_load().empty()) {
    return absl::StrCat("a load is open: ", job.open_load());
  }
  return "";
}

absl::Status Follow(const std::string& name, SleepOperation* operation,
                    absl::FunctionRef<bool(const v1::SleepProgress&)> pass) {
  while (true) {
    const bool ended = operation->AwaitEnd(absl::Now() + kReportInterval);
    if (ended && !operation->status().ok()) return operation->status();
    if (!pass(operation->progress())) {
      return absl::CancelledError(
          absl::StrCat("the caller has gone; ", operation->Describe(name)));
    }
    if (ended) return absl::OkStatus();
  }
}

}  // namespace

absl::StatusOr<pid_t> AdminService::CheckCanSleep(const std::string& name,
                                                  absl::Time deadline) {
  OPTSTATE_ASSIGN_OR_RETURN(const supervisor::JobSummary summary,
                            control_->FindJob(name));
  if (summary.sleep.has_value()) {
    return absl::FailedPreconditionError(summary.reason);
  }
  OPTSTATE_ASSIGN_OR_RETURN(const v1::Job job, DescribeOne(name, deadline));
  const std::string why_not = WhyNotToSleep(job);
  if (why_not.empty()) return static_cast<pid_t>(job.engine_pid());
  return absl::FailedPreconditionError(
      absl::StrCat("job \"", name, "\" cannot be put to sleep: ", why_not));
}

absl::Status AdminService::SleepJob(
    const std::string& name, const access::Caller& caller, absl::Time deadline,
    absl::FunctionRef<bool(const v1::SleepProgress&)> pass) {
  OPTSTATE_RETURN_IF_ERROR(accept::CheckJobName(name));
  OPTSTATE_RETURN_IF_ERROR(control_->HoldJob(name, caller));
  // No rank can attach while the job is held.
  absl::StatusOr<std::shared_ptr<SleepOperation>> operation;
  const absl::StatusOr<pid_t> engine = CheckCanSleep(name, deadline);
  if (engine.ok()) {
    operation = control_->PutToSleep(name, *engine);
  } else {
    operation = engine.status();
  }
  if (!operation.ok()) {
    control_->ReleaseJob(name);
    return operation.status();
  }
  return Follow(name, operation->get(), pass);
}

absl::Status AdminService::WakeJob(
    const std::string& name, const access::Caller& caller,
    absl::FunctionRef<bool(const v1::SleepProgress&)> pass) {
  OPTSTATE_RETURN_IF_ERROR(accept::CheckJobName(name));
  OPTSTATE_ASSIGN_OR_RETURN(const std::shared_ptr<SleepOperation> operation,
                            control_->WakeJob(name, caller));
  return Follow(name, operation.get(), pass);
}

}  // namespace optstate::admin
