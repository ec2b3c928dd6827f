#include "client/collective/nodes/node_agreement.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/base/casts.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/collective/gather.h"
#include "client/collective/nodes/job_facts.h"
#include "client/session/content_digest.h"
#include "client/session/job_position.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// Rounds of questions and verdicts, before nodes that never settle are an
// error.
constexpr int kRoundsMax = 8;
// The daemon may notice the end of ranks that were killed only some time later.
constexpr absl::Duration kEndsWithin = absl::Seconds(10);
constexpr absl::Duration kPause = absl::Milliseconds(50);

constexpr absl::string_view kBeginAgain =
    ". Delete the job on all nodes (optctl delete job) and begin it again from "
    "a checkpoint";

std::string Hex(uint64_t digest) {
  return absl::StrCat(absl::Hex(digest, absl::kZeroPad16));
}

template <typename Number>
absl::Span<const std::byte> BytesOf(absl::Span<const Number> numbers) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(numbers.data()),
                             numbers.size() * sizeof(Number));
}

absl::Span<const std::byte> BytesOf(absl::string_view text) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()),
                             text.size());
}

// Returns OK when the rules here cover a job with these options.
absl::Status CheckCovered(const SessionOptions& options) {
  const auto& parameters = options.layout.parameters;
  const bool has_shards = std::any_of(
      parameters.begin(), parameters.end(),
      [](const ParameterSpec& each) { return each.shard.has_value(); });
  if (has_shards || options.partition == PartitionMode::kLocal) {
    return absl::UnimplementedError(
        "nodes that hold different shards clip a step together, which only the "
        "Python package does (across_nodes=\"sharded\"): here each node holds "
        "all parameters");
  }
  if (options.partition == PartitionMode::kReplicated) {
    return absl::UnimplementedError(
        "PartitionMode::kReplicated sums the ranks of one node in its daemon, "
        "and the job is on several: reduce the gradients of all ranks, and "
        "take kGreedy or kContiguous");
  }
  if (options.speculative) {
    return absl::UnimplementedError(
        "a speculative job begins steps before all nodes have decided about "
        "them: leave speculative out on several nodes");
  }
  if (options.two_phase) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "the session would take steps before all nodes have agreed: call Place() "
      "with its options first");
}

NodeStep StepOf(const Outcome& outcome) {
  return {.step = outcome.step,
          .digest = outcome.digest,
          .found_inf = outcome.found_inf};
}

JobAddress AddressOf(const SessionOptions& options) {
  JobAddress address;
  address.endpoint = options.endpoint;
  address.job = options.job;
  address.timeout = options.connect_timeout;
  address.daemon_path = options.daemon_path;
  address.interrupted = options.interrupted;
  return address;
}

// Asks this node's daemon how far the job is; nullopt: it has none.
absl::StatusOr<std::optional<NodePosition>> Ask(const SessionOptions& options) {
  const absl::StatusOr<JobPosition> found = FindPosition(AddressOf(options));
  if (absl::IsNotFound(found.status())) return std::nullopt;
  OPTSTATE_RETURN_IF_ERROR(found.status());
  if (found->prepared_is_clipped) {
    return absl::UnimplementedError(absl::StrCat(
        "job \"", options.job,
        "\" has prepared a step that is clipped by the "
        "norm of nodes which hold different shards: only the Python package "
        "settles it (across_nodes=\"sharded\")"));
  }
  NodePosition position;
  // A step without an outcome has nothing but its number.
  if (found->last_outcome.has_value()) {
    position.committed = StepOf(*found->last_outcome);
  }
  position.committed.step = found->committed_step;
  if (found->prepared.has_value()) position.prepared = StepOf(*found->prepared);
  position.loads_finished = found->loads_finished;
  position.durable_step = found->durable_step;
  return position;
}

// A position as numbers, which ranks gather.
constexpr size_t kPositionNumbers = 10;
using PositionNumbers = std::array<uint64_t, kPositionNumbers>;

