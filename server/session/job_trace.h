#ifndef OPTSTATE_SERVER_SESSION_JOB_TRACE_H_
#define OPTSTATE_SERVER_SESSION_JOB_TRACE_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/job_context.h"

namespace optstate::session {

// The steps of a trace where a request names none, and the most that it may
// name.
inline constexpr uint32_t kTraceStepsDefault = 20;
inline constexpr uint32_t kTraceStepsMax = 1000;
// Interval between two chunks of a trace.
inline constexpr absl::Duration kTraceInterval = absl::Milliseconds(100);
// A trace ends when nothing of a step has happened for so long.
inline constexpr absl::Duration kTraceIdleMax = absl::Minutes(1);
// It ends so long before the call's deadline, so that its last chunk arrives.
inline constexpr absl::Duration kTraceAnswerTime = absl::Milliseconds(500);

// Returns how many steps such a request asks for. INVALID_ARGUMENT: too many.
absl::StatusOr<uint32_t> TracedSteps(const v1::TraceJobRequest& request);
// Returns FAILED_PRECONDITION when the job has no state yet, or why it has
// failed. The caller holds the job's lock.
absl::Status CheckMayTrace(const JobContext& job);

// Traces a job, see Job::Trace. Takes the job's lock for moments; the caller
// does not hold it. The job outlives the call.
absl::Status TraceSteps(JobContext* job, uint32_t steps, absl::Time deadline,
                        absl::FunctionRef<bool(const v1::TraceChunk&)> pass);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_TRACE_H_
