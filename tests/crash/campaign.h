#ifndef OPTSTATE_TESTS_CRASH_CAMPAIGN_H_
#define OPTSTATE_TESTS_CRASH_CAMPAIGN_H_

#include <cstdint>

#include "absl/status/status.h"
#include "tests/crash/tally.h"

namespace optstate::crash {

struct CampaignOptions {
  uint64_t seed = 0;
  Quota quota;
  uint64_t elements_min = 1 << 20;
  uint64_t elements_max = 1 << 20;
  uint64_t steps = 1;  // of a round
  // Jobs have their records on disk, are durable, or both; otherwise they are
  // in memory. Quota::power needs it.
  bool on_disk = false;
};

// Runs rounds of random scenarios, one after the other, until there were as
// many kills and upgrades as asked for. One line a round goes to standard
// error.
absl::Status RunCampaign(const CampaignOptions& options, Tally* tally);

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_CAMPAIGN_H_
