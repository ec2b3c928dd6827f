// Runs the campaign in small: a few kills of every kind.

#include <cstdint>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"
#include "tests/crash/campaign.h"

namespace optstate::crash {
namespace {

Tally Kill(const Quota& quota) {
  CampaignOptions options;
  options.seed = ScriptSeed();
  options.quota = quota;
  options.elements_min = 1 << 19;
  options.elements_max = 1 << 20;
  options.steps = 8;
  Tally tally;
  const absl::Status status = RunCampaign(options, &tally);
  EXPECT_TRUE(status.ok()) << status;
  return tally;
}

TEST(CrashTest, Engines) {
  const Tally tally = Kill({.engine = 24});
  EXPECT_GT(tally.engine_in_step, 0) << tally;
  EXPECT_GT(tally.runs_rolled_back + tally.steps_recovered, 0) << tally;
}

TEST(CrashTest, Supervisors) { Kill({.supervisor = 6}); }

TEST(CrashTest, Ranks) { Kill({.rank = 6}); }

TEST(CrashTest, Upgrades) { Kill({.upgrade = 6}); }

}  // namespace
}  // namespace optstate::crash
