#ifndef OPTSTATE_SERVER_SESSION_STEPS_STEP_DECIDER_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STEP_DECIDER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/session/job_context.h"
#include "server/session/job_types.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/steps/step_state.h"
#include "storage/format/step_intent.h"

namespace optstate::session {

// The decision about a step.
struct StepDecision {
  StepOutcome outcome;
  bool clipped = false;  // some group's factor is not 1 / grad_scale
};

// Decides a step that all ranks have committed: whether it is applied, and by
// what its gradients are multiplied. Keeps the norms that it found.
//
// Threads: not thread-safe; the job's lock guards it. Allocates in Reset and in
// errors alone.
class StepDecider {
 public:
  // The arguments must outlive this object.
  StepDecider(JobContext* job, RankRoster* ranks, StepState* step)
      : job_(*job), ranks_(*ranks), step_(*step) {}

  // Takes the sizes of the present shape, and forgets all norms.
  void Reset();
  StepDecision Decide(uint64_t step, absl::Span<const uint8_t> updated);
  // Returns the groups of the step that was decided last, or speculated about.
  absl::Span<const storage::StepIntentGroup> groups() const {
    return intent_groups_;
  }

  // Returns the sum of squares of what was staged of these parameters.
  double SumOfSquares(absl::Span<const uint8_t> updated);
  // Returns the groups of a step in which nothing is clipped.
  absl::Span<const storage::StepIntentGroup> GroupsWithoutClipping(
      const CommitSpec& spec);

  // Keeps the norms by parameter; pushes of the next step overwrite the sums.
  void KeepGradientNorms(uint64_t step, absl::Span<const uint8_t> updated);
  // Returns FAILED_PRECONDITION when the norms are not of the committed step.
  absl::Status CheckGradientNorms() const;
  // Returns the norms by parameter; -1: not updated.
  absl::Span<const double> gradient_norms() const { return gradient_norms_; }

 private:
  double ComputeNorm(double norm_type, absl::Span<const uint8_t> updated,
                     double sum_of_squares);
  double ComputeGroupNorm(size_t group, const CommitSpec& spec,
                          absl::Span<const uint8_t> updated,
                          double sum_of_squares);
  void ComputeGroupNorms(const CommitSpec& spec,
                         absl::Span<const uint8_t> updated);

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  std::vector<storage::StepIntentGroup> intent_groups_;
  std::vector<double> group_norms_;        // sums of squares first, then norms
  std::vector<uint8_t> updated_of_group_;  // scratch
  std::vector<double> gradient_norms_;     // by parameter
  uint64_t gradient_norms_step_ = 0;       // 0: none of this engine
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STEP_DECIDER_H_
