#ifndef OPTSTATE_SERVER_ENGINE_JOB_LOCK_H_
#define OPTSTATE_SERVER_ENGINE_JOB_LOCK_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"

namespace optstate {

// Locks DIRECTORY/lock for this process, so that a job never has two engines;
// the lock goes with the fd, so with the process. Waits up to `patience` for a
// predecessor that is dying. UNAVAILABLE when it does not, with its pid.
absl::StatusOr<UniqueFd> LockJob(const std::string& directory,
                                 absl::Duration patience);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_ENGINE_JOB_LOCK_H_
