#ifndef OPTSTATE_SERVER_ENGINE_AWAITED_RANKS_H_
#define OPTSTATE_SERVER_ENGINE_AWAITED_RANKS_H_

#include <poll.h>

#include <vector>

#include "absl/time/time.h"
#include "proto/types/unique_fd.h"
#include "server/session/job.h"

namespace optstate {

// The ranks of the engine before, until they come back or cannot any more: a
// process on this machine has ended, or one that nobody here can watch has had
// its time.
//
// Threads: by one thread.
class AwaitedRanks {
 public:
  // One that cannot be watched has `patience`, from when it is first found
  // awaited.
  AwaitedRanks(Job* job, absl::Duration patience);

  // Looks whom the job awaits: whenever a session has ended.
  void Refresh();

  // What becomes readable when a process ends.
  void AppendTo(std::vector<pollfd>* fds) const;
  // When to call GiveUpEnded() at the latest.
  absl::Time deadline() const;
  void GiveUpEnded();

 private:
  struct Awaited {
    FormerRank rank;
    UniqueFd pidfd = UniqueFd();  // none: cannot be watched
    absl::Time deadline;          // of those
  };

  Awaited Watch(const FormerRank& rank) const;
  static bool HasEnded(const Awaited& one);

  Job* const job_;
  const absl::Duration patience_;
  std::vector<Awaited> awaited_;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_ENGINE_AWAITED_RANKS_H_
