#ifndef OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_CONTROL_H_
#define OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_CONTROL_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace optstate::supervisor {

// What the supervisor itself knows of a job; the rest knows its engine.
struct JobSummary {
  std::string name;
  uid_t uid = 0;
  bool failed = false;
  std::string reason;  // of `failed`, or why no engine is there just now
  pid_t engine_pid = 0;
  uint32_t restarts = 0;
  size_t kept_count = 0;  // ranks whose gradients would outlive the engine
  std::string directory;
};

// What the Admin service asks of the supervisor.
//
// Threads: every function may be called from any thread but the supervisor's
// own, waits for that thread, and returns.
class SupervisorControl {
 public:
  virtual ~SupervisorControl() = default;

  virtual std::vector<JobSummary> Jobs() = 0;

  // Deletion in two halves, so that no rank slips in between the look whether
  // one is attached and the end of the engine. After HoldJob, new connections
  // wait; ReleaseJob lets them go on. NOT_FOUND; PERMISSION_DENIED when `uid`
  // may not change the job; UNAVAILABLE while it is held or stopping already.
  virtual absl::Status HoldJob(const std::string& name, uid_t uid) = 0;
  virtual void ReleaseJob(const std::string& name) = 0;
  // Ends the engine of a held job and removes its state. DEADLINE_EXCEEDED: it
  // is still being done, and will be.
  virtual absl::Status DeleteHeldJob(const std::string& name,
                                     absl::Time deadline) = 0;

  // Starts the engine of a FAILED job again. A job whose engine runs is FAILED
  // when that says so: then `failed_engine` is its pid, as it said itself, else
  // 0. NOT_FOUND; PERMISSION_DENIED when `uid` may not change the job;
  // FAILED_PRECONDITION when it is not FAILED.
  virtual absl::Status RecoverJob(const std::string& name, uid_t uid,
                                  pid_t failed_engine) = 0;

  // Waits until the job's engine is ready; returns the identity of its
  // executable (control/executable.h). NOT_FOUND: the job is gone;
  // FAILED_PRECONDITION: it is FAILED; DEADLINE_EXCEEDED.
  virtual absl::StatusOr<std::string> AwaitEngine(const std::string& name,
                                                  absl::Time deadline) = 0;
  // Ends the job's engine, starts another and waits until that is ready;
  // connections that come meanwhile wait for it. Errors as above.
  virtual absl::Status ReplaceEngine(const std::string& name,
                                     absl::Time deadline) = 0;

  // While draining, new sessions are refused with UNAVAILABLE. Engines are told
  // in order, also one that is stopped for now; the next daemon goes on
  // draining. An error: everything is as before.
  virtual absl::Status SetDraining(bool draining) = 0;
  virtual bool draining() const = 0;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_CONTROL_H_
