#ifndef OPTSTATE_SERVER_SESSION_RANKS_FORMER_RANK_H_
#define OPTSTATE_SERVER_SESSION_RANKS_FORMER_RANK_H_

#include <sys/types.h>

#include <cstdint>

namespace optstate::session {

// The process of a rank, as reported by the kernel.
struct RankProcess {
  pid_t pid = 0;  // 0: not known (another machine, another pid namespace)
  // See os::ProcessStat; 0: not known. A later process with the same pid
  // has another value.
  uint64_t start_ticks = 0;

  friend bool operator==(const RankProcess&, const RankProcess&) = default;
};

// A rank that was attached when the engine before this one ended, or since then
// while a step of that engine was unfinished.
struct FormerRank {
  uint32_t rank = 0;
  uint64_t client_instance = 0;
  RankProcess process = {};

  friend bool operator==(const FormerRank&, const FormerRank&) = default;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RANKS_FORMER_RANK_H_
