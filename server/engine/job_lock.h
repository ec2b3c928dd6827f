#ifndef OPTSTATE_SERVER_ENGINE_JOB_LOCK_H_
#define OPTSTATE_SERVER_ENGINE_JOB_LOCK_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"

namespace optstate::engine {

// Locks DIRECTORY/lock for this process, so that a job never has two engines;
// the lock ends with the fd, hence with the process. Waits up to `patience` for
// a dying predecessor. UNAVAILABLE, with the holder's pid, when that does not
// release the lock.
absl::StatusOr<UniqueFd> LockJob(const std::string& directory,
                                 absl::Duration patience);

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_JOB_LOCK_H_
