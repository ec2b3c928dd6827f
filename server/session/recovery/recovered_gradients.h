#ifndef OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_GRADIENTS_H_
#define OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_GRADIENTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/scheduler/step_scheduler.h"
#include "server/session/job_context.h"
#include "server/session/job_types.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/recovery/gradient_keeper.h"

namespace optstate::session {

// The gradients of a step in which an engine died: which the step still needs,
// and where they are found.
//
// Threads: not thread-safe; the job's lock guards it.
class RecoveredGradients {
 public:
  // The arguments must outlive this object.
  RecoveredGradients(JobContext* job, RankRoster* ranks)
      : job_(*job), ranks_(*ranks) {}

  // Finds the gradients of ranks that are not attached: segments kept by the
  // supervisor, and staging files.
  void FindGradients();
  // Takes the gradients of a rank that attaches.
  void AdoptGradients(const AttachSpec& spec);
  // Has the gradients of an attached rank outlive its session, if the step
  // needs them.
  void KeepGradients(uint32_t rank);
  // Returns the rest of the step that is being finished.
  scheduler::StepScheduler::Update RecoveryUpdate() const;
  bool LacksGradients(uint32_t rank) const;
  // Returns how much of the rank's gradient area, from its begin, has gradients
  // of the step.
  uint64_t RecoveryGradientBytes(uint32_t rank) const;
  // Drops the kept gradients of ranks that are away.
  void DropGradientsOfAbsent();
  // Removes staging files of sessions that do not return.
  void RemoveStaleStagingFiles() const;

 private:
  absl::Status MapGradients(KeptGradients kept);
  absl::Status MapStaging(uint32_t rank, uint64_t client_instance);
  void LogGradientsEnd(uint32_t rank, const absl::Status& why) const;

  JobContext& job_;
  RankRoster& ranks_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RECOVERY_RECOVERED_GRADIENTS_H_