PositionNumbers ToNumbers(const std::optional<NodePosition>& position) {
  if (!position.has_value()) return {};
  const NodeStep prepared = position->prepared.value_or(NodeStep());
  return {1,
          position->committed.step,
          position->committed.digest,
          position->committed.found_inf ? uint64_t{1} : 0,
          position->prepared.has_value() ? uint64_t{1} : 0,
          prepared.step,
          prepared.digest,
          prepared.found_inf ? uint64_t{1} : 0,
          position->loads_finished,
          position->durable_step};
}

std::optional<NodePosition> FromNumbers(absl::Span<const uint64_t> numbers) {
  if (numbers[0] == 0) return std::nullopt;
  NodePosition position;
  position.committed = {
      .step = numbers[1], .digest = numbers[2], .found_inf = numbers[3] != 0};
  if (numbers[4] != 0) {
    position.prepared = NodeStep{
        .step = numbers[5], .digest = numbers[6], .found_inf = numbers[7] != 0};
  }
  position.loads_finished = static_cast<uint32_t>(numbers[8]);
  position.durable_step = numbers[9];
  return position;
}

// The error of a rank that has voted, or was about to, and did not hear the
// others.
absl::Status Undecided(const absl::StatusOr<Outcome>& prepared,
                       const absl::Status& failure) {
  if (!prepared.ok()) return prepared.status();
  if (!prepared->prepared) return failure;
  return absl::UnavailableError(absl::StrCat(
      "step ", prepared->step,
      " is prepared on this node, and this rank does "
      "not know what all have decided: ",
      failure.message(),
      ". Start all ranks of all nodes again: Settle() brings "
      "the decision, and they go on with this step or without it on all nodes "
      "alike"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<NodeAgreement>> NodeAgreement::Make(
    Collective* collective, const std::string& node) {
  OPTSTATE_ASSIGN_OR_RETURN(std::vector<std::string> names,
                            GatherTexts(*collective, node));
  OPTSTATE_ASSIGN_OR_RETURN(Places places,
                            Places::Make(std::move(names), collective->rank()));
  return std::unique_ptr<NodeAgreement>(
      new NodeAgreement(collective, std::move(places)));
}

NodeAgreement::NodeAgreement(Collective* collective, Places places)
    : collective_(*collective), places_(std::move(places)) {}

void NodeAgreement::Place(SessionOptions* options) const {
  options->rank = places_.local_rank();
  options->world_size = places_.local_world_size();
  options->local_world_size = places_.local_world_size();
  options->two_phase = true;
}

absl::Status NodeAgreement::Agree(const absl::Status& mine) {
  return AgreeOn(collective_, mine);
}

absl::Status NodeAgreement::Settle(const SessionOptions& options) {
  OPTSTATE_RETURN_IF_ERROR(Agree(CheckCovered(options)));
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<std::string> jobs,
                            GatherTexts(collective_, options.job));
  for (uint32_t rank = 0; rank < jobs.size(); ++rank) {
    for (uint32_t other = 0; other < rank; ++other) {
      if (places_.name_of(rank) != places_.name_of(other) ||
          jobs[rank] == jobs[other]) {
        continue;
      }
      return absl::FailedPreconditionError(
          absl::StrCat("ranks ", other, " and ", rank, " are on node ",
                       places_.name_of(rank), " and name different jobs, \"",
                       jobs[other], "\" and \"", jobs[rank], "\""));
    }
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<Unlike> unlike,
                            FindUnlike(collective_, JobFacts(options)));
  if (unlike.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks ask for different jobs \"", options.job,
                     "\": ", unlike->of_first, " on rank 0 (",
                     places_.name_of(0), "), ", unlike->of_other, " on rank ",
                     unlike->rank, " (", places_.name_of(unlike->rank),
                     "). Give all ranks the same layout and options"));
  }
  for (int round = 0; round < kRoundsMax; ++round) {
    OPTSTATE_ASSIGN_OR_RETURN(
        const std::vector<std::optional<NodePosition>> positions,
        Positions(options));
    const absl::StatusOr<std::map<size_t, Verdict>> verdicts =
        Resolve(positions, places_.nodes());
    if (!verdicts.ok()) {
      return Annotate(verdicts.status(),
                      absl::StrCat("job \"", options.job, "\""));
    }
    if (verdicts->empty()) return absl::OkStatus();
    OPTSTATE_RETURN_IF_ERROR(Agree(Bring(options, positions, *verdicts)));
  }
  return absl::AbortedError(
      absl::StrCat("the nodes of job \"", options.job,
                   "\" do not settle: other ranks still take steps of it"));
}

