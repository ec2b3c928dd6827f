#ifndef OPTSTATE_TESTS_CRASH_TALLY_H_
#define OPTSTATE_TESTS_CRASH_TALLY_H_

#include <cstdint>
#include <ostream>

namespace optstate::crash {

// How many kills there are to be.
struct Quota {
  uint64_t engine = 0;
  uint64_t supervisor = 0;
  uint64_t rank = 0;
};

// What has been done, and what became of it.
struct Tally {
  uint64_t rounds = 0;
  uint64_t steps = 0;

  uint64_t engine = 0;
  uint64_t engine_in_step = 0;       // with a step in flight
  uint64_t engine_again = 0;         // that was starting or recovering
  uint64_t engine_unsupervised = 0;  // while no supervisor ran
  uint64_t supervisor = 0;
  uint64_t supervisor_in_step = 0;  // while a step was in flight
  uint64_t rank = 0;
  uint64_t rank_in_push = 0;
  uint64_t rank_in_commit = 0;
  uint64_t rank_in_fetch = 0;
  uint64_t rank_with_engine = 0;  // at once

  uint64_t steps_recovered = 0;
  uint64_t runs_rolled_back = 0;

  bool Reaches(const Quota& quota) const {
    return engine >= quota.engine && supervisor >= quota.supervisor &&
           rank >= quota.rank;
  }
};

std::ostream& operator<<(std::ostream& out, const Tally& tally);

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_TALLY_H_
