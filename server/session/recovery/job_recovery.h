#ifndef OPTSTATE_SERVER_SESSION_RECOVERY_JOB_RECOVERY_H_
#define OPTSTATE_SERVER_SESSION_RECOVERY_JOB_RECOVERY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/session/job_context.h"
#include "server/session/job_types.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/recovery/recovered_gradients.h"
#include "server/session/recovery/recovered_step.h"
#include "server/session/steps/micro_step_summer.h"
#include "server/session/steps/speculator.h"
#include "server/session/steps/step_committer.h"
#include "server/session/steps/step_stager.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/load_applier.h"

namespace optstate::session {

// Finishes a step in which the previous engine died, as it was decided, once
// the gradients that it needs are there; or gives it up when they are lost.
// Keeps a prepared step, of this engine or a former one, in the same way.
//
// Threads: not thread-safe; the job's lock guards it, and is given up while the
// state is written.
class JobRecovery {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    MicroStepSummer* sums;
    StepStager* stager;
    Speculator* speculator;
    StepCommitter* committer;
    RecoveredGradients* gradients;
    LoadApplier* applier;
  };
  explicit JobRecovery(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        sums_(*rooms.sums),
        stager_(*rooms.stager),
        speculator_(*rooms.speculator),
        committer_(*rooms.committer),
        gradients_(*rooms.gradients),
        applier_(*rooms.applier) {}

  // Adopts the step in which an engine died. An error is why the job is FAILED.
  absl::Status AdoptStep();
  // Finishes the step if no gradients lack, and answers the ranks that wait.
  // The recovery is then over, also when the job has failed in it.
  void FinishStepIfPossible();
  // Returns why a rank must not attach while the step is being finished. A
  // process that replaces a rank whose gradients it needs fails the job.
  absl::Status AdmitToRecovery(const AttachSpec& spec);
  // Keeps a step that this engine has prepared until its verdict is known. The
  // recovery then is of this step, which needs the gradients that it was
  // prepared with.
  void KeepPrepared(const storage::StepRecord& record,
                    absl::Span<const storage::StepIntentGroup> groups,
                    double gradient_limit, absl::Span<const uint8_t> updated,
                    absl::Span<const uint64_t> pushed_by);
  // Gives the prepared step up: what was staged of it is dropped, and the step
  // can be taken again.
  void DropPrepared();
  // Gives the step up: the gradients of this rank are lost.
  void FailRecovery(uint32_t rank);

 private:
  absl::Status PrepareRecovery(uint64_t step);
  void AdoptPrepared(uint64_t step);
  absl::Status CheckGradientsMayCome() const;
  void EndRecovery();
  void RemoveGradientsOfAbsent();
  absl::Status LostGradientsError(uint64_t rank) const;
  absl::Status LostInsideError(absl::string_view why) const;
  absl::Status MixedStepsError(absl::string_view why) const;

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  MicroStepSummer& sums_;
  StepStager& stager_;
  Speculator& speculator_;
  StepCommitter& committer_;
  RecoveredGradients& gradients_;
  LoadApplier& applier_;
  RecoveredStep spare_;  // the memory of the last one, for the next
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RECOVERY_JOB_RECOVERY_H_
