#ifndef OPTSTATE_SERVER_SESSION_LOCK_ADMISSION_H_
#define OPTSTATE_SERVER_SESSION_LOCK_ADMISSION_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"

namespace optstate::session {

// Returns FAILED_PRECONDITION when a job's directory is not in memory, so that
// there is nothing to lock there.
absl::Status CheckLockable(const std::string& directory);

// Returns what bounds the memory that an engine locks, and how that is raised,
// for a sentence.
std::string LockLimitText();

// Returns why a state of so many bytes must be refused, where the configuration
// has it locked in memory whole (lock_memory: always) and it cannot be.
// `may_lock_bytes`: that its engine may lock, or MemoryLocker::kUnlimited.
// RESOURCE_EXHAUSTED: too few; FAILED_PRECONDITION: see CheckLockable().
absl::Status AdmitLock(const v1::DaemonConfig& config,
                       const std::string& directory, uint64_t job_state_bytes,
                       uint64_t may_lock_bytes);

// Does so for an engine that is still to be started, with the limit of this
// process, which that inherits.
absl::Status AdmitLockOfNextEngine(const v1::DaemonConfig& config,
                                   const std::string& directory,
                                   uint64_t job_state_bytes);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_LOCK_ADMISSION_H_
