#ifndef OPTSTATE_SERVER_SESSION_STEPS_SPECULATOR_H_
#define OPTSTATE_SERVER_SESSION_STEPS_SPECULATOR_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/job_context.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/steps/foreseen_commit.h"
#include "server/session/steps/step_decider.h"
#include "server/session/steps/step_state.h"

namespace optstate::session {

// Begins a step before it is decided, and rolls it back when the decision is
// another one: as if nothing were to be skipped or clipped, and only parameters
// of which all gradients are there, when all ranks are in the step.
//
// The first commit of a rank says how the step is taken; before it, that is
// guessed (ForeseenCommit). Updates that were begun with another commit than
// the step's are rolled back before the step is taken, so a wrong guess costs
// time alone.
//
// An error of the store or the executor fails the job, and is the answer to all
// ranks that wait in the step.
//
// Threads: not thread-safe; the job's lock guards it, and is given up while the
// state is written. Allocates in Reset and in errors alone.
class Speculator {
 public:
  // The elements that SpeculateOnPushed() updates at a time, unless one
  // parameter has more: as many as delay a push by some milliseconds.
  static constexpr uint64_t kBatchElements = 1 << 20;
  // The elements from which on it updates at all: what each time costs grows
  // with the number of parameters, and is small beside the update of as many.
  // A small layout is updated in kBatchesMax parts at most.
  static constexpr uint64_t kBatchElementsMin = 1 << 17;
  static constexpr uint64_t kBatchesMax = 16;

  // The arguments must outlive this object.
  Speculator(JobContext* job, RankRoster* ranks, StepState* step,
             StepDecider* decider)
      : job_(*job), ranks_(*ranks), step_(*step), decider_(*decider) {}

  // Takes the sizes of the present shape, and forgets all commits.
  void Reset();

  // Updates parameters early when some ranks, `rank` being the last, have
  // committed and others have not.
  void Speculate(uint32_t rank);
  // Updates some parameters early that were pushed as a whole. Returns whether
  // there may be more.
  bool SpeculateOnPushed();

  // Called after the rank has pushed parameters [first, end).
  void NotePushed(uint32_t rank, uint32_t first, uint32_t end);
  // Called before the rank pushes parameters [first, end). Rolls back when one
  // of them was updated with its former gradients.
  absl::Status PrepareForPush(uint32_t rank, uint32_t first, uint32_t end);
  // Called before the decided step is taken. Rolls back updates that were begun
  // otherwise.
  absl::Status PrepareForDecision(const StepDecision& decision,
                                  const CommitSpec& spec);

  // Rolls back what was speculated about the open step. An error fails the job,
  // whose files then stay as they are: the next engine rolls back.
  absl::Status RollBackSpeculation();
  // Rolls back, and begins nothing more of the step that is open: a rank is
  // about to read parameters in the memory that it shares with the engine, at
  // any time until it commits.
  absl::Status HoldOpenStep();

  // Adds how often steps were begun early to `job`. Needs no idle job.
  void Describe(v1::Job* job) const;

 private:
  // The progress of a parameter in the open step.
  enum class Progress : uint8_t { kAwaited, kReady, kBegun };

  void ForgetProgress();
  void NoteIfReady(uint32_t parameter);
  void FindReady();
  bool HasSpeculated() const;
  absl::Status Fail(const absl::Status& why);
  bool MayBegin() const;
  const CommitSpec* ExpectedCommit() const;
  bool HaveCommitsEqual(uint32_t rank) const;
  void Begin(const CommitSpec& spec, absl::Span<const uint8_t> updated);

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  StepDecider& decider_;
  ForeseenCommit foreseen_;
  // True when the updates begun in the open step follow foreseen_.
  bool is_guess_ = false;
  std::vector<Progress> progress_;  // by parameter
  // Parameters that were pushed as a whole, in that order. Some may have been
  // begun by a commit since.
  std::vector<uint32_t> ready_;
  uint64_t ready_elements_ = 0;
  // True when FindReady() has to look at all parameters, pushed before or not.
  bool must_find_ready_ = true;
  uint64_t batch_elements_min_ = 0;
  std::vector<uint8_t> batch_;  // by parameter; zeros between calls
  uint64_t held_step_ = 0;      // see HoldOpenStep()
  uint64_t last_begun_step_ = 0;
  uint64_t steps_begun_ = 0;        // of this engine
  uint64_t steps_rolled_back_ = 0;  // by this engine
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_SPECULATOR_H_
