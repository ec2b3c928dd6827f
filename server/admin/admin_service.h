#ifndef OPTSTATE_SERVER_ADMIN_ADMIN_SERVICE_H_
#define OPTSTATE_SERVER_ADMIN_ADMIN_SERVICE_H_

#include <grpcpp/server_context.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/access/caller.h"
#include "server/access/quotas.h"
#include "server/admin/described_jobs.h"
#include "server/admin/engine_channels.h"
#include "server/admin/kept_answers.h"
#include "server/admin/server_info.h"
#include "server/admin/shared_answers.h"
#include "server/admin/upgrade_control.h"
#include "server/supervisor/supervisor_control.h"

namespace optstate::admin {

// Implements each call of the Admin service, without gRPC: admin_calls.cc wraps
// it, and has checked the caller's role (method_roles.h). The answer is due at
// `deadline`.
//
// A job whose engine does not answer is still listed, as the supervisor and the
// job's files know it: phase FAILED with the reason when the job is FAILED,
// else UNSPECIFIED with why the engine is missing. While that engine runs, its
// ranks are unknown and lists name the job as unanswered.
//
// A private job is shown to those alone who may look at it
// (supervisor/permissions.h). For others there is none of its name, and it is
// in no list; sums have it all the same.
//
// Threads: thread-safe. Calls block the calling thread.
// Size: one method for each call of the Admin service, and the checks that
// calls begin with.
class AdminService {
 public:
  // Bounds the wait for one engine: one that hangs must not make a list
  // useless.
  static constexpr absl::Duration kEngineAnswerMax = absl::Seconds(2);

  // All arguments outlive the object. `engine_answer_max`: how long an engine
  // may take to describe itself. `clock`: see KeptAnswers.
  AdminService(supervisor::SupervisorControl* control, EngineChannels* engines,
               UpgradeControl* upgrade, ServerInfo info,
               absl::Duration engine_answer_max = kEngineAnswerMax,
               KeptAnswers::Clock clock = absl::Now);

  // `age_max`, here and below: the age that an engine's answer may have.
  v1::ServerStatus GetStatus(const access::Caller& caller, absl::Time deadline,
                             absl::Duration age_max = absl::ZeroDuration());
  v1::ListJobsReply ListJobs(const access::Caller& caller, absl::Time deadline,
                             absl::Duration age_max = absl::ZeroDuration());
  // `memory`: with its memory use, which is never old.
  absl::StatusOr<v1::Job> GetJob(const std::string& name,
                                 const access::Caller& caller,
                                 absl::Time deadline, bool memory = false,
                                 absl::Duration age_max = absl::ZeroDuration());
  // Callers of the four calls around this one, but for `memory`, share answers,
  // whoever they are: see DescribedJobs. What one may not see is left out of
  // them afterwards.
  const DescribedJobs& described() const { return described_; }
  // Returns NOT_FOUND when `job` names a job that does not exist.
  absl::StatusOr<v1::ListSessionsReply> ListSessions(
      const std::string& job, const access::Caller& caller, absl::Time deadline,
      absl::Duration age_max = absl::ZeroDuration());
  absl::StatusOr<v1::ListParametersReply> ListParameters(
      const v1::ListParametersRequest& request, const access::Caller& caller,
      absl::Time deadline);
  absl::Status DeleteJob(const std::string& name, bool force,
                         const access::Caller& caller, absl::Time deadline);
  // Does the same. Calls `pass` several times a second, until the end or until
  // it returns false (CANCELLED); the deletion goes on either way. `deadline`
  // is of the answer of the job's engine.
  absl::Status DeleteJobWatched(
      const std::string& name, bool force, const access::Caller& caller,
      absl::Time deadline,
      absl::FunctionRef<bool(const v1::DeleteProgress&)> pass);
  absl::Status RecoverJob(const std::string& name, const access::Caller& caller,
                          bool to_durable, absl::Time deadline);
  absl::StatusOr<v1::SetJobReply> SetJob(const v1::SetJobRequest& request,
                                         const access::Caller& caller,
                                         absl::Time deadline);
  // Put a job to sleep and wake it. Call `pass` several times a second, until
  // the end or until it returns false (CANCELLED); the job goes on either way.
  absl::Status SleepJob(const std::string& name, const access::Caller& caller,
                        absl::Time deadline,
                        absl::FunctionRef<bool(const v1::SleepProgress&)> pass);
  absl::Status WakeJob(const std::string& name, const access::Caller& caller,
                       absl::FunctionRef<bool(const v1::SleepProgress&)> pass);
  // Passes on what the engine tells, see EngineChannels::VerifyJob.
  absl::Status VerifyJob(
      const std::string& name, const access::Caller& caller,
      const grpc::ServerContext* call,
      absl::FunctionRef<bool(const v1::VerifyJobProgress&)> pass);
  absl::Status TraceJob(const v1::TraceJobRequest& request,
                        const access::Caller& caller,
                        const grpc::ServerContext* call,
                        absl::FunctionRef<bool(const v1::TraceChunk&)> pass);
  // PERMISSION_DENIED: the caller may not have directories measured.
  absl::StatusOr<v1::DescribeTiersReply> DescribeTiers(
      const v1::DescribeTiersRequest& request, const access::Caller& caller);
  v1::DescribeDevicesReply DescribeDevices(const access::Caller& caller,
                                           absl::Time deadline);
  // PERMISSION_DENIED: the caller is no operator, and asks for another user.
  // NOT_FOUND: there is no such user.
  absl::StatusOr<v1::ListUsersReply> ListUsers(
      const v1::ListUsersRequest& request, const access::Caller& caller,
      absl::Time deadline);
  // Returns status, jobs, tiers and devices at once, for the HTTP server, whose
  // readers have no name: each engine is asked once. The report's events and
  // time are not set. Of a private job it has the phase alone, so that sums are
  // right, and no name.
  v1::NodeReport DescribeNode(absl::Time deadline);
  // Returns whether the caller may see an event; null: whether everybody may.
  bool MaySee(const v1::Event& event, const access::Caller* caller) const {
    return control_->MaySee(event, caller);
  }
  absl::StatusOr<v1::UpgradeReply> Upgrade(const std::string& binary,
                                           const access::Caller& caller);
  // Waits no longer than `call`, unless that is null. When engines do not
  // answer, the request is in force all the same, and the error says so.
  absl::StatusOr<v1::DrainReply> Drain(
      const v1::DrainRequest& request, const access::Caller& caller,
      absl::Time deadline, const grpc::ServerContext* call = nullptr);

