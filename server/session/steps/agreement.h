#ifndef OPTSTATE_SERVER_SESSION_STEPS_AGREEMENT_H_
#define OPTSTATE_SERVER_SESSION_STEPS_AGREEMENT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/session/job_context.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/steps/micro_step_summer.h"
#include "server/session/steps/step_stager.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/load_rounds.h"
#include "server/session/transfer/load_state.h"

namespace optstate::session {

// Finds ranks that disagree: one loads while another one takes a step. Both
// calls return an error when another rank is in a load, or waits in a step; all
// ranks concerned have then been notified, or will be at their next call.
//
// Threads: not thread-safe; the job's lock guards it.
class Agreement {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    MicroStepSummer* sums;
    StepStager* stager;
    LoadState* load;
    LoadRounds* rounds;
  };
  explicit Agreement(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        sums_(*rooms.sums),
        stager_(*rooms.stager),
        load_(*rooms.load),
        rounds_(*rooms.rounds) {}

  absl::Status AgreeToStep(uint32_t rank, absl::string_view what);
  absl::Status AgreeToLoad(uint32_t rank);

 private:
  absl::Status DisagreementError(uint32_t loading, uint32_t stepping,
                                 absl::string_view what) const;
  void NotifyDisagreement(uint32_t by, const absl::Status& status);

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  MicroStepSummer& sums_;
  StepStager& stager_;
  LoadState& load_;
  LoadRounds& rounds_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_AGREEMENT_H_
