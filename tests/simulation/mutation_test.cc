// The scenarios find each way of breaking the protocol, and nothing else in the
// same runs.

#include "tests/simulation/mutation.h"

#include <cstdint>
#include <iostream>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/simulation/report.h"
#include "tests/simulation/scenarios.h"

namespace optstate::simulation {
namespace {

// A fault that shows only at some points of a step is met by one of so many
// runs.
constexpr uint64_t kSeeds = 12;

ScenarioOptions Options(uint64_t seed, Mutation mutation) {
  ScenarioOptions options;
  options.nodes = 20;
  options.ranks = 4;
  options.seed = seed;
  options.lost_nodes = 5;
  options.mutation = mutation;
  return options;
}

// Returns what a run has found wrong; empty: nothing.
std::string Finding(const MutationInfo& info, uint64_t seed,
                    Mutation mutation) {
  const absl::StatusOr<Report> report =
      RunScenario(std::string(info.scenario), Options(seed, mutation));
  if (!report.ok()) return report.status().ToString();
  return report->violations.empty() ? std::string()
                                    : report->violations.front();
}

class MutationTest : public testing::TestWithParam<MutationInfo> {};

TEST_P(MutationTest, IsFound) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const std::string finding = Finding(GetParam(), seed, GetParam().mutation);
    if (finding.empty()) continue;
    std::cerr << "seed " << seed << ": " << finding << std::endl;
    EXPECT_EQ(Finding(GetParam(), seed, Mutation::kNone), "");
    return;
  }
  FAIL() << GetParam().scenario << " has not found " << GetParam().name
         << " with any of " << kSeeds << " seeds";
}

INSTANTIATE_TEST_SUITE_P(All, MutationTest, testing::ValuesIn(Mutations()),
                         [](const testing::TestParamInfo<MutationInfo>& test) {
                           return std::string(test.param.name);
                         });

TEST(Mutations, HaveNamesOfTheirOwn) {
  std::set<absl::string_view> names;
  for (const MutationInfo& each : Mutations()) {
    EXPECT_TRUE(names.insert(each.name).second) << each.name;
    const absl::StatusOr<Mutation> named = MutationNamed(each.name);
    ASSERT_TRUE(named.ok()) << named.status();
    EXPECT_EQ(*named, each.mutation);
  }
  const absl::Status unknown = MutationNamed("no_such").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(unknown.message(), "decides_alone")) << unknown;
}

}  // namespace
}  // namespace optstate::simulation
