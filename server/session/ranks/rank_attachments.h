#ifndef OPTSTATE_SERVER_SESSION_RANKS_RANK_ATTACHMENTS_H_
#define OPTSTATE_SERVER_SESSION_RANKS_RANK_ATTACHMENTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/session/drain_gate.h"
#include "server/session/job_context.h"
#include "server/session/job_types.h"
#include "server/session/ranks/loss_notifier.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/recovery/job_recovery.h"
#include "server/session/recovery/recovered_gradients.h"
#include "server/session/steps/step_stager.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/load_rounds.h"

namespace optstate::session {

// Attaches and detaches ranks, and gives up those that do not return. Each
// change is in the rank's mark in an order from which the next engine can go
// on.
//
// Threads: not thread-safe; the job's lock guards it.
class RankAttachments {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    StepStager* stager;
    LossNotifier* losses;
    RecoveredGradients* gradients;
    JobRecovery* recovery;
    LoadRounds* rounds;
    DrainGate* gate;
  };
  explicit RankAttachments(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        stager_(*rooms.stager),
        losses_(*rooms.losses),
        gradients_(*rooms.gradients),
        recovery_(*rooms.recovery),
        rounds_(*rooms.rounds),
        gate_(*rooms.gate) {}

  absl::StatusOr<AttachResult> Attach(const AttachSpec& spec);
  // Ends a rank's session. `for_good`: the rank does not return.
  void DetachLocked(uint32_t rank, bool for_good);
  // See Job::NoteFarewell.
  void NoteFarewell(uint32_t rank, uint64_t client_instance);
  // Takes a rank that is away for lost.
  void GiveUpAbsent(uint32_t rank, uint64_t client_instance);

 private:
  absl::Status CheckMayAttach(const AttachSpec& spec) const;
  void ReplaceInstance(const AttachSpec& spec);
  bool IsNeededByNextEngine(uint32_t rank) const;
  // `in_step`: the rank is lost in an open step.
  void BeginLoss(uint32_t rank, bool in_step);
  void EndLoss(uint32_t rank, bool in_step);

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  StepStager& stager_;
  LossNotifier& losses_;
  RecoveredGradients& gradients_;
  JobRecovery& recovery_;
  LoadRounds& rounds_;
  DrainGate& gate_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RANKS_RANK_ATTACHMENTS_H_
