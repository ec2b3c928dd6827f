#ifndef OPTSTATE_SERVER_SESSION_RANKS_LOSS_NOTIFIER_H_
#define OPTSTATE_SERVER_SESSION_RANKS_LOSS_NOTIFIER_H_

#include <cstdint>
#include <string>

#include "server/session/job_context.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/steps/micro_step_summer.h"
#include "server/session/steps/step_stager.h"
#include "server/session/steps/step_state.h"

namespace optstate::session {

// Notifies ranks that wait in a step of lost ranks: by a notice, or by
// aborting them, as on_rank_loss says. See RankLosses.
//
// Threads: not thread-safe; the job's lock guards it.
class LossNotifier {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    MicroStepSummer* sums;
    StepStager* stager;
  };
  explicit LossNotifier(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        sums_(*rooms.sums),
        stager_(*rooms.stager) {}

  // Notifies ranks waiting in the open step that this one was lost; they
  // already know of earlier losses.
  void NotifyRankLost(uint32_t rank);
  // Notifies a rank that begins to wait of all lost ranks.
  void NotifyExistingLosses(uint32_t rank);
  // Notes a call of the rank, which shows that it has had its answer.
  void NoteAcknowledged(uint32_t rank);

 private:
  void AbortForLoss(uint32_t lost, const std::string& what);

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  MicroStepSummer& sums_;
  StepStager& stager_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RANKS_LOSS_NOTIFIER_H_
