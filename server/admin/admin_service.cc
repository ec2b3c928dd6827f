#include "server/admin/admin_service.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/shm/frame.h"
#include "proto/types/status_macros.h"
#include "proto/types/version.h"
#include "server/accept/hello_check.h"
#include "server/admin/shown_jobs.h"
#include "server/observe/node_event.h"
#include "server/session/admission.h"
#include "server/supervisor/job_events.h"
#include "server/supervisor/permissions.h"

namespace optstate::admin {
namespace {

using supervisor::JobSummary;

constexpr absl::Duration kDrainTimeout = absl::Seconds(30);

void AddSessions(const std::vector<v1::Job>& jobs, v1::ListSessionsReply* to) {
  AddUnanswered(jobs, to->mutable_unanswered());
  for (const v1::Job& job : jobs) {
    for (const v1::SessionInfo& session : job.sessions()) {
      v1::SessionInfo* const added = to->add_sessions();
      *added = session;
      added->set_job(job.name());
    }
  }
}

// The reasons of jobs on one node differ in little: the first is told.
void AddLocked(const v1::MemoryLock& of_job, v1::MemoryLock* all) {
  all->set_locked_bytes(all->locked_bytes() + of_job.locked_bytes());
  all->set_pending_bytes(all->pending_bytes() + of_job.pending_bytes());
  all->set_unlocked_bytes(all->unlocked_bytes() + of_job.unlocked_bytes());
  if (all->reason().empty()) all->set_reason(of_job.reason());
}

supervisor::JobEvents EventsOf(const JobSummary& summary) {
  return supervisor::JobEvents(summary.name, summary.uid);
}

// Returns what the request sets, as text.
std::string SettingsIn(v1::SetJobRequest request) {
  request.clear_name();
  return request.ShortDebugString();
}

absl::Status TooOld(const std::string& name, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(
      "the engine of job \"", name, "\" is of an older build, which cannot ",
      what, ": `optctl upgrade` puts this one in its place"));
}

// Returns FAILED_PRECONDITION for a job whose engine cannot be asked, because
// the job is asleep or on its way.
absl::Status CheckAwake(const JobSummary& summary) {
  if (!summary.sleep.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(summary.sleep->progress().empty()
                                           ? summary.reason
                                           : summary.sleep->progress());
}

// A job that is well must not be stopped for a step that is not there.
absl::Status CheckHasDurableStep(const std::string& name, const v1::Job& job) {
  if (job.disk().durable_step() > 0 || job.disk().commits() > 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", name,
      "\" has no durable step to go back to, and goes on as it is: it has no "
      "durability, or its first durable step is to come (`optctl describe job ",
      name, "`)"));
}

std::string HostName() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

// The least timeout of a drain: also one that does not wait has to reach the
// engines.
constexpr absl::Duration kDrainTimeoutMin = absl::Milliseconds(100);

// Error texts when an engine did not answer, or not in time: the request is in
// force all the same.
constexpr absl::string_view kDrainingText =
    "draining stays in force, also when the daemon is restarted, until `optctl "
    "drain --resume`: new steps and sessions are refused. Not drained yet: ";
constexpr absl::string_view kResumedText =
    "draining has ended: new steps and sessions are taken again. Who has not "
    "confirmed it takes them as soon as it goes on: ";

absl::StatusOr<absl::Duration> TimeoutOf(const v1::DrainRequest& request) {
  if (!request.has_timeout()) return kDrainTimeout;
  const google::protobuf::Duration& timeout = request.timeout();
  constexpr int64_t kSecondsMax = 315'576'000'000;  // by duration.proto
  if (timeout.seconds() < 0 || timeout.seconds() > kSecondsMax ||
      timeout.nanos() < 0 || timeout.nanos() > 999'999'999) {
    return absl::InvalidArgumentError(absl::StrCat(
        "timeout {", timeout.ShortDebugString(), "} is negative or invalid"));
  }
  return std::max(kDrainTimeoutMin, absl::Seconds(timeout.seconds()) +
                                        absl::Nanoseconds(timeout.nanos()));
}

}  // namespace

