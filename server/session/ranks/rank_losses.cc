#include "server/session/ranks/rank_losses.h"

#include "server/session/transition_check.h"

namespace optstate::session {

LossState RankLosses::state(uint32_t rank) const {
  const storage::RankMark& mark = job_.rank_mark(rank);
  if (mark.lost_at_step == 0) return LossState::kNone;
  if (mark.loss_unacknowledged == 0) return LossState::kAcknowledged;
  return notified_[rank] ? LossState::kNotified : LossState::kNotNotified;
}

bool RankLosses::IsUnacknowledged(uint32_t rank) const {
  const LossState loss = state(rank);
  return loss == LossState::kNotNotified || loss == LossState::kNotified;
}

void RankLosses::CheckMayBecome(uint32_t rank, LossState to) const {
  CheckTransition("the loss of rank", rank, state(rank), to);
}

// An awaited rank that is given up can be lost already: the engine before died
// as it noted that.
void RankLosses::Note(uint32_t rank, uint64_t step, bool in_open_step) {
  const LossState to =
      in_open_step ? LossState::kNotNotified : LossState::kAcknowledged;
  if (state(rank) != to) CheckMayBecome(rank, to);
  notified_[rank] = false;
  storage::RankMark& mark = job_.rank_mark(rank);
  mark.loss_unacknowledged = in_open_step ? 1 : 0;
  mark.lost_at_step = step;
}

void RankLosses::NoteNotified(uint32_t rank) {
  CheckMayBecome(rank, LossState::kNotified);
  notified_[rank] = true;
}

void RankLosses::NoteAcknowledged(uint32_t rank) {
  CheckMayBecome(rank, LossState::kAcknowledged);
  notified_[rank] = false;
  job_.rank_mark(rank).loss_unacknowledged = 0;
}

void RankLosses::Forget(uint32_t rank) {
  if (state(rank) != LossState::kNone) CheckMayBecome(rank, LossState::kNone);
  notified_[rank] = false;
  job_.rank_mark(rank).lost_at_step = 0;
  job_.rank_mark(rank).loss_unacknowledged = 0;
}

}  // namespace optstate::session
