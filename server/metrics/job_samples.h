#ifndef OPTSTATE_SERVER_METRICS_JOB_SAMPLES_H_
#define OPTSTATE_SERVER_METRICS_JOB_SAMPLES_H_

#include "absl/strings/string_view.h"
#include "optstate/v1/admin.pb.h"
#include "server/metrics/samples.h"

namespace optstate::metrics {

// The words for a job's phase: "ready", and "unknown" for UNSPECIFIED.
absl::string_view PhaseName(v1::JobPhase phase);
inline constexpr v1::JobPhase kPhases[] = {
    v1::JOB_PHASE_UNSPECIFIED, v1::JOB_PHASE_EMPTY,  v1::JOB_PHASE_LOADING,
    v1::JOB_PHASE_READY,       v1::JOB_PHASE_FAILED, v1::JOB_PHASE_RECOVERING,
    v1::JOB_PHASE_ASLEEP};

// Adds the samples of one job. One whose engine gave no answer has those that
// the supervisor and the job's files know.
void AddJob(const v1::Job& job, Samples* samples);

// Adds those of its records on disk and of its devices, which AddJob does too.
void AddDisk(const v1::Job& job, Samples* samples);
void AddDevices(const v1::Job& job, Samples* samples);

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_JOB_SAMPLES_H_