AdminService::AdminService(supervisor::SupervisorControl* control,
                           EngineChannels* engines, UpgradeControl* upgrade,
                           ServerInfo info, absl::Duration engine_answer_max,
                           KeptAnswers::Clock clock)
    : control_(control),
      engines_(engines),
      upgrade_(upgrade),
      info_(std::move(info)),
      engine_answer_max_(engine_answer_max),
      quotas_(info_.config),
      described_(control, engines, engine_answer_max, std::move(clock)) {}

v1::ServerStatus AdminService::GetStatus(const access::Caller& caller,
                                         absl::Time deadline,
                                         absl::Duration age_max) {
  const auto sum_up = [this, age_max](absl::Time until) {
    std::shared_ptr<const DescribedJobs::Jobs> jobs =
        described_.All(until, age_max);
    v1::ServerStatus status = StatusOf(**jobs);
    return StatusOfAll{std::move(jobs), std::move(status)};
  };
  // The system is asked what is left, so that a status is shared as well.
  const std::shared_ptr<const StatusOfAll> all =
      age_max == absl::ZeroDuration() && described_.MayShare(deadline)
          ? statuses_.Get("", [&] { return sum_up(absl::InfiniteFuture()); })
          : std::make_shared<const StatusOfAll>(sum_up(deadline));
  v1::ServerStatus status = all->status;
  // The problems of an upgrade may name jobs that have ended.
  if (!supervisor::CheckOperator(caller).ok()) {
    ShowJobs(JobsShownTo(caller, **all->jobs), &status);
  }
  return status;
}

v1::ServerStatus AdminService::StatusOf(
    const std::vector<v1::Job>& jobs) const {
  v1::ServerStatus status;
  status.set_version(std::string(kVersion));
  status.set_protocol_version(shm::kProtocolVersion);
  status.set_pid(::getpid());
  const int64_t started_ns = absl::ToUnixNanos(info_.started_at);
  status.mutable_started_at()->set_seconds(started_ns / 1000000000);
  status.mutable_started_at()->set_nanos(
      static_cast<int32_t>(started_ns % 1000000000));
  status.set_state_dir(info_.state_dir);
  status.set_socket(info_.socket);
  *status.mutable_listen() = {info_.listen.begin(), info_.listen.end()};
  status.set_draining(control_->draining());
  status.set_job_count(static_cast<uint32_t>(jobs.size()));
  for (const v1::Job& job : jobs) {
    status.set_session_count(status.session_count() + job.session_count());
    status.set_state_bytes(status.state_bytes() + job.state_bytes());
    if (job.has_memory_lock()) {
      AddLocked(job.memory_lock(), status.mutable_memory_lock());
    }
  }
  AddUnanswered(jobs, status.mutable_unanswered());
  const absl::StatusOr<uint64_t> left =
      session::StateBytesLeft(info_.state_dir, info_.config.limits());
  if (left.ok()) {
    status.set_state_bytes_available(*left);
  } else {
    status.set_state_bytes_problem(std::string(left.status().message()));
  }
  status.set_huge_pages(info_.huge_pages);
  status.set_instruction_set(info_.instruction_set);
  status.set_workers(info_.workers);
  status.set_host(HostName());
  v1::UpgradeProgress upgrade = upgrade_->upgrade_progress();
  if (!upgrade.id().empty()) *status.mutable_upgrade() = std::move(upgrade);
  return status;
}

absl::Time AdminService::EngineDeadline(absl::Time deadline) const {
  return std::min(deadline, absl::Now() + engine_answer_max_);
}

v1::ListJobsReply AdminService::ListJobs(const access::Caller& caller,
                                         absl::Time deadline,
                                         absl::Duration age_max) {
  const std::shared_ptr<const DescribedJobs::Jobs> jobs =
      described_.All(deadline, age_max);
  v1::ListJobsReply reply = ListOf(**jobs);
  ShowJobs(JobsShownTo(caller, **jobs), &reply);
  return reply;
}

