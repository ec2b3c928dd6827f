#include "client/collective/nodes/node_agreement.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/base/casts.h"
#include "absl/strings/str_cat.h"
#include "client/collective/gather.h"
#include "client/collective/nodes/job_facts.h"
#include "client/collective/nodes/resolution.h"
#include "client/collective/nodes/settling.h"
#include "client/collective/nodes/voting.h"
#include "client/session/content_digest.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr absl::string_view kBeginAgain =
    ". Delete the job on all nodes (optctl delete job) and begin it again from "
    "a checkpoint";

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
        "nodes that hold different shards clip a step together, as SharedOut "
        "and the Python package (across_nodes=\"sharded\") do: here each node "
        "holds all parameters");
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
  return SettleNodes(collective_, places_, options);
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

absl::StatusOr<Outcome> NodeAgreement::Take(Session& session,
                                            const CommitOptions& options,
                                            const ParameterTargets& read) {
  // Nothing is prepared that nobody would hear of.
  OPTSTATE_RETURN_IF_ERROR(collective_.failure());
  const absl::StatusOr<Outcome> prepared = session.info().commit_open
                                               ? session.CommitWait()
                                               : session.Commit(options);
  if (absl::IsCancelled(prepared.status())) return prepared.status();
  const absl::StatusOr<Votes> votes =
      GatherVotes(collective_, prepared, loaded_);
  if (!votes.ok()) return UndecidedError(prepared, votes.status());
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
    return DifferenceError(places_, *votes);
  }
  OPTSTATE_RETURN_IF_ERROR(taken.status());
  if (taken->applied && !read.parameters.empty()) {
    OPTSTATE_RETURN_IF_ERROR(session.ReadParameters(read));
  }
  return taken;
}

}  // namespace optstate::client
