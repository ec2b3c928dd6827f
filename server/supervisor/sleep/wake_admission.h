#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_WAKE_ADMISSION_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_WAKE_ADMISSION_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/sleep.pb.h"
#include "server/supervisor/sleep/job_sleeper.h"

namespace optstate::supervisor {

// Admits a job that wakes as an engine admits a new one, under the same lock:
// checks the files against the limits of the job, of its owner and of all, the
// quotas of the owner and of its groups, the memory with what the engine itself
// takes, the node's budget for frames and the limit of locked memory, then has
// `reserve` take the files' memory. The number of jobs is no matter, because
// one that is asleep counts. RESOURCE_EXHAUSTED: with the bytes needed and
// left; FAILED_PRECONDITION: the state has to be locked in memory, and is to
// lie on a disk.
absl::Status AdmitToWake(const v1::DaemonConfig& config,
                         const SleepPlace& place,
                         const v1::SleepManifest& manifest,
                         absl::FunctionRef<absl::Status()> reserve);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_WAKE_ADMISSION_H_