absl::StatusOr<v1::Job> AdminService::GetJob(const std::string& name,
                                             const access::Caller& caller,
                                             absl::Time deadline, bool memory,
                                             absl::Duration age_max) {
  // No engine is asked for one who may not look.
  OPTSTATE_ASSIGN_OR_RETURN(const JobSummary summary, FindToLook(name, caller));
  absl::StatusOr<v1::Job> job =
      memory ? described_.OneWithMemory(name, deadline)
             : described_.One(summary, deadline, age_max);
  if (!job.ok()) return job;
  // Another job may have taken the name meanwhile.
  OPTSTATE_RETURN_IF_ERROR(
      supervisor::CheckMayLook(name, job->uid(), job->access(), caller));
  return job;
}

absl::StatusOr<v1::Job> AdminService::DescribeOne(const std::string& name,
                                                  absl::Time deadline) {
  OPTSTATE_ASSIGN_OR_RETURN(const JobSummary summary, control_->FindJob(name));
  return described_.One(summary, deadline);
}

absl::StatusOr<v1::ListSessionsReply> AdminService::ListSessions(
    const std::string& job, const access::Caller& caller, absl::Time deadline,
    absl::Duration age_max) {
  v1::ListSessionsReply reply;
  if (!job.empty()) {
    OPTSTATE_ASSIGN_OR_RETURN(
        const v1::Job one,
        GetJob(job, caller, deadline, /*memory=*/false, age_max));
    AddSessions({one}, &reply);
    return reply;
  }
  const std::shared_ptr<const DescribedJobs::Jobs> jobs =
      described_.All(deadline, age_max);
  AddSessions(**jobs, &reply);
  ShowJobs(JobsShownTo(caller, **jobs), &reply);
  return reply;
}

absl::StatusOr<v1::ListParametersReply> AdminService::ListParameters(
    const v1::ListParametersRequest& request, const access::Caller& caller,
    absl::Time deadline) {
  const EngineChannels::Engine engine = engines_->Take(request.job());
  OPTSTATE_ASSIGN_OR_RETURN(const JobSummary summary,
                            FindToLook(request.job(), caller));
  OPTSTATE_RETURN_IF_ERROR(CheckAwake(summary));
  return engines_->ListParameters(engine, request, EngineDeadline(deadline));
}

absl::Status AdminService::RecoverJob(const std::string& name,
                                      const access::Caller& caller,
                                      bool to_durable, absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(accept::CheckJobName(name));
  // No engine is asked for one who may not look.
  OPTSTATE_RETURN_IF_ERROR(FindToLook(name, caller).status());
  const absl::StatusOr<v1::Job> job =
      engines_->GetJob(name, EngineDeadline(deadline));
  const pid_t engine = job.ok() ? static_cast<pid_t>(job->engine_pid()) : 0;
  const bool has_failed = job.ok() && job->phase() == v1::JOB_PHASE_FAILED;
  if (to_durable && engine != 0 && !has_failed) {
    OPTSTATE_RETURN_IF_ERROR(CheckHasDurableStep(name, *job));
    return GoBackToDurable(name, caller, engine, deadline);
  }
  return control_->RecoverJob(name, caller, has_failed ? engine : 0,
                              to_durable);
}

absl::Status AdminService::GoBackToDurable(const std::string& name,
                                           const access::Caller& caller,
                                           pid_t engine, absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(control_->HoldJob(name, caller));
  absl::Status status = CheckNoSessions(name, deadline, "end them first");
  if (status.ok()) {
    status = control_->RecoverJob(name, caller, engine, /*to_durable=*/true);
  }
  control_->ReleaseJob(name);
  return status;
}

absl::StatusOr<v1::SetJobReply> AdminService::SetJob(
    const v1::SetJobRequest& request, const access::Caller& caller,
    absl::Time deadline) {
  if (request.has_access()) {
    OPTSTATE_RETURN_IF_ERROR(SetAccess(request, caller));
    return v1::SetJobReply();
  }
  if (request.has_access_before()) {
    return absl::InvalidArgumentError("access_before is set without access");
  }
  const EngineChannels::Engine engine = engines_->Take(request.name());
  OPTSTATE_ASSIGN_OR_RETURN(const JobSummary summary,
                            FindToChange(request.name(), caller));
  absl::StatusOr<v1::SetJobReply> set =
      engines_->SetJob(engine, request, deadline);
  if (absl::IsUnimplemented(set.status())) {
    return TooOld(request.name(), "change settings");
  }
  if (set.ok())
    EventsOf(summary).SettingsChanged(caller.name(), SettingsIn(request));
  return set;
}

