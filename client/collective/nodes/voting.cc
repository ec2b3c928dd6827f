#include "client/collective/nodes/voting.h"

#include <array>
#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/collective/gather.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

std::string Hex(uint64_t digest) {
  return absl::StrCat(absl::Hex(digest, absl::kZeroPad16));
}

}  // namespace

NodeStep StepOf(const Outcome& outcome) {
  return {.step = outcome.step,
          .digest = outcome.digest,
          .found_inf = outcome.found_inf};
}

absl::StatusOr<Votes> GatherVotes(Collective& collective,
                                  const absl::StatusOr<Outcome>& prepared,
                                  uint64_t loaded) {
  constexpr size_t kNumbers = 4;
  std::array<uint64_t, kNumbers> mine = {};
  if (prepared.ok()) {
    mine = {1, prepared->step, prepared->found_inf ? uint64_t{1} : 0,
            prepared->digest ^ loaded};
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint64_t> all,
                            GatherNumbers(collective, mine));
  Votes votes;
  votes.reserve(all.size() / kNumbers);
  for (size_t i = 0; i < all.size(); i += kNumbers) {
    if (all[i] == 0) {
      votes.push_back(std::nullopt);
    } else {
      votes.push_back(NodeStep{.step = all[i + 1],
                               .digest = all[i + 3],
                               .found_inf = all[i + 2] != 0});
    }
  }
  return votes;
}

absl::Status UndecidedError(const absl::StatusOr<Outcome>& prepared,
                            const absl::Status& why) {
  if (!prepared.ok()) return prepared.status();
  if (!prepared->prepared) return why;
  return absl::UnavailableError(absl::StrCat(
      "step ", prepared->step,
      " is prepared on this node, and this rank does not know what all have "
      "decided: ",
      why.message(),
      ". Start all ranks of all nodes again: Settle() brings the decision, and "
      "they go on with this step or without it on all nodes alike"));
}

absl::Status DifferenceError(const Places& places, const Votes& votes) {
  std::string said;
  for (size_t node = 0; node < places.nodes().size(); ++node) {
    const std::optional<NodeStep>& vote = votes[places.first_ranks()[node]];
    absl::StrAppend(&said, said.empty() ? "" : "; ", places.nodes()[node],
                    ": ");
    if (vote.has_value()) {
      absl::StrAppend(&said, "step ", vote->step, ", digest ",
                      Hex(vote->digest));
    } else {
      absl::StrAppend(&said, "none");
    }
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the nodes have prepared different steps (", said,
      "), and the step is taken on none: gradients, options, or loads of state "
      "differ between nodes. Reduce the gradients over all ranks "
      "(GradientReducer) and give all ranks equal options"));
}

}  // namespace optstate::client
