#include "client/collective/sharded/shared_out.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/collective/gather.h"
#include "client/collective/nodes/job_facts.h"
#include "client/collective/sharded/step_settings.h"
#include "proto/types/dtype.h"
#include "proto/types/shard.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr size_t kBitsPerWord = 64;

constexpr absl::string_view kBeginAgain =
    "Delete the job on all nodes (optctl delete job) and begin it again from a "
    "checkpoint";

absl::Status CheckSize(absl::string_view what, const ParameterSpec& parameter,
                       DType dtype, size_t bytes) {
  const uint64_t expected =
      static_cast<uint64_t>(parameter.numel) * SizeInBytes(dtype);
  if (bytes == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      what, " \"", parameter.name, "\" has ", bytes, " bytes, and ",
      parameter.numel, " elements of ", Name(dtype), " have ", expected));
}

absl::Status CheckCount(absl::string_view what, size_t count, size_t expected) {
  if (count == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      count, " ", what, ", the layout has ", expected, " parameters"));
}

std::string Describe(const LossScalerState& scaler) {
  if (scaler.loss_scale == 0) return "no loss scaler";
  return absl::StrFormat("loss scale %.17g after %d good steps, hysteresis %d",
                         scaler.loss_scale, scaler.good_steps,
                         scaler.hysteresis_left);
}

// Returns OK when steps of several nodes cover a job with these options.
absl::Status CheckCovered(const SessionOptions& options) {
  if (options.speculative) {
    return absl::UnimplementedError(
        "a speculative job begins steps before all nodes have decided about "
        "them: leave speculative out on several nodes");
  }
  if (options.two_phase && options.partition == PartitionMode::kLocal) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "the session would take steps before all nodes have agreed: call Place() "
      "with its options first");
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedOut>> SharedOut::Make(
    Collective* collective, const Places& places, LayoutSpec layout,
    const SharedOutOptions& options) {
  absl::StatusOr<std::unique_ptr<SharedOut>> made =
      MakeMine(collective, places, std::move(layout), options);
  // No rank waits for one that has given up.
  OPTSTATE_RETURN_IF_ERROR(AgreeOn(*collective, made.status()));
  OPTSTATE_RETURN_IF_ERROR((*made)->CheckAlike());
  return made;
}

absl::StatusOr<std::unique_ptr<SharedOut>> SharedOut::Make(
    Collective* collective, const std::string& node, LayoutSpec layout,
    const SharedOutOptions& options) {
  OPTSTATE_ASSIGN_OR_RETURN(std::vector<std::string> names,
                            GatherTexts(*collective, node));
  OPTSTATE_ASSIGN_OR_RETURN(const Places places,
                            Places::Make(std::move(names), collective->rank()));
  return Make(collective, places, std::move(layout), options);
}

absl::StatusOr<std::unique_ptr<SharedOut>> SharedOut::MakeMine(
    Collective* collective, const Places& places, LayoutSpec layout,
    const SharedOutOptions& options) {
  OPTSTATE_RETURN_IF_ERROR(CheckReducerOptions(options.reduction));
  if (options.reduction.quantization.has_value()) {
    return absl::UnimplementedError(
        "quantised gradients go to all ranks, and shared out parameters have "
        "one owner each: leave quantization out");
  }
  if (options.ownership != PartitionMode::kGreedy &&
      options.ownership != PartitionMode::kContiguous) {
    return absl::InvalidArgumentError(
        "ownership is neither kGreedy nor kContiguous");
  }
  OPTSTATE_ASSIGN_OR_RETURN(Layout whole, Layout::Make(layout));
  OPTSTATE_ASSIGN_OR_RETURN(
      std::vector<Share> shares,
      MakeShares(whole, options.ownership, collective->world_size()));
  std::unique_ptr<SharedOut> shared(
      new SharedOut(collective, places, std::move(layout), std::move(whole),
                    options, std::move(shares)));
  for (const Share& each : shared->shares_) {
    shared->byte_shares_.push_back(InBytes(each, shared->layout_));
    shared->longest_bytes_ =
        std::max(shared->longest_bytes_, shared->byte_shares_.back().size());
  }
  std::vector<const Share*> local;
  for (uint32_t rank = 0; rank < collective->world_size(); ++rank) {
    if (places.name_of(rank) != places.node_name()) continue;
    local.push_back(&shared->shares_[rank]);
  }
  shared->node_layout_ = MakeNodeLayout(shared->layout_, local);
  OPTSTATE_ASSIGN_OR_RETURN(const Layout node,
                            Layout::Make(shared->node_layout_));
  shared->node_hash_ = node.hash();
  // Both lists are in the order of the parameters.
  uint32_t next = 0;
  for (const OwnedPart& part : shared->mine().parts()) {
    const ParameterSpec& spec = shared->layout_.parameters[part.parameter];
    const std::string name = ShardName(spec.name, places.local_rank());
    while (shared->node_layout_.parameters[next].name != name) ++next;
    shared->node_parameters_.push_back(next);
  }
  return shared;
}

