#ifndef OPTSTATE_TESTS_CRASH_TALLY_H_
#define OPTSTATE_TESTS_CRASH_TALLY_H_

#include <cstdint>
#include <map>
#include <ostream>
#include <string>

#include "tests/crash/scenario.h"
#include "tests/crash/wire.h"

namespace optstate::crash {

// The number of kills and upgrades that there are to be.
struct Quota {
  uint64_t engine = 0;
  uint64_t supervisor = 0;
  uint64_t rank = 0;
  uint64_t upgrade = 0;
  uint64_t power = 0;  // all processes, and all that is in memory
};

// Counts of what has been done, and of its outcomes.
struct Tally {
  uint64_t rounds = 0;
  uint64_t steps = 0;

  uint64_t engine = 0;
  uint64_t engine_in_step = 0;         // with a step in flight
  uint64_t engine_in_load = 0;         // with some rank in a load, about
  uint64_t engine_in_sealed_load = 0;  // with a load being put into place
  uint64_t engine_again = 0;           // during a start or a recovery
  uint64_t engine_unsupervised = 0;    // while no supervisor ran
  uint64_t engine_in_upgrade = 0;
  uint64_t supervisor = 0;
  uint64_t supervisor_in_step = 0;  // while a step was in flight
  uint64_t supervisor_in_upgrade = 0;
  uint64_t terminations = 0;  // SIGTERM, which ends the engines too
  uint64_t terminations_in_step = 0;
  uint64_t rank = 0;
  uint64_t rank_in_push = 0;
  uint64_t rank_in_commit = 0;
  uint64_t rank_in_fetch = 0;
  uint64_t rank_in_load = 0;
  uint64_t rank_with_engine = 0;  // at once
  uint64_t rank_in_upgrade = 0;   // at once
  uint64_t upgrades = 0;
  uint64_t upgrades_by_signal = 0;    // SIGHUP
  uint64_t upgrades_in_step = 0;      // asked for with a step in flight
  uint64_t upgrades_done = 0;         // to the end, as the daemon itself says
  uint64_t upgrades_keep_engine = 0;  // of those: accumulating all the time

  uint64_t power = 0;
  uint64_t power_in_step = 0;
  uint64_t power_lost_steps = 0;  // that were committed, but not answered

  uint64_t steps_recovered = 0;
  uint64_t runs_rolled_back = 0;
  uint64_t steps_again = 0;  // that ranks were told to run again

  // The rounds by choice: rounds_with["optimizer"]["lamb"].
  std::map<std::string, std::map<std::string, uint64_t>> rounds_with;

  bool Reaches(const Quota& quota) const {
    return engine >= quota.engine && supervisor >= quota.supervisor &&
           rank >= quota.rank && upgrades >= quota.upgrade &&
           power >= quota.power;
  }
  void NoteRound(Wire wire, const Scenario& scenario);
};

std::ostream& operator<<(std::ostream& out, const Tally& tally);

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_TALLY_H_
