#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_MOVES_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_MOVES_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "optstate/v1/types.pb.h"
#include "server/session/durability/rearrangement.h"
#include "server/session/durability/record_move.h"
#include "server/session/job_context.h"
#include "server/session/job_description.h"

namespace optstate::session {

// Moves the records of a job to other files, one move at a time, while steps go
// on. The call that asks for a move makes it: it gives the job's lock up while
// records are copied. Steps wait for its beginning, in which files are made,
// and for its end, the switch to them.
//
// Another call may end the move meanwhile (RecordMove), or wait for its end.
//
// Threads: not thread-safe; the job's lock guards it.
class RecordMoves final : public RecordMove {
 public:
  // Is the job's record_move until this object's end. `job` outlives it.
  explicit RecordMoves(JobContext* job) : job_(*job) {
    job->record_move = this;
  }
  ~RecordMoves() { job_.record_move = nullptr; }

  struct Moved {
    uint64_t bytes = 0;     // that were written
    absl::Duration waited;  // how long steps could not go on for it
  };

  // Moves the records to where the storage of `next`, the job's description
  // otherwise, has them. A move to there that is under way is awaited instead,
  // and another one ended. ABORTED: the move was ended; other errors are those
  // of Rearrangement. After an error the job is as it was, or, when it could
  // not be opened anew, works no more.
  absl::StatusOr<Moved> Run(const JobDescription& next);

  void Cancel(const absl::Status& why) override;
  void End(const absl::Status& why) override;

 private:
  struct Move {
    std::unique_ptr<Rearrangement> records;  // until it is over
    std::string what;                        // for the log
    absl::Time began_at;
    absl::Duration waited = absl::ZeroDuration();
    absl::Status cancelled;  // why it is to end
    // The call that makes it does not use the store without the lock any more.
    absl::Notification has_left_store;
    bool is_over = false;
    absl::StatusOr<Moved> result = absl::UnknownError("not over");
  };

  bool IsTo(const v1::StorageSettings& storage) const;
  absl::StatusOr<Moved> AwaitEnd();
  // Makes the files. Without records there is nothing to finish.
  absl::Status Begin(const JobDescription& next,
                     const std::shared_ptr<Move>& move);
  absl::StatusOr<Moved> Switch(Move* move);
  // Removes what is left of the move, and says in the log how it ended.
  void Finish(Move* move, absl::StatusOr<Moved> result);

  JobContext& job_;
  // The move that is under way, shared with the calls that wait for it.
  std::shared_ptr<Move> move_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_MOVES_H_
