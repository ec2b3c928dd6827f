#include "client/collective/nodes/resolution.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace optstate::client {
namespace {

using Positions = absl::Span<const std::optional<NodePosition>>;

// An error names this many nodes at most, and counts the others.
constexpr size_t kNamedMax = 8;

std::vector<NodePosition>::const_iterator Ahead(
    const std::vector<NodePosition>& positions) {
  return std::max_element(positions.begin(), positions.end(),
                          [](const NodePosition& a, const NodePosition& b) {
                            return a.committed.step < b.committed.step;
                          });
}

std::string Describe(const NodePosition& position, bool has_job) {
  std::string said = has_job ? absl::StrCat("step ", position.committed.step)
                             : std::string("no such job");
  if (position.prepared.has_value()) {
    absl::StrAppend(&said, ", step ", position.prepared->step, " prepared");
  }
  if (position.durable_step != 0) {
    absl::StrAppend(&said, ", durable step ", position.durable_step);
  }
  absl::StrAppend(&said, ", ", position.loads_finished, " loads");
  return said;
}

absl::Status Unresolvable(const std::vector<NodePosition>& there,
                          Positions asked, absl::Span<const std::string> names,
                          absl::string_view why) {
  const auto first = static_cast<size_t>(Ahead(there) - there.begin());
  const NodeStep& latest = there[first].committed;
  const std::string of_first = Describe(there[first], asked[first].has_value());
  std::string said;
  uint64_t least = latest.step;
  size_t named = 0;
  size_t alike = 0;
  for (size_t node = 0; node < there.size(); ++node) {
    const NodeStep& committed = there[node].committed;
    least = std::min(least, committed.step);
    const std::string of_node = Describe(there[node], asked[node].has_value());
    if (there.size() > kNamedMax && node != first && of_node == of_first &&
        committed.digest == latest.digest &&
        committed.found_inf == latest.found_inf) {
      ++alike;
      continue;
    }
    if (++named > kNamedMax) continue;
    absl::StrAppend(&said, said.empty() ? "" : "; ", names[node], ": ",
                    of_node);
  }
  if (alike > 0) {
    absl::StrAppend(&said, "; ", alike, " are as ", names[first], " is");
  }
  if (named > kNamedMax) {
    absl::StrAppend(&said, "; ", named - kNamedMax, " are not named");
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the nodes are not at one step (", said,
      "), and none has what the others lack. Delete the job on all nodes "
      "(optctl delete job) and begin it again from a checkpoint; all nodes had "
      "step ",
      least, ", and the last one was ", latest.step, why));
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
  const NodeStep latest = Ahead(there)->committed;
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
