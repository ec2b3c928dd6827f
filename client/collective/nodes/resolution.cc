#include "client/collective/nodes/resolution.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
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

// Returns how to go back to a step that is durable on all nodes, if there is
// one.
std::string DurableOnAll(Positions asked) {
  std::optional<uint64_t> durable;
  for (const std::optional<NodePosition>& each : asked) {
    const uint64_t step = each.has_value() ? each->durable_step : 0;
    if (step == 0 || step != durable.value_or(step)) return "";
    durable = step;
  }
  if (!durable.has_value()) return "";
  return absl::StrCat(". Or go back to step ", *durable,
                      ", which is durable on all of them: optctl recover "
                      "--to-durable on each node that is at a later one");
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
      least, ", and the last one was ", latest.step, DurableOnAll(asked), why));
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

uint32_t KindOf(Kinds kinds, size_t index) {
  return kinds.empty() ? 0 : kinds[index];
}

// Returns the digest that a committed step had when it was prepared, before a
// norm was noted for it.
uint64_t DigestAsPrepared(const NodeStep& committed, bool is_noted) {
  if (!is_noted || committed.found_inf || !committed.norm.has_value()) {
    return committed.digest;
  }
  // Noting a norm twice undoes it.
  return ClippedDigest(committed.digest, committed.norm->gradient_norm,
                       committed.norm->clip_coefficient);
}

Verdict CommitOf(const NodeStep& prepared, bool is_split) {
  return is_split && !prepared.norm.has_value() ? Verdict::kClip
                                                : Verdict::kCommit;
}

// Returns the verdicts for nodes that have not taken the latest step; nullopt:
// one of them has not prepared it. `ahead`: the step, by kind, of nodes that
// have.
std::optional<std::map<size_t, Verdict>> CatchUp(
    const std::vector<NodePosition>& there, Kinds kinds, uint64_t latest,
    const std::map<uint32_t, NodeStep>& ahead) {
  const bool is_split = IsSplit(kinds);
  const bool was_skipped =
      std::any_of(ahead.begin(), ahead.end(),
                  [](const auto& each) { return each.second.found_inf; });
  std::map<size_t, Verdict> verdicts;
  for (size_t node = 0; node < there.size(); ++node) {
    if (there[node].committed.step == latest) continue;
    const std::optional<NodeStep>& prepared = there[node].prepared;
    if (!prepared.has_value() || prepared->step != latest) return std::nullopt;
    const auto same = ahead.find(KindOf(kinds, node));
    // Nodes that hold the same may have clipped the step by the norm of several
    // jobs.
    const bool is_noted = is_split || prepared->norm.has_value();
    if (same != ahead.end() &&
        prepared->digest != DigestAsPrepared(same->second, is_noted)) {
      return std::nullopt;
    }
    verdicts[node] =
        was_skipped ? Verdict::kSkip : CommitOf(*prepared, is_split);
  }
  return verdicts;
}

// Returns the verdicts about a step that all nodes have prepared, which hold
// different parameters, and that none has taken or found Inf or NaN in.
std::map<size_t, Verdict> ResolveNoted(
    const std::vector<std::optional<NodeStep>>& prepared) {
  std::map<size_t, Verdict> commits;
  std::map<size_t, Verdict> notes;
  std::map<size_t, Verdict> aborts;
  for (size_t node = 0; node < prepared.size(); ++node) {
    aborts[node] = Verdict::kAbort;
    commits[node] = Verdict::kCommit;
    if (!prepared[node]->norm.has_value()) notes[node] = Verdict::kClip;
  }
  if (notes.size() == prepared.size()) return aborts;
  return notes.empty() ? commits : notes;
}

}  // namespace

bool IsSplit(Kinds kinds) {
  return std::any_of(kinds.begin(), kinds.end(),
                     [&](uint32_t each) { return each != kinds[0]; });
}

