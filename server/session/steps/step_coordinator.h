#ifndef OPTSTATE_SERVER_SESSION_STEPS_STEP_COORDINATOR_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STEP_COORDINATOR_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/session/drain_gate.h"
#include "server/session/job_context.h"
#include "server/session/job_types.h"
#include "server/session/ranks/loss_notifier.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/recovery/job_recovery.h"
#include "server/session/steps/agreement.h"
#include "server/session/steps/micro_step_summer.h"
#include "server/session/steps/speculator.h"
#include "server/session/steps/staging_marks.h"
#include "server/session/steps/step_committer.h"
#include "server/session/steps/step_decider.h"
#include "server/session/steps/step_preparer.h"
#include "server/session/steps/step_stager.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/load_rounds.h"
#include "server/session/transfer/load_state.h"

namespace optstate::session {

// Takes the ranks' calls of a step, checks their order, and closes the step
// when all ranks have committed; see Job.
//
// Threads: not thread-safe; the job's lock guards it, and is given up while a
// call waits for the end of a pause or the state is written.
class StepCoordinator {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    StagingMarks* marks;
    MicroStepSummer* sums;
    StepStager* stager;
    StepDecider* decider;
    Speculator* speculator;
    StepCommitter* committer;
    LossNotifier* losses;
    Agreement* agreement;
    JobRecovery* recovery;
    StepPreparer* preparer;
    LoadState* load;
    LoadRounds* rounds;
    DrainGate* gate;
  };
  explicit StepCoordinator(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        marks_(*rooms.marks),
        sums_(*rooms.sums),
        stager_(*rooms.stager),
        decider_(*rooms.decider),
        speculator_(*rooms.speculator),
        committer_(*rooms.committer),
        losses_(*rooms.losses),
        agreement_(*rooms.agreement),
        recovery_(*rooms.recovery),
        preparer_(*rooms.preparer),
        load_(*rooms.load),
        rounds_(*rooms.rounds),
        gate_(*rooms.gate) {}

  absl::Status Push(uint32_t rank, uint64_t step, uint32_t micro_step,
                    uint32_t first_parameter, uint32_t parameter_count);
  // See Job.
  bool WorkAhead(uint32_t rank);
  void EndMicroStep(uint32_t rank, uint64_t request_id, uint64_t step,
                    uint32_t micro_step);
  void Commit(uint32_t rank, uint64_t request_id, const CommitSpec& spec);
  absl::Status Abort(uint32_t rank, uint64_t step);

 private:
  absl::Status CheckStep(uint32_t rank, uint64_t step) const;
  bool IsOfRecoveredStep(uint32_t rank, uint64_t step) const;
  absl::Status CheckEnding(uint32_t rank, uint64_t step) const;
  absl::Status CheckCommit(uint32_t rank, const CommitSpec& spec,
                           bool* repeated) const;
  absl::Status CheckCommitsEqual() const;
  absl::Status TakeStep(StepOutcome* outcome,
                        absl::Span<const uint8_t>* updated);
  void CloseStep();
  // Brings some records in memory up to date that lag behind devices. Returns
  // whether there are more.
  bool CatchUp();

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  StagingMarks& marks_;
  MicroStepSummer& sums_;
  StepStager& stager_;
  StepDecider& decider_;
  Speculator& speculator_;
  StepCommitter& committer_;
  LossNotifier& losses_;
  Agreement& agreement_;
  JobRecovery& recovery_;
  StepPreparer& preparer_;
  LoadState& load_;
  LoadRounds& rounds_;
  DrainGate& gate_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STEP_COORDINATOR_H_
