#ifndef OPTSTATE_SERVER_SESSION_RECOVERY_STEP_FILES_CHECK_H_
#define OPTSTATE_SERVER_SESSION_RECOVERY_STEP_FILES_CHECK_H_

#include "absl/status/status.h"
#include "server/session/job_context.h"
#include "server/session/job_description.h"

namespace optstate::session {

// Checks the step files of a former engine before any is enlarged or made anew,
// for its zeros would say that nothing was half written. DATA_LOSS says which
// file lacks what.
absl::Status CheckStepFiles(const JobContext& job,
                            const JobDescription& description);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RECOVERY_STEP_FILES_CHECK_H_