absl::StatusOr<std::vector<std::optional<NodePosition>>>
NodeAgreement::Positions(const SessionOptions& options) {
  absl::StatusOr<std::optional<NodePosition>> mine =
      std::optional<NodePosition>();
  if (places_.is_first_rank()) mine = Ask(options);
  OPTSTATE_RETURN_IF_ERROR(Agree(mine.status()));
  const PositionNumbers numbers = ToNumbers(*mine);
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint64_t> all,
                            GatherNumbers(collective_, numbers));
  std::vector<std::optional<NodePosition>> positions;
  positions.reserve(places_.nodes().size());
  for (const uint32_t rank : places_.first_ranks()) {
    positions.push_back(FromNumbers(absl::MakeConstSpan(all).subspan(
        rank * kPositionNumbers, kPositionNumbers)));
  }
  return positions;
}

absl::Status NodeAgreement::Bring(
    const SessionOptions& options,
    absl::Span<const std::optional<NodePosition>> positions,
    const std::map<size_t, Verdict>& verdicts) const {
  const auto verdict = verdicts.find(places_.node());
  if (!places_.is_first_rank() || verdict == verdicts.end()) {
    return absl::OkStatus();
  }
  // A verdict is given to nodes that have prepared the step alone.
  const NodeStep& prepared = *positions[places_.node()]->prepared;
  const StepVerdict brought = {.step = prepared.step,
                               .digest = prepared.digest,
                               .verdict = verdict->second,
                               .gradient_norm = 0,
                               .clip_coefficient = 1};
  const absl::Time deadline = absl::Now() + kEndsWithin;
  while (true) {
    const absl::Status status =
        BringVerdict(AddressOf(options), brought).status();
    // Another rank was faster, which the next positions show.
    if (absl::IsFailedPrecondition(status)) return absl::OkStatus();
    // Ranks of the run before are attached still.
    if (!absl::IsUnavailable(status) || absl::Now() >= deadline) return status;
    absl::SleepFor(kPause);
  }
}

absl::Status NodeAgreement::CheckNumbers(absl::Span<const uint64_t> mine,
                                         absl::Span<const std::string> names) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint64_t> all,
                            GatherNumbers(collective_, mine));
  for (size_t i = mine.size(); i < all.size(); ++i) {
    const size_t which = i % mine.size();
    if (all[i] == all[which]) continue;
    const auto rank = static_cast<uint32_t>(i / mine.size());
    return absl::FailedPreconditionError(
        absl::StrCat("the nodes of the job differ in ", names[which], ": ",
                     places_.name_of(0), " (rank 0) and ",
                     places_.name_of(rank), " (rank ", rank, ")", kBeginAgain));
  }
  return absl::OkStatus();
}

