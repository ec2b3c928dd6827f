#include "server/session/ranks/loss_notifier.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/observe/peer_log.h"
#include "spdlog/spdlog.h"

namespace optstate::session {
namespace {

std::string LostAt(uint32_t rank, uint64_t step) {
  return absl::StrCat("rank ", rank, " lost at step ", step);
}

std::string WaitingFor(const std::string& lost) {
  return absl::StrCat(lost, ", waiting for its return");
}

}  // namespace

// Notifies ranks waiting in the open step; they already know of earlier losses.
void LossNotifier::NotifyRankLost(uint32_t rank) {
  const std::string what = LostAt(rank, job_.record().committed_step + 1);
  observe::LogRepeated(spdlog::level::warn, "rank lost",
                       absl::StrCat("job ", job_.options.name),
                       "{}: job={} waiting=\"{}\"", what, job_.options.name,
                       step_.open_step.Describe());
  if (job_.options.config.engine().on_rank_loss() == v1::RANK_LOSS_ABORT) {
    return AbortForLoss(rank, what);
  }
  const std::string notice = WaitingFor(what);
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    if (sums_.IsWaiting(other)) ranks_.Notify(other, notice);
  }
}

// Aborts the waiting ranks. Only a later call of one of them shows that they
// know of the loss, see NoteAcknowledged().
void LossNotifier::AbortForLoss(uint32_t lost, const std::string& what) {
  const absl::Status aborted = absl::AbortedError(
      absl::StrCat(what, "; what this rank staged is dropped"));
  sums_.AnswerCommits(aborted, StepOutcome{});
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    if (!sums_.IsWaiting(other)) continue;
    sums_.AnswerEnding(other, aborted);
    stager_.DropStaged(other);
    ranks_.session(other).aborted_for_loss = true;
    if (ranks_.losses().state(lost) != LossState::kNotified)
      ranks_.losses().NoteNotified(lost);
  }
}

// Notes another call of the rank, which shows that it has had its answer.
void LossNotifier::NoteAcknowledged(uint32_t rank) {
  if (rank >= ranks_.size() ||
      !std::exchange(ranks_.session(rank).aborted_for_loss, false)) {
    return;
  }
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    if (ranks_.losses().state(other) == LossState::kNotified)
      ranks_.losses().NoteAcknowledged(other);
  }
}

// Notifies a rank that begins to wait of all lost ranks.
void LossNotifier::NotifyExistingLosses(uint32_t rank) {
  const bool aborts =
      job_.options.config.engine().on_rank_loss() == v1::RANK_LOSS_ABORT;
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    const LossState loss = ranks_.losses().state(other);
    if (loss == LossState::kNone) continue;
    const uint64_t step = job_.rank_mark(other).lost_at_step;
    if (aborts && loss == LossState::kNotNotified &&
        step == job_.record().committed_step + 1) {
      return AbortForLoss(other, LostAt(other, step));
    }
    ranks_.Notify(rank, WaitingFor(LostAt(other, step)));
  }
}

}  // namespace optstate::session
