// Runs the campaign in small: a few kills of every kind.

#include <cstdint>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"
#include "tests/crash/campaign.h"

namespace optstate::crash {
namespace {

Tally Kill(const Quota& quota, bool on_disk = false) {
  CampaignOptions options;
  options.seed = ScriptSeed();
  options.quota = quota;
  options.elements_min = 1 << 19;
  options.elements_max = 1 << 20;
  options.steps = 8;
  options.on_disk = on_disk;
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

TEST(CrashTest, RecordsOnDisk) {
  const Tally tally =
      Kill({.engine = 40, .supervisor = 10, .power = 50}, /*on_disk=*/true);
  EXPECT_GT(tally.engine_in_step, 0) << tally;
  EXPECT_GT(tally.power_in_step, 0) << tally;
}

}  // namespace
}  // namespace optstate::crash