SharedOut::SharedOut(Collective* collective, const Places& places,
                     LayoutSpec layout, Layout whole,
                     const SharedOutOptions& options, std::vector<Share> shares)
    : collective_(*collective),
      places_(places),
      layout_(std::move(layout)),
      whole_(std::move(whole)),
      options_(options),
      shares_(std::move(shares)),
      scatter_(collective, &whole_, &shares_, options.reduction),
      gradient_norm_(&whole_, &shares_),
      agreement_(collective, &places_) {}

absl::Status SharedOut::CheckAlike() const {
  SessionOptions session;
  session.layout = layout_;
  session.partition = options_.ownership;
  const ReducerOptions& how = options_.reduction;
  const std::string settings = absl::StrCat(
      JobFacts(session), "communication ", Name(how.communication),
      "\nbucket_bytes ", how.bucket_bytes, "\nreduction ",
      how.reduction == ReductionOp::kSum ? "sum" : "mean",
      absl::StrFormat("\npredivide_factor %.17g\npostscale_factor %.17g\n",
                      how.predivide_factor, how.postscale_factor));
  return CheckText(settings,
                   "ranks share out other parameters, or in another way",
                   "Give all ranks the same layout and options");
}

void SharedOut::Place(SessionOptions* options) const {
  options->layout = node_layout_;
  options->partition = PartitionMode::kLocal;
  options->rank = places_.local_rank();
  options->world_size = places_.local_world_size();
  options->local_world_size = places_.local_world_size();
  options->two_phase = true;
}

absl::Status SharedOut::Settle(const SessionOptions& options) {
  OPTSTATE_RETURN_IF_ERROR(AgreeOn(collective_, CheckCovered(options)));
  // Make() has compared the layouts of all; those of nodes differ.
  SessionOptions alike = options;
  alike.layout = layout_;
  OPTSTATE_RETURN_IF_ERROR(CheckText(
      JobFacts(alike),
      absl::StrCat("ranks ask for different jobs \"", options.job, "\""),
      "Give all ranks the same options"));
  return agreement_.Settle(options);
}

absl::Status SharedOut::CheckText(absl::string_view mine,
                                  absl::string_view before,
                                  absl::string_view then) const {
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<Unlike> unlike,
                            FindUnlike(collective_, mine));
  if (!unlike.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      before, ": ", unlike->of_first, " on rank 0 (", places_.name_of(0), "), ",
      unlike->of_other, " on rank ", unlike->rank, " (",
      places_.name_of(unlike->rank), "). ", then));
}

absl::Status SharedOut::CheckNumbers(absl::Span<const uint64_t> mine,
                                     absl::Span<const std::string> names,
                                     absl::string_view then) const {
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint64_t> all,
                            GatherNumbers(collective_, mine));
  for (size_t i = mine.size(); i < all.size(); ++i) {
    const size_t which = i % mine.size();
    if (all[i] == all[which]) continue;
    const auto rank = static_cast<uint32_t>(i / mine.size());
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks differ in the ", names[which], ": ", all[which],
        " on rank 0 (", places_.name_of(0), "), ", all[i], " on rank ", rank,
        " (", places_.name_of(rank), "). ", then));
  }
  return absl::OkStatus();
}

absl::Status SharedOut::Agree(const absl::Status& mine) {
  return AgreeOn(collective_, mine);
}

absl::Status SharedOut::CheckAttached(const Session& session) {
  absl::Status is_mine;
  if (session.layout().hash() != node_hash_) {
    is_mine = absl::InvalidArgumentError(
        "the session is not of this rank's share: open it with the options "
        "that Place() has set");
  }
  OPTSTATE_RETURN_IF_ERROR(AgreeOn(collective_, is_mine));
  const SessionInfo info = session.info();
  const std::array<uint64_t, 2> facts = {static_cast<uint64_t>(info.phase),
                                         info.committed_step};
  const std::array<std::string, 2> names = {"phase of the job",
                                            "committed step"};
  OPTSTATE_RETURN_IF_ERROR(CheckNumbers(facts, names, kBeginAgain));
  return CheckText(Describe(info.loss_scaler),
                   "the nodes of the job differ in the loss scaler",
                   kBeginAgain);
}

