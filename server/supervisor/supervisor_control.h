#ifndef OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_CONTROL_H_
#define OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_CONTROL_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/access/caller.h"
#include "server/supervisor/job_deletion.h"
#include "server/supervisor/sleep/sleep_operation.h"

namespace optstate::supervisor {

// The supervisor's own knowledge of a job; the engine knows the rest.
struct JobSummary {
  std::string name;
  uid_t uid = 0;
  bool failed = false;
  std::string reason;  // of `failed`, or why the engine is missing now
  pid_t engine_pid = 0;
  uint32_t restarts = 0;
  size_t kept_count = 0;  // ranks whose gradients would outlive the engine
  std::string directory;
  // Set while the job is asleep, or on its way to it or from it. It is asleep
  // when this names a directory.
  std::optional<v1::SleepState> sleep = std::nullopt;
  v1::JobAccess access = {};        // who may use the job besides `uid`
  std::string access_problem = "";  // why that is not known; empty: it is
  // Counts what an engine that is being started has read and written so far.
  uint64_t start_disk_bytes = 0;
};

// The supervisor, as the Admin service controls it.
//
// Threads: every function may be called from any thread but the supervisor's
// own, waits for that thread, and returns.
class SupervisorControl {
 public:
  virtual ~SupervisorControl() = default;

  virtual std::vector<JobSummary> Jobs() = 0;
  // NOT_FOUND: there is no such job. Costs the same however many jobs there
  // are.
  virtual absl::StatusOr<JobSummary> FindJob(const std::string& name) = 0;

  // Holds a job for deletion. Deletion has two halves, so that no rank can
  // attach between the check for attached ranks and the end of the engine.
  // After HoldJob, new connections wait; ReleaseJob lets them go on. NOT_FOUND;
  // PERMISSION_DENIED when `caller` may not change the job; UNAVAILABLE when
  // the job is held or stopping already.
  virtual absl::Status HoldJob(const std::string& name,
                               const access::Caller& caller) = 0;
  virtual void ReleaseJob(const std::string& name) = 0;
  // Ends the engine of a held job and removes its state; the deletion goes on
  // by itself.
  virtual std::shared_ptr<JobDeletion> BeginDeletion(
      const std::string& name) = 0;
  // Does the same, and waits for its end. DEADLINE_EXCEEDED: the deletion goes
  // on, and will be completed.
  absl::Status DeleteHeldJob(const std::string& name, absl::Time deadline) {
    const std::shared_ptr<JobDeletion> deletion = BeginDeletion(name);
    if (deletion->AwaitEnd(deadline)) return deletion->status();
    return absl::DeadlineExceededError(
        absl::StrCat("job \"", name, "\" is still being deleted"));
  }

  // Begins to put a held job to sleep, whose engine runs with this pid; the
  // operation goes on by itself, and ends the hold. FAILED_PRECONDITION: the
  // job has no such engine, gradients are kept, or there is no directory to
  // sleep in; then the hold stays.
  virtual absl::StatusOr<std::shared_ptr<SleepOperation>> PutToSleep(
      const std::string& name, pid_t engine) = 0;
  // Begins to wake a job. NOT_FOUND; PERMISSION_DENIED; FAILED_PRECONDITION:
  // it is not asleep; UNAVAILABLE: it is on its way, or being deleted.
  virtual absl::StatusOr<std::shared_ptr<SleepOperation>> WakeJob(
      const std::string& name, const access::Caller& caller) = 0;

  // Starts the engine of a FAILED job again. A job whose engine runs is FAILED
  // when that engine says so, or is to give up what it has: then
  // `failed_engine` is the pid that the engine gave, else 0. With `to_durable`
  // the engine gives up what is in memory and goes on at the last durable step.
  // NOT_FOUND; PERMISSION_DENIED when the caller may not change the job;
  // FAILED_PRECONDITION when the job is not FAILED, or has no durable step.
  virtual absl::Status RecoverJob(const std::string& name,
                                  const access::Caller& caller,
                                  pid_t failed_engine, bool to_durable) = 0;

  // Replaces who may use a job, only while that is `before`; null: whatever it
  // is. Sessions that are attached stay. Takes no engine. INVALID_ARGUMENT: as
  // access::CheckJobAccess(); NOT_FOUND; PERMISSION_DENIED; ABORTED: it is not
  // `before`; UNAVAILABLE: the job is on its way to sleep or awake, or being
  // deleted; FAILED_PRECONDITION: a disk that has a part of it is not there.
  virtual absl::Status SetAccess(const std::string& name,
                                 const v1::JobAccess& access,
                                 const v1::JobAccess* before,
                                 const access::Caller& caller) = 0;
  // Returns whether `caller` may see an event; null: whether everybody may.
  // Does not wait for the supervisor's thread.
  virtual bool MaySee(const v1::Event& event,
                      const access::Caller* caller) const = 0;

  // Waits until the job's engine is ready; returns the identity of its
  // executable (control/executable.h). NOT_FOUND: the job is gone;
  // FAILED_PRECONDITION: it is FAILED; DEADLINE_EXCEEDED.
  virtual absl::StatusOr<std::string> AwaitEngine(const std::string& name,
                                                  absl::Time deadline) = 0;
  // Ends the job's engine, starts another and waits until that is ready;
  // connections that come meanwhile wait for it. Errors as of AwaitEngine.
  virtual absl::Status ReplaceEngine(const std::string& name,
                                     absl::Time deadline) = 0;

  // While draining, new sessions are refused with UNAVAILABLE. Engines are told
  // in order, including one that is stopped for now; the next daemon goes on
  // draining. On an error everything is as before.
  virtual absl::Status SetDraining(bool draining) = 0;
  virtual bool draining() const = 0;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_CONTROL_H_
