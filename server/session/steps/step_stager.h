#ifndef OPTSTATE_SERVER_SESSION_STEPS_STEP_STAGER_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STEP_STAGER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/session/job_context.h"
#include "server/session/job_types.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/steps/micro_step_summer.h"
#include "server/session/steps/speculator.h"
#include "server/session/steps/staging_marks.h"
#include "server/session/steps/step_state.h"

namespace optstate::session {

// Stages the gradients of the open step, and drops what is staged.
//
// Threads: not thread-safe; the job's lock guards it.
class StepStager {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    StagingMarks* marks;
    MicroStepSummer* sums;
    Speculator* speculator;
  };
  explicit StepStager(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        marks_(*rooms.marks),
        sums_(*rooms.sums),
        speculator_(*rooms.speculator) {}

  // Stages a rank's gradients of parameters [first, end).
  absl::Status Stage(uint32_t rank, uint64_t step, uint32_t micro_step,
                     uint32_t first, uint32_t end);
  // Takes the statistics of gradients that some ranks lack, once all ranks have
  // committed.
  void StagePartial();
  // Drops what the rank has staged, and its commit.
  void DropStaged(uint32_t rank);
  // Restores what ranks had staged, before the first rank is attached.
  void RestoreStaged();
  // Sets, by parameter, 1 where the step updates it; see OpenStep.
  absl::Status ResolveParameters(absl::Span<const uint8_t>* updated);
  // Returns what the rank finds staged when it attaches.
  std::vector<StagedRange> StagedRanges(uint32_t rank) const;

 private:
  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  StagingMarks& marks_;
  MicroStepSummer& sums_;
  Speculator& speculator_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STEP_STAGER_H_
