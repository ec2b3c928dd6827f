#include "client/collective/nodes/settling.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/casts.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/collective/gather.h"
#include "client/collective/nodes/voting.h"
#include "client/session/job_position.h"
#include "proto/types/status_macros.h"
#include "proto/types/step_verdict.h"

namespace optstate::client {
namespace {

using NodePositions = std::vector<std::optional<NodePosition>>;  // by node

// Rounds of questions and verdicts, before nodes that never settle are an
// error.
constexpr int kRoundsMax = 8;
// The daemon may notice the end of ranks that were killed only some time later.
constexpr absl::Duration kEndsWithin = absl::Seconds(10);
constexpr absl::Duration kPause = absl::Milliseconds(50);

JobAddress AddressOf(const SessionOptions& options) {
  JobAddress address;
  address.endpoint = options.endpoint;
  address.job = options.job;
  address.timeout = options.connect_timeout;
  address.daemon_path = options.daemon_path;
  address.interrupted = options.interrupted;
  return address;
}

NodesNorm NormOf(const Outcome& outcome) {
  return {.gradient_norm = outcome.gradient_norm,
          .clip_coefficient = outcome.clip_coefficient};
}

uint64_t DigestWith(const NodesNorm& norm, uint64_t digest) {
  return ClippedDigest(digest, norm.gradient_norm, norm.clip_coefficient);
}

// Asks this node's daemon how far the job is; nullopt: it has none.
absl::StatusOr<std::optional<NodePosition>> Ask(const SessionOptions& options) {
  const absl::StatusOr<JobPosition> found = FindPosition(AddressOf(options));
  if (absl::IsNotFound(found.status())) return std::nullopt;
  OPTSTATE_RETURN_IF_ERROR(found.status());
  NodePosition position;
  // A step without an outcome has nothing but its number.
  if (found->last_outcome.has_value()) {
    position.committed = StepOf(*found->last_outcome);
    position.committed.norm = NormOf(*found->last_outcome);
  }
  position.committed.step = found->committed_step;
  if (found->prepared.has_value()) {
    NodeStep prepared = StepOf(*found->prepared);
    prepared.awaits_norm = found->prepared_awaits_norm;
    if (found->prepared_is_clipped) {
      prepared.norm = NormOf(*found->prepared);
      // The digest from before: noting a norm twice undoes it.
      prepared.digest = DigestWith(*prepared.norm, prepared.digest);
    }
    position.prepared = prepared;
  }
  position.loads_finished = found->loads_finished;
  position.durable_step = found->durable_step;
  return position;
}

// A step, and a position, as numbers, which ranks gather.
constexpr size_t kStepNumbers = 8;
constexpr size_t kPositionNumbers = 2 * kStepNumbers + 2;

void Append(const std::optional<NodeStep>& step,
            std::vector<uint64_t>* numbers) {
  const NodeStep known = step.value_or(NodeStep());
  const NodesNorm norm = known.norm.value_or(NodesNorm());
  const std::array<uint64_t, kStepNumbers> of_step = {
      step.has_value() ? uint64_t{1} : 0,
      known.step,
      known.digest,
      known.found_inf ? uint64_t{1} : 0,
      known.norm.has_value() ? uint64_t{1} : 0,
      absl::bit_cast<uint64_t>(norm.gradient_norm),
      absl::bit_cast<uint64_t>(norm.clip_coefficient),
      known.awaits_norm ? uint64_t{1} : 0};
  numbers->insert(numbers->end(), of_step.begin(), of_step.end());
}

std::optional<NodeStep> StepFrom(absl::Span<const uint64_t> numbers) {
  if (numbers[0] == 0) return std::nullopt;
  NodeStep step = {
      .step = numbers[1], .digest = numbers[2], .found_inf = numbers[3] != 0};
  if (numbers[4] != 0) {
    step.norm =
        NodesNorm{.gradient_norm = absl::bit_cast<double>(numbers[5]),
                  .clip_coefficient = absl::bit_cast<double>(numbers[6])};
  }
  step.awaits_norm = numbers[7] != 0;
  return step;
}

// A node without the job has no committed step among its numbers.
std::vector<uint64_t> ToNumbers(const std::optional<NodePosition>& position) {
  std::vector<uint64_t> numbers;
  numbers.reserve(kPositionNumbers);
  const NodePosition known = position.value_or(NodePosition());
  Append(
      position.has_value() ? std::make_optional(known.committed) : std::nullopt,
      &numbers);
  Append(known.prepared, &numbers);
  numbers.push_back(known.loads_finished);
  numbers.push_back(known.durable_step);
  return numbers;
}

std::optional<NodePosition> FromNumbers(absl::Span<const uint64_t> numbers) {
  const std::optional<NodeStep> committed = StepFrom(numbers);
  if (!committed.has_value()) return std::nullopt;
  NodePosition position;
  position.committed = *committed;
  position.prepared = StepFrom(numbers.subspan(kStepNumbers));
  position.loads_finished = static_cast<uint32_t>(numbers[2 * kStepNumbers]);
  position.durable_step = numbers[2 * kStepNumbers + 1];
  return position;
}

// Asks each node's daemon, by its first rank.
absl::StatusOr<NodePositions> AskAll(Collective& collective,
                                     const Places& places,
                                     const SessionOptions& options) {
  absl::StatusOr<std::optional<NodePosition>> mine =
      std::optional<NodePosition>();
  if (places.is_first_rank()) mine = Ask(options);
  OPTSTATE_RETURN_IF_ERROR(AgreeOn(collective, mine.status()));
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint64_t> all,
                            GatherNumbers(collective, ToNumbers(*mine)));
  NodePositions positions;
  positions.reserve(places.nodes().size());
  for (const uint32_t rank : places.first_ranks()) {
    positions.push_back(FromNumbers(absl::MakeConstSpan(all).subspan(
        rank * kPositionNumbers, kPositionNumbers)));
  }
  return positions;
}

// Brings this node its verdict, if there is one for it.
absl::Status Bring(const Places& places, const SessionOptions& options,
                   const NodePositions& positions,
                   const std::map<size_t, Verdict>& verdicts) {
  const auto verdict = verdicts.find(places.node());
  if (!places.is_first_rank() || verdict == verdicts.end()) {
    return absl::OkStatus();
  }
  // A verdict is given to nodes that have prepared the step alone.
  const NodeStep& prepared = *positions[places.node()]->prepared;
  StepVerdict brought;
  brought.step = prepared.step;
  brought.digest = prepared.norm.has_value()
                       ? DigestWith(*prepared.norm, prepared.digest)
                       : prepared.digest;
  brought.verdict = verdict->second;
  if (brought.verdict == Verdict::kClip) {
    const std::optional<NodesNorm> norm = NotedNorm(positions);
    if (!norm.has_value()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "another node has taken step ", prepared.step,
          ", which is prepared here, and does not say by which norm it is "
          "clipped: a former build took it. Delete the job on all nodes "
          "(optctl delete job) and begin it again from a checkpoint"));
    }
    brought.gradient_norm = norm->gradient_norm;
    brought.clip_coefficient = norm->clip_coefficient;
  }
  const absl::Time deadline = absl::Now() + kEndsWithin;
  while (true) {
    absl::Status status = BringVerdict(AddressOf(options), brought).status();
    // Another rank was faster, which the next positions show.
    if (absl::IsFailedPrecondition(status)) return absl::OkStatus();
    // Ranks of the run before are attached still.
    if (!absl::IsUnavailable(status) || absl::Now() >= deadline) return status;
    absl::SleepFor(kPause);
  }
}