absl::Status SharedOut::Load(Session& session, StateArray array,
                             uint32_t parameter, DType dtype,
                             absl::Span<const std::byte> data) {
  if (parameter >= layout_.parameters.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", parameter, " is not one of the ",
                     layout_.parameters.size(), " of the layout"));
  }
  const size_t index = mine().IndexOf(parameter);
  if (index == mine().parts().size()) return absl::OkStatus();
  const OwnedPart& part = mine().parts()[index];
  const ParameterSpec& spec = layout_.parameters[parameter];
  const uint32_t here = node_parameters_[index];
  if (IsPerParameter(array) ||
      part.count == static_cast<uint64_t>(spec.numel)) {
    return session.Load(array, here, dtype, data);
  }
  OPTSTATE_RETURN_IF_ERROR(CheckSize("the array of", spec, dtype, data.size()));
  const uint64_t element = SizeInBytes(dtype);
  return session.Load(array, here, dtype,
                      data.subspan(part.begin * element, part.count * element));
}

absl::Status SharedOut::CheckParameters(
    const Session& session,
    absl::Span<const absl::Span<std::byte>> parameters) const {
  OPTSTATE_RETURN_IF_ERROR(session.CheckHasParameters());
  OPTSTATE_RETURN_IF_ERROR(session.CheckParameterArea());
  OPTSTATE_RETURN_IF_ERROR(
      CheckCount("parameters", parameters.size(), layout_.parameters.size()));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterSpec& spec = layout_.parameters[i];
    OPTSTATE_RETURN_IF_ERROR(
        CheckSize("parameter", spec, spec.dtype, parameters[i].size()));
  }
  return absl::OkStatus();
}

absl::Status SharedOut::CheckStep(
    const Session& session, const CommitOptions& commit,
    absl::Span<const absl::Span<const std::byte>> gradients,
    absl::Span<const absl::Span<std::byte>> parameters,
    const std::vector<bool>* has_gradient) const {
  OPTSTATE_RETURN_IF_ERROR(CheckParameters(session, parameters));
  OPTSTATE_RETURN_IF_ERROR(
      CheckCount("gradients", gradients.size(), layout_.parameters.size()));
  if (has_gradient != nullptr) {
    OPTSTATE_RETURN_IF_ERROR(CheckCount("has_gradient", has_gradient->size(),
                                        layout_.parameters.size()));
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (has_gradient != nullptr && !(*has_gradient)[i]) continue;
    const ParameterSpec& spec = layout_.parameters[i];
    OPTSTATE_RETURN_IF_ERROR(CheckSize(
        "the gradient of", spec, spec.gradient_dtype, gradients[i].size()));
  }
  return CheckSettings(commit, layout_.groups.size(), agreement_.is_split());
}

absl::Status SharedOut::ShareHasGradient() {
  const size_t words = (has_mine_.size() + kBitsPerWord - 1) / kBitsPerWord;
  std::vector<uint64_t> bits(words);
  for (size_t i = 0; i < has_mine_.size(); ++i) {
    if (has_mine_[i]) bits[i / kBitsPerWord] |= uint64_t{1} << i % kBitsPerWord;
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint64_t> all,
                            GatherNumbers(collective_, bits));
  has_any_.assign(has_mine_.size(), false);
  for (size_t i = 0; i < has_any_.size(); ++i) {
    for (size_t word = i / kBitsPerWord; word < all.size(); word += words) {
      if ((all[word] >> i % kBitsPerWord & 1) != 0) has_any_[i] = true;
    }
  }
  return absl::OkStatus();
}

absl::Status SharedOut::Push(Session& session, uint64_t step) {
  std::vector<uint32_t> parameters;
  std::vector<const void*> gradients;
  for (size_t i = 0; i < node_parameters_.size(); ++i) {
    if (!has_any_[mine().parts()[i].parameter]) continue;
    parameters.push_back(node_parameters_[i]);
    gradients.push_back(scatter_.reduced()[i].data());
  }
  OPTSTATE_RETURN_IF_ERROR(
      session.PushGradients(step, /*micro_step=*/0, parameters, gradients));
  return session.Flush();
}

absl::Status SharedOut::FindNorm(const CommitOptions& commit) {
  if (!agreement_.is_split()) return absl::OkStatus();
  OPTSTATE_ASSIGN_OR_RETURN(
      const double norm,
      gradient_norm_.Compute(collective_, *NormTypeOf(commit.norm_type),
                             scatter_.reduced(), has_any_));
  norm_.gradient_norm = norm / commit.grad_scale;
  norm_.clip_coefficient =
      ClipCoefficient(commit.max_norm, norm_.gradient_norm);
  return absl::OkStatus();
}

