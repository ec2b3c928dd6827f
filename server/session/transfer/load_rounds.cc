#include "server/session/transfer/load_rounds.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate::session {

// Clears what a former load left half written in place, and all state of a
// failed job, so that arrays which this load leaves out are those of a new job
// and not a mixture.
absl::Status LoadRounds::Start() {
  log_.DropLog();
  storage::StepRecord next = job_.record();
  if (!job_.failure.ok()) {
    next.load_required_from = 0;
    next.load_touched_from = 0;
  }
  if (next.load_touched_from == storage::kNoParameter) return absl::OkStatus();
  const uint32_t first = next.load_touched_from;
  next.load_required_from = std::min(next.load_required_from, first);
  storage::PublishRecord(next, job_.tier->control());
  job_.scheduler->ForgetStep();
  // From here on the job is LOADING, not FAILED, also after a restart.
  job_.tier->control()->step_in_progress.store(0, std::memory_order_release);
  job_.tier->control()->step_given_up.store(0, std::memory_order_release);
  job_.failure = absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(
      job_.MakeCountingPass([&] { return job_.scheduler->ClearState(first); }));
  next.load_touched_from = storage::kNoParameter;
  storage::PublishRecord(next, job_.tier->control());
  return absl::OkStatus();
}

// Removes the rank from the round. The log holds values of all ranks, so none
// of it can be used when one rank does not go on: the round is over for the
// others too. Without a log they go on: their values loaded in place stay, and
// the rank's own part is still required.
void LoadRounds::Leave(uint32_t rank, absl::string_view why) {
  const bool had_begun = load_.round.begun(rank);
  load_.round.DropRank(rank);
  if (!had_begun) return;
  if (!job_.HasWholeState() && load_.staged.empty())
    return AdoptUnfinishedLoad();
  Drop(absl::AbortedError(absl::StrCat(
      "rank ", rank, " ", why,
      " before all ranks had finished the load: the job is as it was before, "
      "load again")));
}

// Ends the round for the ranks that are in it. The job is unchanged, except for
// parameters that have no valid state.
void LoadRounds::Drop(const absl::Status& why) {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!load_.round.finished(rank)) continue;
    ranks_.Answer(rank, load_.round.request_id(rank), why, StepOutcome{});
  }
  load_.round.Drop(why);
  log_.DropLog();
  AdoptUnfinishedLoad();
}

// Requires an interrupted load in place again from where it had written, and
// likewise any load of a former build.
void LoadRounds::AdoptUnfinishedLoad() {
  if (job_.record().load_touched_from == storage::kNoParameter) return;
  storage::StepRecord next = job_.record();
  next.load_required_from =
      std::min(next.load_required_from, next.load_touched_from);
  storage::PublishRecord(next, job_.tier->control());
}

}  // namespace optstate::session
