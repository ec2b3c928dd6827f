#ifndef OPTSTATE_SERVER_SESSION_TIERS_JOB_PLACER_H_
#define OPTSTATE_SERVER_SESSION_TIERS_JOB_PLACER_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "optstate/v1/types.pb.h"
#include "server/session/job_context.h"
#include "server/session/job_description.h"
#include "server/session/tiers/disk_rates.h"

namespace optstate::session {

// Measures the daemon's directories if such a job is placed by their bandwidth
// and that is not known, else returns what is known. Gives up the job's lock
// meanwhile.
DiskRates RatesFor(const v1::StorageSettings& asked, JobContext* job);

// Decides where the records of a new job lie: sets its storage settings, with
// those of the node in place of what the description does not ask for. `admits`
// says whether the node can give what a job takes; the caller holds the
// AdmissionLock. Errors: those of `admits`, and INVALID_ARGUMENT, with the
// least, when the host budget asked for is too small.
absl::Status PlaceJob(
    const JobContext& job, const DiskRates& rates,
    absl::FunctionRef<absl::Status(const JobDescription&)> admits,
    JobDescription* description);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TIERS_JOB_PLACER_H_
