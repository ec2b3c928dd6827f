#include "tests/simulation/resolution.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

namespace optstate::simulation {
namespace {

// Names of this many nodes are said; there may be a thousand.
constexpr size_t kNamedMax = 8;

absl::Status Unresolvable(
    absl::Span<const std::optional<NodePosition>> positions, uint64_t latest,
    const char* why) {
  std::string said;
  size_t others = 0;
  for (uint32_t node = 0; node < positions.size(); ++node) {
    const auto& position = positions[node];
    if (position.has_value() && position->committed.step == latest) continue;
    if (++others > kNamedMax) continue;
    absl::StrAppend(&said, said.empty() ? "" : "; ", "node ", node, ": ");
    if (!position.has_value()) {
      absl::StrAppend(&said, "no such job");
      continue;
    }
    absl::StrAppend(&said, "step ", position->committed.step);
    if (position->prepared.has_value()) {
      absl::StrAppend(&said, ", step ", position->prepared->step, " prepared");
    }
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the nodes cannot go on together (", why, "): the last step is ", latest,
      "; ", others, " nodes are not at it (", said, ")"));
}

}  // namespace

Verdict DecideVotes(absl::Span<const std::optional<NodeStep>> votes) {
  const std::optional<NodeStep>& first = votes.front();
  bool found_inf = false;
  for (const std::optional<NodeStep>& vote : votes) {
    if (!first.has_value() || !vote.has_value() || vote->step != first->step ||
        vote->digest != first->digest) {
      return Verdict::kAbort;
    }
    found_inf |= vote->found_inf;
  }
  return found_inf ? Verdict::kSkip : Verdict::kCommit;
}

absl::StatusOr<std::map<uint32_t, Verdict>> ResolvePositions(
    absl::Span<const std::optional<NodePosition>> positions) {
  std::map<uint32_t, Verdict> verdicts;
  std::vector<NodePosition> there;
  bool is_any_there = false;
  uint64_t latest = 0;
  for (const std::optional<NodePosition>& position : positions) {
    is_any_there |= position.has_value();
    there.push_back(position.value_or(NodePosition{}));
    latest = std::max(latest, there.back().committed.step);
  }
  if (!is_any_there) return verdicts;
  const NodeStep ahead =
      std::find_if(there.begin(), there.end(),
                   [latest](const NodePosition& position) {
                     return position.committed.step == latest;
                   })
          ->committed;
  // Some node has taken a step that others have only prepared.
  for (uint32_t node = 0; node < there.size(); ++node) {
    if (there[node].committed.step == latest) continue;
    const std::optional<NodeStep>& prepared = there[node].prepared;
    if (!prepared.has_value() || prepared->step != latest) {
      return Unresolvable(positions, latest,
                          "some have not prepared the last step");
    }
    if (prepared->digest != ahead.digest) {
      return Unresolvable(positions, latest,
                          "some have prepared another step of its number");
    }
    verdicts[node] = ahead.found_inf ? Verdict::kSkip : Verdict::kCommit;
  }
  if (!verdicts.empty()) return verdicts;
  for (const NodePosition& position : there) {
    if (position.committed.digest != ahead.digest ||
        position.committed.found_inf != ahead.found_inf) {
      return Unresolvable(positions, latest,
                          "they have taken different steps of one number");
    }
  }
  // All are at one step, and some have prepared the next one.
  std::vector<std::optional<NodeStep>> votes;
  for (const NodePosition& position : there) votes.push_back(position.prepared);
  const Verdict verdict = DecideVotes(votes);
  for (uint32_t node = 0; node < votes.size(); ++node) {
    if (votes[node].has_value()) verdicts[node] = verdict;
  }
  if (!verdicts.empty()) return verdicts;
  // Where nothing is loaded yet, the ranks are going to load.
  bool has_none = false;
  bool differ = false;
  for (const NodePosition& position : there) {
    has_none |= position.loads_finished == 0;
    differ |= position.loads_finished != there.front().loads_finished;
  }
  if (differ && (latest != 0 || !has_none)) {
    return Unresolvable(positions, latest,
                        "a load of state has ended on some alone");
  }
  return verdicts;
}

}  // namespace optstate::simulation