// Changes verdicts about a step that its nodes took together with others, of
// which these ranks may not know: a norm that one node has noted clips the step
// on all of them, and a step that waits for a norm which none has noted is
// dropped. No daemon has applied it.
void SettleWithoutOthers(const NodePositions& positions,
                         std::map<size_t, Verdict>* verdicts) {
  bool is_lacking = false;
  bool is_noted = false;
  for (const auto& [node, verdict] : *verdicts) {
    if (verdict != Verdict::kCommit) continue;
    const NodeStep& prepared = *positions[node]->prepared;
    is_noted |= prepared.norm.has_value();
    is_lacking |= prepared.awaits_norm && !prepared.norm.has_value();
  }
  if (!is_lacking) return;
  for (auto it = verdicts->begin(); it != verdicts->end();) {
    const bool has_norm = positions[it->first]->prepared->norm.has_value();
    // A node that has the norm commits when the others have it too.
    if (is_noted && has_norm) {
      it = verdicts->erase(it);
      continue;
    }
    if (it->second == Verdict::kCommit) {
      it->second = is_noted ? Verdict::kClip : Verdict::kAbort;
    }
    ++it;
  }
}

// Checks that the ranks of each node name one job.
absl::Status CheckJobs(Collective& collective, const Places& places,
                       const std::string& job) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<std::string> jobs,
                            GatherTexts(collective, job));
  for (uint32_t rank = 0; rank < jobs.size(); ++rank) {
    for (uint32_t other = 0; other < rank; ++other) {
      if (places.name_of(rank) != places.name_of(other) ||
          jobs[rank] == jobs[other]) {
        continue;
      }
      return absl::FailedPreconditionError(
          absl::StrCat("ranks ", other, " and ", rank, " are on node ",
                       places.name_of(rank), " and name different jobs, \"",
                       jobs[other], "\" and \"", jobs[rank], "\""));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SettleNodes(Collective& collective, const Places& places,
                         const SessionOptions& options, Kinds kinds) {
  OPTSTATE_RETURN_IF_ERROR(CheckJobs(collective, places, options.job));
  for (int round = 0; round < kRoundsMax; ++round) {
    OPTSTATE_ASSIGN_OR_RETURN(const NodePositions positions,
                              AskAll(collective, places, options));
    absl::StatusOr<std::map<size_t, Verdict>> verdicts =
        Resolve(positions, places.nodes(), kinds);
    if (!verdicts.ok()) {
      return Annotate(verdicts.status(),
                      absl::StrCat("job \"", options.job, "\""));
    }
    if (verdicts->empty()) return absl::OkStatus();
    if (!IsSplit(kinds)) SettleWithoutOthers(positions, &*verdicts);
    OPTSTATE_RETURN_IF_ERROR(
        AgreeOn(collective, Bring(places, options, positions, *verdicts)));
  }
  return absl::AbortedError(
      absl::StrCat("the nodes of job \"", options.job,
                   "\" do not settle: other ranks still take steps of it"));
}

}  // namespace optstate::client
