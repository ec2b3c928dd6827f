#ifndef OPTSTATE_SERVER_SESSION_STATE_LOCK_H_
#define OPTSTATE_SERVER_SESSION_STATE_LOCK_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/job_context.h"

namespace optstate::session {

// Keeps the job's state locked in memory, as lock_memory of the configuration
// says.
//
// Locks end with the engine, so each engine locks anew. Two engines of one job,
// as in an upgrade, do not share a limit: RLIMIT_MEMLOCK counts by process.
//
// Threads: not thread-safe; the job's lock guards it.
class StateLock {
 public:
  // `job` must outlive this object.
  explicit StateLock(JobContext* job) : job_(*job) {}

  // Returns why a state of so many bytes must be refused, where it has to be
  // locked and cannot be. RESOURCE_EXHAUSTED: the limit is too low;
  // FAILED_PRECONDITION: the state directory is not in memory.
  absl::Status Admit(uint64_t job_state_bytes) const;
  // Locks what the tier has mapped, and says what is not locked, once. Errors
  // are those of Admit().
  absl::Status Lock();
  void Describe(v1::MemoryLock* lock) const;

 private:
  bool IsAlways() const;
  absl::Status CheckInMemory() const;
  std::string WhyRefused(int error) const;
  void Log();

  JobContext& job_;
  // Why nothing is to be locked; empty: the limit decides.
  std::string why_not_;
  uint64_t told_bytes_ = 0;  // of what is not locked
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STATE_LOCK_H_
