#include "server/config/job_weight.h"

#include <gtest/gtest.h>

namespace optstate::config {
namespace {

TEST(JobWeightTest, PatternAndWeight) {
  const auto weight = ParseJobWeight("a=b-*=25");
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->pattern, "a=b-*");
  EXPECT_EQ(weight->weight, 25u);
  for (const char* text :
       {"", "a", "=5", "a=", "a=0", "a=10001", "a=-1", "a=5x", "a=1.5"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseJobWeight(text).status())) << text;
  }
}

TEST(JobWeightTest, TheFirstPatternThatFitsCounts) {
  v1::EngineSettings settings;
  settings.set_weight(100);
  for (const char* text : {"eval-*=25", "eval-big=400", "run?=50"}) {
    settings.add_job_weights(text);
  }
  EXPECT_EQ(WeightOf(settings, "eval-big"), 25u);
  EXPECT_EQ(WeightOf(settings, "run7"), 50u);
  EXPECT_EQ(WeightOf(settings, "run77"), 100u);
  EXPECT_EQ(WeightOf(settings, "main"), 100u);
  EXPECT_EQ(LargestWeight(settings), 400u);
  settings.set_weight(500);
  EXPECT_EQ(LargestWeight(settings), 500u);
}

TEST(JobWeightTest, NiceStepsAreFactorsOfAQuarter) {
  EXPECT_EQ(NiceSteps(100), 0);
  EXPECT_EQ(NiceSteps(125), -1);
  EXPECT_EQ(NiceSteps(80), 1);
  EXPECT_EQ(NiceSteps(50), 3);
  EXPECT_EQ(NiceSteps(200), -3);
  EXPECT_EQ(NiceSteps(1), 21);
  EXPECT_EQ(NiceSteps(10000), -21);
}

}  // namespace
}  // namespace optstate::config
