// The campaign in small: a few kills of every kind.

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
  options.steps = 16;
  Tally tally;
  const absl::Status status = RunCampaign(options, &tally);
  EXPECT_TRUE(status.ok()) << status;
  return tally;
}

TEST(CrashTest, Engines) {
  const Tally tally = Kill({.engine = 16, .supervisor = 0, .rank = 0});
  EXPECT_GT(tally.engine_in_step, 0) << tally;
}

TEST(CrashTest, Supervisors) {
  Kill({.engine = 0, .supervisor = 6, .rank = 0});
}

TEST(CrashTest, Ranks) { Kill({.engine = 0, .supervisor = 0, .rank = 6}); }

}  // namespace
}  // namespace optstate::crash