 private:
  // A status, and the jobs that it sums up.
  struct StatusOfAll {
    std::shared_ptr<const DescribedJobs::Jobs> jobs;
    v1::ServerStatus status;
  };

  v1::ServerStatus StatusOf(const std::vector<v1::Job>& jobs) const;
  // Describes a job, whoever may look at it.
  absl::StatusOr<v1::Job> DescribeOne(const std::string& name,
                                      absl::Time deadline);
  // Finds a job that the caller may look at; NOT_FOUND.
  absl::StatusOr<supervisor::JobSummary> FindToLook(
      const std::string& name, const access::Caller& caller);
  absl::Status SetAccess(const v1::SetJobRequest& request,
                         const access::Caller& caller);
  absl::Time EngineDeadline(absl::Time deadline) const;
  // Returns PERMISSION_DENIED when the caller may not change the job.
  absl::StatusOr<supervisor::JobSummary> FindToChange(
      const std::string& name, const access::Caller& caller);
  // Holds a job that can be deleted, which the caller then deletes.
  absl::Status HoldToDelete(const std::string& name, bool force,
                            const access::Caller& caller, absl::Time deadline);
  // `advice`: what to do about ranks that are attached.
  absl::Status CheckNoSessions(const std::string& name, absl::Time deadline,
                               absl::string_view advice);
  // Returns the pid of the engine of a job that can be put to sleep just now.
  absl::StatusOr<pid_t> CheckCanSleep(const std::string& name,
                                      absl::Time deadline);
  // Has a job that is well go on at its last durable step, whose memory is
  // given up. FAILED_PRECONDITION: ranks are attached, which have seen later
  // steps.
  absl::Status GoBackToDurable(const std::string& name,
                               const access::Caller& caller, pid_t engine,
                               absl::Time deadline);

  supervisor::SupervisorControl* const control_;
  EngineChannels* const engines_;
  UpgradeControl* const upgrade_;
  const ServerInfo info_;
  const absl::Duration engine_answer_max_;
  access::Quotas quotas_;
  DescribedJobs described_;
  SharedAnswers<StatusOfAll> statuses_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_ADMIN_SERVICE_H_
