#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_MOVE_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_MOVE_H_

#include "absl/status/status.h"

namespace optstate::session {

// The ends of a move of a job's records to other files (RecordMoves), which
// goes on while the job is used. For the rooms below the one that moves them.
//
// Threads: the job's lock is held.
class RecordMove {
 public:
  RecordMove() = default;
  RecordMove(const RecordMove&) = delete;
  RecordMove& operator=(const RecordMove&) = delete;

  // Has the move that is under way, if any, end soon with this error. The job
  // need not be idle.
  virtual void Cancel(const absl::Status& why) = 0;
  // Ends the move that is under way, if any, with this error: on return nothing
  // of it is left, and it uses the store no more. Waits for a few reads or
  // writes at most. The job is idle.
  virtual void End(const absl::Status& why) = 0;

 protected:
  ~RecordMove() = default;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_MOVE_H_
