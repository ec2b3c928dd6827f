// Handles ranks that disagree: one loads while another one takes a step.
//
// Loads and steps are collective: a load is over when all ranks have finished
// it, a step when all have committed it. So the ranks, which go through one
// sequence of both, are never more than a part of one of them apart: while a
// rank is in a load, the others are in that load too or have not reached it,
// and their earlier calls have been answered. None of them waits with a commit,
// or the end of a micro-step that waits for others, for that would be of a
// later part of the sequence, and none sends one before beginning the load.
// The following calls may still come, and none is a new commit:
//   - A commit that is repeated because its answer was lost is of the recorded
//     step, and is answered from the record.
//   - A commit of a step in which an engine died comes while that step is being
//     finished, and nothing can be loaded then.
//   - A rank whose connection was lost in a load has left the load, which is
//     then over for all ranks; the rank begins it again before anything else.
//   - Gradients may be pushed at any time, and no rank waits in a push.
// So a rank that commits during a load, or begins one during a commit, has
// another sequence, and each would wait for the other until a time-out. All
// ranks are notified instead, once each: waiting ranks at once, the others at
// the call in which they would wait.

#include "server/session/steps/agreement.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/observe/peer_log.h"
#include "spdlog/spdlog.h"

namespace optstate::session {

absl::Status Agreement::AgreeToStep(uint32_t rank, absl::string_view what) {
  absl::Status agreed =
      std::exchange(ranks_.session(rank).disagreement, absl::OkStatus());
  for (uint32_t other = 0; agreed.ok() && other < ranks_.size(); ++other) {
    if (!load_.round.begun(other)) continue;
    agreed = DisagreementError(other, rank, what);
    NotifyDisagreement(rank, agreed);
  }
  if (!agreed.ok()) stager_.DropStaged(rank);
  return agreed;
}

absl::Status Agreement::AgreeToLoad(uint32_t rank) {
  absl::Status agreed =
      std::exchange(ranks_.session(rank).disagreement, absl::OkStatus());
  for (uint32_t other = 0; agreed.ok() && other < ranks_.size(); ++other) {
    if (other == rank || !sums_.IsWaiting(other)) continue;
    agreed = DisagreementError(rank, other,
                               step_.open_step.commit(other).committed
                                   ? "has committed"
                                   : "has ended a micro-step of");
    NotifyDisagreement(rank, agreed);
  }
  if (!agreed.ok()) stager_.DropStaged(rank);
  return agreed;
}

absl::Status Agreement::DisagreementError(uint32_t loading, uint32_t stepping,
                                          absl::string_view what) const {
  return absl::FailedPreconditionError(absl::StrCat(
      "the ranks disagree: rank ", loading,
      " has begun a load (of a state, or of parameters that were changed in "
      "place), and rank ",
      stepping, " ", what, " step ", job_.record().committed_step + 1,
      " without it. The job is unchanged and what was staged of the step is "
      "dropped: load, or change parameters, on every rank alike, and take the "
      "step again"));
}

// Notifies all ranks but `by`, whose call revealed the disagreement and has its
// own answer.
void Agreement::NotifyDisagreement(uint32_t by, const absl::Status& status) {
  observe::LogRepeated(spdlog::level::warn, "ranks disagree",
                       absl::StrCat("job ", job_.options.name), "{}: job={}",
                       status.ToString(), job_.options.name);
  std::vector<uint32_t> waiting;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (rank == by || ranks_.state(rank) != RankState::kAttached) continue;
    if (sums_.IsWaiting(rank)) {
      waiting.push_back(rank);
    } else if (!load_.round.begun(rank)) {
      ranks_.session(rank).disagreement = status;
    }
  }
  rounds_.Drop(status);
  // Answers come first: a rank's drop may be reported to ranks that still wait.
  for (const uint32_t rank : waiting) {
    const OpenStep::RankCommit& commit = step_.open_step.commit(rank);
    if (commit.committed) {
      ranks_.Answer(rank, commit.request_id, status, StepOutcome{});
    }
    step_.open_step.DropRank(rank);
    sums_.AnswerEnding(rank, status);
  }
  for (const uint32_t rank : waiting) stager_.DropStaged(rank);
}

}  // namespace optstate::session
