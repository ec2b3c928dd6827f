#ifndef OPTSTATE_SERVER_SESSION_STEPS_STEP_COMMITTER_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STEP_COMMITTER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/step_verdict.h"
#include "server/scheduler/step_scheduler.h"
#include "server/session/durability/job_durability.h"
#include "server/session/job_context.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/steps/step_decider.h"
#include "server/session/steps/step_state.h"
#include "storage/format/control_file.h"

namespace optstate::session {

// Takes a decided step: marks it, applies it, records it and makes it durable,
// in an order from which the next engine can go on at any instruction.
//
// Threads: not thread-safe; the job's lock guards it, and is given up while the
// state is written.
class StepCommitter {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    StepDecider* decider;
    JobDurability* durability;
  };
  explicit StepCommitter(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        decider_(*rooms.decider),
        durability_(*rooms.durability) {}

  absl::Status CommitDecision(const StepDecision& decision,
                              absl::Span<const uint8_t> updated);
  // Writes a decided step down as prepared: nothing of it is applied. Returns
  // the record that it would have.
  storage::StepRecord PrepareDecision(const StepDecision& decision,
                                      absl::Span<const uint8_t> updated,
                                      uint64_t digest, bool awaits_norm);
  // Notes, for the next engine too, that a prepared step is clipped by the norm
  // of all nodes.
  void NoteClipping(const StepVerdict& verdict);
  // Marks a step whose intent is written, which ApplyStep is to apply.
  void MarkStep(uint64_t step);
  // Records a step that is skipped.
  absl::Status SkipStep(const storage::StepRecord& next);
  // Does the remaining part of a step that is marked.
  absl::Status ApplyStep(const scheduler::StepScheduler::Update& update,
                         storage::StepRecord next);
  uint64_t skipped_steps() const { return skipped_steps_; }

 private:
  storage::StepRecord NextRecord(const StepDecision& decision) const;
  void WriteIntent(const storage::StepRecord& next,
                   absl::Span<const uint8_t> updated);
  void RecordStep(const storage::StepRecord& next);

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  StepDecider& decider_;
  JobDurability& durability_;
  uint64_t skipped_steps_ = 0;  // of this engine
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STEP_COMMITTER_H_