absl::Status SharedOut::Stage(
    Session& session, const CommitOptions& commit,
    absl::Span<const absl::Span<const std::byte>> gradients,
    absl::Span<const absl::Span<std::byte>> parameters,
    const std::vector<bool>* has_gradient) {
  absl::Status is_mine = agreement_.CheckDecided(session);
  is_mine.Update(
      CheckStep(session, commit, gradients, parameters, has_gradient));
  OPTSTATE_RETURN_IF_ERROR(AgreeOn(collective_, is_mine));
  has_mine_.assign(layout_.parameters.size(), true);
  if (has_gradient != nullptr) has_mine_ = *has_gradient;
  const std::array<uint64_t, 2> facts = {commit.step, SettingsDigest(commit)};
  const std::array<std::string, 2> names = {
      "step that they take", "settings of the step (as a digest)"};
  OPTSTATE_RETURN_IF_ERROR(CheckNumbers(
      facts, names, "All ranks take the same steps with equal CommitOptions"));
  OPTSTATE_RETURN_IF_ERROR(ShareHasGradient());
  OPTSTATE_RETURN_IF_ERROR(scatter_.Reduce(gradients, has_mine_));
  OPTSTATE_RETURN_IF_ERROR(FindNorm(commit));
  const absl::Status pushed = Push(session, commit.step);
  absl::Status all_pushed = AgreeOn(collective_, pushed);
  // The step may be taken again, with other gradients. An interrupted push may
  // have reached the daemon, which would ignore the next one as a repeat.
  absl::Status dropped;
  if (!all_pushed.ok() && (pushed.ok() || absl::IsCancelled(pushed))) {
    dropped = session.Abort(commit.step);
  }
  if (dropped.ok()) return all_pushed;
  // The session drops them before its next push, or refuses that.
  return absl::Status(
      all_pushed.code(),
      absl::StrCat(all_pushed.message(),
                   "; and the gradients that this rank had pushed could not be "
                   "dropped: ",
                   dropped.message()));
}

CommitOptions SharedOut::ToPrepare(const CommitOptions& commit) const {
  CommitOptions prepared = commit;
  if (!agreement_.is_split()) return prepared;
  // The norm of all nodes' gradients is noted for the prepared step.
  prepared.max_norm = 0;
  prepared.norm_type = 2;
  prepared.awaits_norm = true;
  if (!std::isfinite(norm_.gradient_norm)) prepared.found_inf = true;
  return prepared;
}

absl::StatusOr<Outcome> SharedOut::Step(
    Session& session, const CommitOptions& commit,
    absl::Span<const absl::Span<const std::byte>> gradients,
    absl::Span<const absl::Span<std::byte>> parameters,
    const std::vector<bool>* has_gradient) {
  // A call that was interrupted has left its commit under way.
  const bool goes_on = session.info().commit_open;
  if (!goes_on) {
    OPTSTATE_RETURN_IF_ERROR(
        Stage(session, commit, gradients, parameters, has_gradient));
  }
  const absl::StatusOr<Outcome> prepared =
      goes_on ? session.CommitWait() : session.Commit(ToPrepare(commit));
  if (absl::IsCancelled(prepared.status())) return prepared.status();
  OPTSTATE_ASSIGN_OR_RETURN(const Outcome outcome,
                            agreement_.Take(session, prepared, norm_));
  if (outcome.applied) OPTSTATE_RETURN_IF_ERROR(Spread(session, parameters));
  return outcome;
}

absl::Status SharedOut::Spread(
    Session& session, absl::Span<const absl::Span<std::byte>> parameters) {
  OPTSTATE_RETURN_IF_ERROR(
      AgreeOn(collective_, CheckParameters(session, parameters)));
  const uint64_t ranks = byte_shares_.size();
  const Share& own = byte_shares_[collective_.rank()];
  const uint64_t bucket =
      std::max<uint64_t>(1, options_.reduction.bucket_bytes / ranks);
  std::vector<std::byte> sent;
  std::vector<std::byte> all;
  for (uint64_t begin = 0; begin < longest_bytes_; begin += bucket) {
    const uint64_t size = std::min(bucket, longest_bytes_ - begin);
    sent.assign(size, std::byte{0});
    all.resize(size * ranks);
    own.Visit(begin, begin + size,
              [&](size_t index, uint64_t at, uint64_t count, uint64_t place) {
                const absl::Span<const std::byte> from =
                    session.parameter(node_parameters_[index]);
                std::memcpy(sent.data() + place,
                            from.data() + (at - own.parts()[index].begin),
                            count);
              });
    OPTSTATE_RETURN_IF_ERROR(collective_.AllGather(sent, absl::MakeSpan(all)));
    for (uint64_t rank = 0; rank < ranks; ++rank) {
      const Share& share = byte_shares_[rank];
      share.Visit(
          begin, begin + size,
          [&](size_t index, uint64_t at, uint64_t count, uint64_t place) {
            const uint32_t p = share.parts()[index].parameter;
            std::memcpy(parameters[p].data() + at,
                        all.data() + rank * size + place, count);
          });
    }
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
