#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_ROUNDS_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_ROUNDS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/session/job_context.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/transfer/load_log_room.h"
#include "server/session/transfer/load_state.h"

namespace optstate::session {

// Begins and ends load rounds; LoadRound has the participants.
//
// Threads: not thread-safe; the job's lock guards it.
class LoadRounds {
 public:
  // The arguments must outlive this object.
  LoadRounds(JobContext* job, RankRoster* ranks, LoadState* load,
             LoadLogRoom* log)
      : job_(*job), ranks_(*ranks), load_(*load), log_(*log) {}

  // Prepares the state for a round: clears what a former load left half written
  // in place, and all state of a failed job, which has not failed any more
  // then. On an error of the store the job is FAILED; what it failed at is kept
  // unless the error came while the state was being cleared.
  absl::Status Start();
  // Removes the rank from the round; `why` says to the other ranks what it has
  // done.
  void Leave(uint32_t rank, absl::string_view why);
  // Ends the round for all ranks that are in it.
  void Drop(const absl::Status& why);
  // Requires an interrupted load in place again from where it had written.
  void AdoptUnfinishedLoad();

 private:
  absl::Status RefuseStart(const absl::Status& why);

  JobContext& job_;
  RankRoster& ranks_;
  LoadState& load_;
  LoadLogRoom& log_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_ROUNDS_H_
