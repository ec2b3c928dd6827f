#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_WAKE_ADMISSION_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_WAKE_ADMISSION_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/sleep.pb.h"
#include "server/supervisor/sleep/job_sleeper.h"

namespace optstate::supervisor {

// Admits a job that wakes as an engine admits a new one, under the same lock:
// checks the files against the limits, the memory and the node's budget for
// frames, then has `reserve` take their memory. What the engine itself takes is
// not counted, as it is not when an engine is restarted. RESOURCE_EXHAUSTED:
// with the bytes needed and left.
absl::Status AdmitToWake(const v1::DaemonConfig& config,
                         const SleepPlace& place,
                         const v1::SleepManifest& manifest,
                         absl::FunctionRef<absl::Status()> reserve);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_WAKE_ADMISSION_H_
