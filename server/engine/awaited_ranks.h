#ifndef OPTSTATE_SERVER_ENGINE_AWAITED_RANKS_H_
#define OPTSTATE_SERVER_ENGINE_AWAITED_RANKS_H_

#include <poll.h>

#include <vector>

#include "absl/time/time.h"
#include "proto/types/unique_fd.h"
#include "server/session/job.h"

namespace optstate::engine {

// The ranks of the previous engine, until they come back or cannot any more:
// the rank's process on this machine has ended, or a rank that cannot be
// watched from here has exceeded its time.
//
// Threads: used by one thread.
class AwaitedRanks {
 public:
  // A rank that cannot be watched is given `patience`, from when it is first
  // found awaited.
  AwaitedRanks(session::Job* job, absl::Duration patience);

  // Looks up the ranks that the job awaits; to be called whenever a session has
  // ended.
  void Refresh();

  // Appends the fds that become readable when a process ends.
  void AppendTo(std::vector<pollfd>* fds) const;
  // When to call GiveUpEnded() at the latest.
  absl::Time deadline() const;
  void GiveUpEnded();

 private:
  struct Awaited {
    session::FormerRank rank;
    UniqueFd pidfd = UniqueFd();  // -1: cannot be watched
    absl::Time deadline;          // of ranks that cannot be watched
  };

  Awaited Watch(const session::FormerRank& rank) const;
  static bool HasEnded(const Awaited& one);

  session::Job* const job_;
  const absl::Duration patience_;
  std::vector<Awaited> awaited_;
};

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_AWAITED_RANKS_H_