Verdict DecideVotes(absl::Span<const std::optional<NodeStep>> votes,
                    Kinds kinds) {
  bool found_inf = false;
  std::map<uint32_t, uint64_t> digests;  // by kind
  for (size_t i = 0; i < votes.size(); ++i) {
    const std::optional<NodeStep>& vote = votes[i];
    if (!vote.has_value() || !votes[0].has_value()) return Verdict::kAbort;
    if (vote->step != votes[0]->step) return Verdict::kAbort;
    const auto first =
        digests.try_emplace(KindOf(kinds, i), vote->digest).first;
    if (first->second != vote->digest) return Verdict::kAbort;
    found_inf |= vote->found_inf;
  }
  return found_inf ? Verdict::kSkip : Verdict::kCommit;
}

absl::StatusOr<std::map<size_t, Verdict>> Resolve(
    Positions positions, absl::Span<const std::string> names, Kinds kinds) {
  std::map<size_t, Verdict> verdicts;
  std::vector<NodePosition> there;
  there.reserve(positions.size());
  bool is_anywhere = false;
  for (const std::optional<NodePosition>& each : positions) {
    there.push_back(each.value_or(NodePosition()));
    is_anywhere |= each.has_value();
  }
  if (!is_anywhere) return verdicts;
  const bool is_split = IsSplit(kinds);
  const uint64_t latest = Ahead(there)->committed.step;
  std::map<uint32_t, NodeStep> ahead;  // by kind
  for (size_t node = 0; node < there.size(); ++node) {
    if (there[node].committed.step != latest) continue;
    ahead.try_emplace(KindOf(kinds, node), there[node].committed);
  }
  const std::optional<std::map<size_t, Verdict>> behind =
      CatchUp(there, kinds, latest, ahead);
  if (!behind.has_value()) return Unresolvable(there, positions, names, "");
  if (!behind->empty()) return *behind;
  for (size_t node = 0; node < there.size(); ++node) {
    const NodeStep& first = ahead.at(KindOf(kinds, node));
    if (there[node].committed.digest == first.digest) continue;
    return Unresolvable(there, positions, names, "");
  }
  // All nodes take a step in two phases and skip it alike, or these are jobs of
  // several runs.
  const bool is_one_step = AreAlike(there, [](const NodePosition& each) {
    return std::make_pair(each.committed.digest == 0, each.committed.found_inf);
  });
  if (!is_one_step) return Unresolvable(there, positions, names, "");
  const std::vector<std::optional<NodeStep>> votes = PreparedOf(there);
  const Verdict verdict = DecideVotes(votes, kinds);
  if (verdict == Verdict::kCommit && is_split) return ResolveNoted(votes);
  for (size_t node = 0; node < votes.size(); ++node) {
    if (votes[node].has_value()) verdicts[node] = verdict;
  }
  if (!verdicts.empty()) return verdicts;
  // Where nothing is loaded yet, the ranks are going to load.
  const bool has_loaded_alike = AreAlike(
      there, [](const NodePosition& each) { return each.loads_finished; });
  const bool is_to_load =
      latest == 0 &&
      std::any_of(there.begin(), there.end(), [](const NodePosition& each) {
        return each.loads_finished == 0;
      });
  if (has_loaded_alike || is_to_load) return verdicts;
  return Unresolvable(there, positions, names,
                      ": a load of state has ended on some nodes alone");
}

std::optional<NodesNorm> NotedNorm(Positions positions) {
  std::vector<NodeStep> steps;
  uint64_t latest = 0;
  for (const std::optional<NodePosition>& each : positions) {
    if (!each.has_value()) continue;
    steps.push_back(each->committed);
    if (each->prepared.has_value()) steps.push_back(*each->prepared);
  }
  for (const NodeStep& each : steps) latest = std::max(latest, each.step);
  for (const NodeStep& each : steps) {
    if (each.step == latest && each.norm.has_value()) return each.norm;
  }
  return std::nullopt;
}

}  // namespace optstate::client
