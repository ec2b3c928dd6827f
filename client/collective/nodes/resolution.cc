#include "client/collective/nodes/resolution.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace optstate::client {
namespace {

using Positions = absl::Span<const std::optional<NodePosition>>;

absl::Status Unresolvable(const std::vector<NodePosition>& there,
                          Positions asked, absl::Span<const std::string> names,
                          absl::string_view why) {
  std::string said;
  uint64_t least = there[0].committed.step;
  uint64_t latest = least;
  for (size_t node = 0; node < there.size(); ++node) {
    const NodePosition& position = there[node];
    least = std::min(least, position.committed.step);
    latest = std::max(latest, position.committed.step);
    absl::StrAppend(&said, said.empty() ? "" : "; ", names[node], ": ");
    if (asked[node].has_value()) {
      absl::StrAppend(&said, "step ", position.committed.step);
    } else {
      absl::StrAppend(&said, "no such job");
    }
    if (position.prepared.has_value()) {
      absl::StrAppend(&said, ", step ", position.prepared->step, " prepared");
    }
    if (position.durable_step != 0) {
      absl::StrAppend(&said, ", durable step ", position.durable_step);
    }
    absl::StrAppend(&said, ", ", position.loads_finished, " loads");
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the nodes are not at one step (", said,
      "), and none has what the others lack. Delete the job on all nodes "
      "(optctl delete job) and begin it again from a checkpoint; all nodes had "
      "step ",
      least, ", and the last one was ", latest, why));
}

std::vector<std::optional<NodeStep>> PreparedOf(
    const std::vector<NodePosition>& positions) {
  std::vector<std::optional<NodeStep>> votes;
  votes.reserve(positions.size());
  for (const NodePosition& each : positions) votes.push_back(each.prepared);
  return votes;
}

// Returns whether all positions have the same of something.
template <typename Of>
bool AreAlike(const std::vector<NodePosition>& positions, const Of& of) {
  return std::all_of(
      positions.begin(), positions.end(),
      [&](const NodePosition& each) { return of(each) == of(positions[0]); });
}

}  // namespace

Verdict DecideVotes(absl::Span<const std::optional<NodeStep>> votes) {
  bool found_inf = false;
  for (const std::optional<NodeStep>& vote : votes) {
    if (!vote.has_value() || !votes[0].has_value()) return Verdict::kAbort;
    if (vote->step != votes[0]->step || vote->digest != votes[0]->digest) {
      return Verdict::kAbort;
    }
    found_inf |= vote->found_inf;
  }
  return found_inf ? Verdict::kSkip : Verdict::kCommit;
}

absl::StatusOr<std::map<size_t, Verdict>> Resolve(
    Positions positions, absl::Span<const std::string> names) {
  std::map<size_t, Verdict> verdicts;
  std::vector<NodePosition> there;
  there.reserve(positions.size());
  bool is_anywhere = false;
  for (const std::optional<NodePosition>& each : positions) {
    there.push_back(each.value_or(NodePosition()));
    is_anywhere |= each.has_value();
  }
  if (!is_anywhere) return verdicts;
  const auto ahead =
      std::max_element(there.begin(), there.end(),
                       [](const NodePosition& a, const NodePosition& b) {
                         return a.committed.step < b.committed.step;
                       });
  const NodeStep latest = ahead->committed;
  for (size_t node = 0; node < there.size(); ++node) {
    if (there[node].committed.step == latest.step) continue;
    const std::optional<NodeStep>& prepared = there[node].prepared;
    if (!prepared.has_value() || prepared->step != latest.step ||
        prepared->digest != latest.digest) {
      return Unresolvable(there, positions, names, "");
    }
    verdicts[node] = latest.found_inf ? Verdict::kSkip : Verdict::kCommit;
  }
  if (!verdicts.empty()) return verdicts;
  // Steps of one number with different digests are of several runs, and so are
  // those that only some nodes have skipped.
  const bool is_one_step = AreAlike(there, [](const NodePosition& each) {
    return std::make_pair(each.committed.digest, each.committed.found_inf);
  });
  if (!is_one_step) return Unresolvable(there, positions, names, "");
  const std::vector<std::optional<NodeStep>> votes = PreparedOf(there);
  const Verdict verdict = DecideVotes(votes);
  for (size_t node = 0; node < votes.size(); ++node) {
    if (votes[node].has_value()) verdicts[node] = verdict;
  }
  if (!verdicts.empty()) return verdicts;
  // Where nothing is loaded yet, the ranks are going to load.
  const bool has_loaded_alike = AreAlike(
      there, [](const NodePosition& each) { return each.loads_finished; });
  const bool is_to_load =
      latest.step == 0 &&
      std::any_of(there.begin(), there.end(), [](const NodePosition& each) {
        return each.loads_finished == 0;
      });
  if (has_loaded_alike || is_to_load) return verdicts;
  return Unresolvable(there, positions, names,
                      ": a load of state has ended on some nodes alone");
}

}  // namespace optstate::client
