#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_COMMIT_PERIOD_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_COMMIT_PERIOD_H_

#include <cstdint>

#include "optstate/v1/types.pb.h"

namespace optstate::session {

// Returns after how many steps a job with the durability "every N" begins
// another commit, such that a loss of power costs N steps at most. A commit
// waits for the one before, so what is lost is the steps since that one began,
// less than two periods.
inline uint64_t CommitPeriodSteps(const v1::StorageSettings& storage) {
  return (uint64_t{storage.every_steps()} + 1) / 2;
}

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_COMMIT_PERIOD_H_
