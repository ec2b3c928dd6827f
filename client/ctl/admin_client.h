#ifndef OPTSTATE_CLIENT_CTL_ADMIN_CLIENT_H_
#define OPTSTATE_CLIENT_CTL_ADMIN_CLIENT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// The Admin service of one daemon. Each call but the streams DeleteJob,
// VerifyJob, TraceJob, SleepJob, WakeJob and WatchEvents, its connection
// included, takes
// no longer than the timeout that the client was made with; errors name the
// endpoint. UNAVAILABLE: no daemon answers there; PERMISSION_DENIED: this user
// may not use the socket; DEADLINE_EXCEEDED: no answer came in time.
//
// Threads: one at a time.
class AdminClient {
 public:
  // Makes a client without connecting. `endpoint`: as in
  // client/endpoint/endpoint.h, "" for the node's daemon. INVALID_ARGUMENT: not
  // an endpoint, or one that cannot be administered.
  static absl::StatusOr<std::unique_ptr<AdminClient>> Make(
      const std::string& endpoint, absl::Duration timeout);
  virtual ~AdminClient() = default;

  // The daemon's address as text, and whether it is on this machine, as far as
  // the address says.
  virtual std::string address() const = 0;
  virtual bool is_local() const = 0;

  virtual absl::StatusOr<v1::ServerStatus> GetStatus() = 0;
  virtual absl::StatusOr<v1::ListJobsReply> ListJobs() = 0;
  // `memory`: with the location of its state in memory, for which the kernel
  // looks at every page.
  virtual absl::StatusOr<v1::Job> GetJob(const std::string& name,
                                         bool memory) = 0;
  virtual absl::StatusOr<v1::ListSessionsReply> ListSessions(
      const std::string& job) = 0;
  // Returns all pages.
  virtual absl::StatusOr<v1::ListParametersReply> ListParameters(
      const std::string& job) = 0;
  // Calls `progress` with each message until the job is deleted, however long
  // that takes; only a silence is bounded by the timeout. A daemon of an older
  // build sends none, and answers within the timeout. CANCELLED once
  // `interrupt` is readable: the daemon goes on.
  virtual absl::Status DeleteJob(
      const std::string& name, bool force, int interrupt,
      absl::FunctionRef<void(const v1::DeleteProgress&)> progress) = 0;
  virtual absl::StatusOr<v1::RecoverJobReply> RecoverJob(
      const std::string& name, bool to_durable) = 0;
  virtual absl::StatusOr<v1::SetJobReply> SetJob(
      const v1::SetJobRequest& request) = 0;
  // Calls `progress` with each message until the verification is over, however
  // long that takes; only a silence is bounded by the timeout. CANCELLED once
  // `interrupt` is readable.
  virtual absl::Status VerifyJob(
      const std::string& name, int interrupt,
      absl::FunctionRef<void(const v1::VerifyJobProgress&)> progress) = 0;
  // Calls `pass` with each chunk until the trace is over, likewise; an error
  // that it returns ends the trace, and is returned.
  virtual absl::Status TraceJob(
      const v1::TraceJobRequest& request, int interrupt,
      absl::FunctionRef<absl::Status(const v1::TraceChunk&)> pass) = 0;
  // Call `progress` with each message until the job is asleep, or awake,
  // however long that takes; only a silence is bounded by the timeout.
  // CANCELLED once `interrupt` is readable: the daemon goes on.
  using OnSleepProgress = absl::FunctionRef<void(const v1::SleepProgress&)>;
  virtual absl::Status SleepJob(const std::string& name, int interrupt,
                                OnSleepProgress progress) = 0;
  virtual absl::Status WakeJob(const std::string& name, int interrupt,
                               OnSleepProgress progress) = 0;
  virtual absl::StatusOr<v1::DescribeTiersReply> DescribeTiers(
      const v1::DescribeTiersRequest& request) = 0;
  // Does so with directories that are measured, for which the daemon has
  // `measuring` besides the timeout.
  virtual absl::StatusOr<v1::DescribeTiersReply> MeasureTiers(
      const v1::DescribeTiersRequest& request, absl::Duration measuring) = 0;
  virtual absl::StatusOr<v1::DescribeDevicesReply> DescribeDevices() = 0;
  virtual absl::StatusOr<v1::ListUsersReply> ListUsers(
      const v1::ListUsersRequest& request) = 0;
  virtual absl::StatusOr<v1::UpgradeReply> Upgrade(
      const std::string& binary) = 0;
  // Drains the daemon, which waits for open steps for most of the timeout: the
  // rest is for its answer, which names the jobs that were not finished.
  virtual absl::StatusOr<v1::DrainReply> Drain(bool resume) = 0;
  // Calls `pass` with each event. With `follow` goes on for a minute, and is to
  // be called again after that: so the end of a daemon that cannot say so is
  // noticed. CANCELLED: `pass` has returned false, or `interrupt` is readable.
  virtual absl::Status WatchEvents(
      const v1::WatchEventsRequest& request, int interrupt,
      absl::FunctionRef<bool(const v1::Event&)> pass) = 0;
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_ADMIN_CLIENT_H_