absl::StatusOr<JobSummary> AdminService::FindToChange(
    const std::string& name, const access::Caller& caller) {
  OPTSTATE_RETURN_IF_ERROR(accept::CheckJobName(name));
  OPTSTATE_ASSIGN_OR_RETURN(JobSummary summary, control_->FindJob(name));
  OPTSTATE_RETURN_IF_ERROR(
      supervisor::CheckMayChangeJob(name, summary.uid, summary.access, caller));
  OPTSTATE_RETURN_IF_ERROR(CheckAwake(summary));
  return summary;
}

absl::Status AdminService::VerifyJob(
    const std::string& name, const access::Caller& caller,
    const grpc::ServerContext* call,
    absl::FunctionRef<bool(const v1::VerifyJobProgress&)> pass) {
  const EngineChannels::Engine engine = engines_->Take(name);
  OPTSTATE_ASSIGN_OR_RETURN(const JobSummary summary,
                            FindToChange(name, caller));
  uint64_t damaged = 0;
  absl::Status verified = engines_->VerifyJob(
      engine, name, call,
      [pass, &damaged](const v1::VerifyJobProgress& progress) {
        damaged = progress.damaged();
        return pass(progress);
      });
  if (damaged != 0) EventsOf(summary).DamageFound(caller.name(), damaged);
  if (!absl::IsUnimplemented(verified)) return verified;
  return TooOld(name, "verify");
}

absl::Status AdminService::TraceJob(
    const v1::TraceJobRequest& request, const access::Caller& caller,
    const grpc::ServerContext* call,
    absl::FunctionRef<bool(const v1::TraceChunk&)> pass) {
  const EngineChannels::Engine engine = engines_->Take(request.name());
  OPTSTATE_RETURN_IF_ERROR(FindToChange(request.name(), caller).status());
  absl::Status traced = engines_->TraceJob(engine, request, call, pass);
  if (!absl::IsUnimplemented(traced)) return traced;
  return TooOld(request.name(), "trace");
}

absl::StatusOr<v1::UpgradeReply> AdminService::Upgrade(
    const std::string& binary, const access::Caller& caller) {
  absl::StatusOr<v1::UpgradeReply> begun = upgrade_->Upgrade(binary);
  if (begun.ok()) {
    observe::NoteNodeEvent(
        v1::EVENT_SEVERITY_INFO, "upgrade_begun",
        absl::StrCat("upgrading to optstated ", begun->version(),
                     binary.empty() ? "" : ", ", binary),
        caller.name());
  } else {
    observe::NoteNodeEvent(
        v1::EVENT_SEVERITY_WARNING, "upgrade_failed",
        absl::StrCat("not upgraded: ", begun.status().message()),
        caller.name());
  }
  return begun;
}

absl::StatusOr<v1::DrainReply> AdminService::Drain(
    const v1::DrainRequest& request, const access::Caller& caller,
    absl::Time deadline, const grpc::ServerContext* call) {
  OPTSTATE_ASSIGN_OR_RETURN(const absl::Duration timeout, TimeoutOf(request));
  v1::DrainReply reply;
  reply.set_was_draining(control_->draining());
  OPTSTATE_RETURN_IF_ERROR(control_->SetDraining(!request.resume()));
  if (reply.was_draining() == request.resume()) {
    observe::NoteNodeEvent(v1::EVENT_SEVERITY_INFO,
                           request.resume() ? "drain_ended" : "drain_begun",
                           request.resume()
                               ? "new steps and sessions are taken again"
                               : "new steps and sessions are refused",
                           caller.name());
  }
  const absl::Status engines = engines_->DrainAll(
      request.resume(), std::min(deadline, absl::Now() + timeout), call);
  if (engines.ok()) return reply;
  return absl::Status(
      engines.code(),
      absl::StrCat(request.resume() ? kResumedText : kDrainingText,
                   engines.message()));
}

}  // namespace optstate::admin
