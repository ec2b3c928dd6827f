#include "server/supervisor/share_division.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "absl/strings/str_cat.h"

namespace optstate::supervisor {
namespace {

using Jobs = std::map<std::string, WeighedJob>;

uint32_t SameForAll(uid_t) { return 100; }

TEST(ShareDivisionTest, TheWeightsOfASingleOwnerStay) {
  const Jobs jobs = {{"a", {7, 100}}, {"b", {7, 400}}, {"c", {7, 25}}};
  const auto divided = DivideByOwners(jobs, SameForAll);
  ASSERT_EQ(divided.size(), 3u);
  for (const auto& [name, job] : jobs) {
    EXPECT_DOUBLE_EQ(divided.at(name), job.weight) << name;
  }
}

TEST(ShareDivisionTest, AFloodOfJobsGetsNoMoreThanItsOwnersPart) {
  Jobs jobs = {{"alone", {8, 100}}};
  for (int i = 0; i < 99; ++i) jobs[absl::StrCat("flood", i)] = {7, 10000};
  const auto divided = DivideByOwners(jobs, SameForAll);
  double flood = 0;
  for (const auto& [name, weight] : divided) {
    if (name != "alone") flood += weight;
  }
  EXPECT_NEAR(divided.at("alone") / flood, 1, 1e-9);
}

TEST(ShareDivisionTest, OwnersShareByTheirWeightsAndTheirJobsByTheirs) {
  const Jobs jobs = {{"a", {7, 100}}, {"b", {7, 300}}, {"c", {8, 50}}};
  const auto divided = DivideByOwners(
      jobs, [](uid_t owner) { return owner == 7 ? 200u : 100u; });
  EXPECT_NEAR(divided.at("b") / divided.at("a"), 3, 1e-9);
  EXPECT_NEAR((divided.at("a") + divided.at("b")) / divided.at("c"), 2, 1e-9);
  EXPECT_NEAR(divided.at("a") + divided.at("b") + divided.at("c"), 450, 1e-9);
}

TEST(ShareDivisionTest, NothingIsDividedBetweenNone) {
  EXPECT_TRUE(DivideByOwners({}, SameForAll).empty());
}

}  // namespace
}  // namespace optstate::supervisor
