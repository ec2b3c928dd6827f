#include "tests/simulation/mutation.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace optstate::simulation {
namespace {

constexpr MutationInfo kMutations[] = {
    {Mutation::kDecidesAlone, "decides_alone", "attach_storm"},
    {Mutation::kDecidesAboutTheLastStep, "decides_about_the_last_step",
     "attach_storm"},
    {Mutation::kBringsSkipsAsCommits, "brings_skips_as_commits",
     "attach_storm"},
    {Mutation::kBringsNoDecision, "brings_no_decision", "attach_storm"},
    {Mutation::kForgetsDecisions, "forgets_decisions", "rolling_upgrade"},
    {Mutation::kForgetsPreparedSteps, "forgets_prepared_steps",
     "rolling_upgrade"},
    {Mutation::kDropsWhatOthersTook, "drops_what_others_took", "node_loss"}};

}  // namespace

absl::Span<const MutationInfo> Mutations() { return kMutations; }

absl::StatusOr<Mutation> MutationNamed(absl::string_view name) {
  std::vector<std::string> names;
  for (const MutationInfo& each : kMutations) {
    if (each.name == name) return each.mutation;
    names.emplace_back(each.name);
  }
  return absl::InvalidArgumentError(absl::StrCat("there is no mutation \"",
                                                 name, "\": give one of ",
                                                 absl::StrJoin(names, ", ")));
}

}  // namespace optstate::simulation
