#include "server/session/job_trace.h"

#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/observe/trace_recorder.h"

namespace optstate::session {
namespace {

// Says how long nothing of a step has happened. While a step is open, its spans
// show that it goes on: one over a slow disk takes minutes.
class IdleTime {
 public:
  explicit IdleTime(absl::Time now) : since_(now) {}

  void Note(absl::Time now, const observe::TraceRecorder& trace,
            const v1::TraceChunk& chunk) {
    const bool goes_on = trace.has_step() && chunk.spans_size() > 0;
    if (trace.turns() == turns_ && !goes_on) return;
    turns_ = trace.turns();
    since_ = now;
  }
  absl::Duration At(absl::Time now) const { return now - since_; }

 private:
  absl::Time since_;
  uint64_t turns_ = 0;
};

// Sends what is new. Returns nullopt when the caller has gone, else whether
// there is more.
std::optional<bool> SendOne(observe::TraceRecorder* trace, bool ends,
                            absl::FunctionRef<bool(const v1::TraceChunk&)> pass,
                            v1::TraceChunk* chunk) {
  const bool is_more = trace->Take(chunk);
  chunk->set_steps(trace->steps());
  chunk->set_done(ends && !is_more);
  if (!pass(*chunk)) return std::nullopt;
  return is_more;
}

}  // namespace

absl::StatusOr<uint32_t> TracedSteps(const v1::TraceJobRequest& request) {
  if (request.steps() == 0) return kTraceStepsDefault;
  if (request.steps() <= kTraceStepsMax) return request.steps();
  return absl::InvalidArgumentError(
      absl::StrCat("a trace of ", request.steps(), " steps: it may be of 1 to ",
                   kTraceStepsMax, " steps; 0 is for ", kTraceStepsDefault));
}

absl::Status CheckMayTrace(const JobContext& job) {
  OPTSTATE_RETURN_IF_ERROR(job.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(job.failure);
  if (job.phase() != v1::JOB_PHASE_LOADING) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("job \"", job.options.name,
                   "\" has no state yet, its ranks are loading it: trace it "
                   "when it is ready"));
}

absl::Status TraceSteps(JobContext* job, uint32_t steps, absl::Time deadline,
                        absl::FunctionRef<bool(const v1::TraceChunk&)> pass) {
  observe::TraceRecorder& trace = job->trace;
  OPTSTATE_RETURN_IF_ERROR(trace.Begin(steps));
  const absl::Cleanup end = [job, &trace] {
    {
      const absl::MutexLock lock(&job->lock.mu);
      trace.Disarm();
    }
    trace.End();
  };
  {
    const absl::MutexLock lock(&job->lock.mu);
    trace.Arm();
  }
  const auto& clock = job->options.clock;
  IdleTime idle(clock());
  bool ends = false;
  while (true) {
    // Looked at before spans are taken, so that those of the last step are
    // among them. An end stays one, although spans that are left then are no
    // idle time: nothing is recorded after it.
    ends = ends || trace.is_over() ||
           absl::Now() >= deadline - kTraceAnswerTime ||
           idle.At(clock()) >= kTraceIdleMax;
    if (ends) {
      const absl::MutexLock lock(&job->lock.mu);
      trace.Disarm();
    }
    v1::TraceChunk chunk;
    const std::optional<bool> is_more = SendOne(&trace, ends, pass, &chunk);
    if (!is_more.has_value())
      return absl::CancelledError("the caller has gone");
    idle.Note(clock(), trace, chunk);
    if (*is_more) continue;
    if (ends) return absl::OkStatus();
    absl::SleepFor(kTraceInterval);
  }
}

}  // namespace optstate::session
