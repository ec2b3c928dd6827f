#ifndef OPTSTATE_SERVER_SESSION_DRAIN_GATE_H_
#define OPTSTATE_SERVER_SESSION_DRAIN_GATE_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/session/job_context.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/load_state.h"

namespace optstate::session {

// Holds the ranks' calls back: a draining job opens no new step, a paused one
// begins nothing until the pause ends, a stopped one never again.
//
// Threads: not thread-safe; the job's lock guards it. The Await calls and Pause
// give the lock up while they wait.
class DrainGate {
 public:
  // The arguments must outlive this object.
  DrainGate(JobContext* job, RankRoster* ranks, StepState* step,
            LoadState* load)
      : job_(*job), ranks_(*ranks), step_(*step), load_(*load) {}

  void BeginDrain() { draining_ = true; }
  bool draining() const { return draining_; }
  // See Job::AwaitDrained and Job::AwaitResumed.
  absl::Status AwaitDrained(absl::Time deadline);
  absl::Status AwaitResumed(absl::Time deadline);
  // Ends the drain and the pause.
  void Resume();

  // See Job::Pause.
  absl::Status Pause(absl::Time deadline, absl::Duration lease);
  bool paused() const;
  // Returns FAILED_PRECONDITION while the job drains, pauses or has stopped.
  absl::Status CheckTakesOperations() const;
  // Pauses the job without end.
  void Stop();
  // Blocks a call that would begin something until the pause ends. The call is
  // not answered if the process ends meanwhile; its session then asks the next
  // engine.
  void AwaitPauseEnd();

 private:
  bool IsDrained() const;
  bool NoOpenStep() const;
  bool NothingUnderWay() const;
  bool IsAwake() const {
    return !paused_ || job_.options.clock() >= pause_end_;
  }

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  LoadState& load_;
  bool draining_ = false;
  bool paused_ = false;  // until pause_end_, at most
  absl::Time pause_end_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DRAIN_GATE_H_
