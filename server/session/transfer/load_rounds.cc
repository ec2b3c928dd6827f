#include "server/session/transfer/load_rounds.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate::session {

// Clears what a former load left half written in place, and all state of a
// failed job, so that arrays which this load leaves out are those of a new job
// and not a mixture. Nothing is given up for a load that cannot be made because
// the store has ended: another engine can still finish what this one failed at.
absl::Status LoadRounds::Start() {
  storage::StepRecord next = job_.record();
  if (!job_.failure.ok()) {
    next.load_required_from = 0;
    next.load_touched_from = 0;
  }
  if (next.load_touched_from == storage::kNoParameter) {
    log_.DropLog();
    return absl::OkStatus();
  }
  const absl::Status usable = job_.store->status();
  if (!usable.ok()) return RefuseStart(usable);
  const uint32_t first = next.load_touched_from;
  next.load_required_from = std::min(next.load_required_from, first);
  storage::PublishRecord(next, job_.tier->control());
  log_.DropLog();  // not sealed any more, if it was
  const absl::Status forgotten = job_.AccessRecords(
      [&] { return job_.scheduler->ForgetStep(/*is_whole=*/first == 0); });
  if (!forgotten.ok()) return RefuseStart(forgotten);
  // After a restart the job is LOADING, not FAILED. In this engine it is when
  // the state has been cleared.
  job_.tier->control()->step_in_progress.store(0, std::memory_order_release);
  job_.tier->control()->step_given_up.store(0, std::memory_order_release);
  const absl::Status cleared =
      job_.MakeCountingPass([&] { return job_.scheduler->ClearState(first); });
  if (!cleared.ok()) return job_.FailInside("the start of a load", cleared);
  job_.failure = absl::OkStatus();
  next.load_touched_from = storage::kNoParameter;
  storage::PublishRecord(next, job_.tier->control());
  return absl::OkStatus();
}

absl::Status LoadRounds::RefuseStart(const absl::Status& why) {
  if (job_.failure.ok()) return job_.FailInside("the start of a load", why);
  return Annotate(
      why, absl::StrCat("job \"", job_.options.name,
                        "\" cannot be loaded in this engine, and is as it was: "
                        "its store has ended. When the cause is mended, optctl "
                        "recover ",
                        job_.options.name, " goes on with the job. The cause"));
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