absl::Status NodeAgreement::CheckAttached(Session& session) {
  const SessionInfo info = session.info();
  const LossScalerState& scaler = info.loss_scaler;
  const std::array<uint64_t, 6> facts = {
      static_cast<uint64_t>(info.phase),
      info.committed_step,
      ContentDigest(BytesOf(session.layout().hash()), /*seed=*/0),
      absl::bit_cast<uint64_t>(scaler.loss_scale),
      scaler.good_steps,
      scaler.hysteresis_left};
  const std::array<std::string, 6> names = {"phase",
                                            "committed step",
                                            "layout",
                                            "loss scale",
                                            "the loss scaler's good steps",
                                            "the loss scaler's hysteresis"};
  OPTSTATE_RETURN_IF_ERROR(CheckNumbers(facts, names));
  if (info.phase != JobPhase::kReady) return absl::OkStatus();
  const absl::Span<const ParameterSpec> parameters =
      session.layout().parameters();
  std::vector<uint64_t> digests;
  std::vector<std::string> parameter_names;
  digests.reserve(parameters.size());
  parameter_names.reserve(parameters.size());
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    // Empty in a session that fetches its parameters one by one.
    digests.push_back(ContentDigest(session.parameter(i), /*seed=*/0));
    parameter_names.push_back(
        absl::StrCat("parameter \"", parameters[i].name, "\""));
  }
  OPTSTATE_RETURN_IF_ERROR(Agree(session.CheckParameterArea()));
  const uint64_t all =
      ContentDigest(BytesOf(absl::MakeConstSpan(digests)), /*seed=*/0);
  const std::string in_parameters = "parameters";
  const absl::Status alike = CheckNumbers(
      absl::MakeConstSpan(&all, 1), absl::MakeConstSpan(&in_parameters, 1));
  if (!absl::IsFailedPrecondition(alike)) return alike;
  OPTSTATE_RETURN_IF_ERROR(CheckNumbers(digests, parameter_names));
  return alike;
}

void NodeAgreement::NoteLoad(StateArray array, uint32_t parameter,
                             absl::Span<const std::byte> data) {
  const std::array<uint64_t, 3> before = {loaded_, static_cast<uint64_t>(array),
                                          parameter};
  const uint64_t seed =
      ContentDigest(BytesOf(absl::Span<const uint64_t>(before)), /*seed=*/0);
  loaded_ = ContentDigest(data, seed);
}

absl::StatusOr<std::vector<std::optional<NodeStep>>> NodeAgreement::Votes(
    const absl::StatusOr<Outcome>& prepared) {
  constexpr size_t kNumbers = 4;
  std::array<uint64_t, kNumbers> mine = {};
  if (prepared.ok()) {
    mine = {1, prepared->step, prepared->found_inf ? uint64_t{1} : 0,
            prepared->digest ^ loaded_};
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint64_t> all,
                            GatherNumbers(collective_, mine));
  std::vector<std::optional<NodeStep>> votes;
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

absl::Status NodeAgreement::Difference(
    absl::Span<const std::optional<NodeStep>> votes) const {
  std::string said;
  for (size_t node = 0; node < places_.nodes().size(); ++node) {
    const std::optional<NodeStep>& vote = votes[places_.first_ranks()[node]];
    absl::StrAppend(&said, said.empty() ? "" : "; ", places_.nodes()[node],
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

absl::StatusOr<Outcome> NodeAgreement::Take(Session& session,
                                            const CommitOptions& options,
                                            const ParameterTargets& read) {
  // Nothing is prepared that nobody would hear of.
  OPTSTATE_RETURN_IF_ERROR(collective_.failure());
  const absl::StatusOr<Outcome> prepared = session.info().commit_open
                                               ? session.CommitWait()
                                               : session.Commit(options);
  if (absl::IsCancelled(prepared.status())) return prepared.status();
  const absl::StatusOr<std::vector<std::optional<NodeStep>>> votes =
      Votes(prepared);
  if (!votes.ok()) return Undecided(prepared, votes.status());
  const Verdict verdict = DecideVotes(*votes);
  absl::StatusOr<Outcome> taken = prepared;
  if (prepared.ok() && prepared->prepared) {
    taken = session.Decide({.step = prepared->step,
                            .digest = prepared->digest,
                            .verdict = verdict,
                            .gradient_norm = 0,
                            .clip_coefficient = 1});
  }
  if (verdict == Verdict::kAbort) {
    OPTSTATE_RETURN_IF_ERROR(Agree(taken.status()));
    return Difference(*votes);
  }
  OPTSTATE_RETURN_IF_ERROR(taken.status());
  if (taken->applied && !read.parameters.empty()) {
    OPTSTATE_RETURN_IF_ERROR(session.ReadParameters(read));
  }
  return taken;
}

}  // namespace optstate::client
