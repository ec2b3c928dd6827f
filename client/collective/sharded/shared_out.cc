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
#include "client/collective/gradients/gradient_elements.h"
#include "client/collective/half_floats.h"
#include "client/collective/nodes/job_facts.h"
#include "proto/types/dtype.h"
#include "proto/types/shard.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr size_t kBitsPerWord = 64;

constexpr absl::string_view kBeginAgain =
    "Delete the job on all nodes (optctl delete job) and begin it again from a "
    "checkpoint";

template <typename Number>
absl::Span<std::byte> BytesOf(std::vector<Number>& numbers, uint64_t count) {
  return absl::MakeSpan(reinterpret_cast<std::byte*>(numbers.data()),
                        count * sizeof(Number));
}

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

bool ClipsByNorm(const CommitOptions& commit) {
  return commit.max_norm != 0 ||
         std::any_of(
             commit.groups.begin(), commit.groups.end(),
             [](const Hyperparams& each) { return each.max_norm != 0; });
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
  OPTSTATE_ASSIGN_OR_RETURN(const Layout whole, Layout::Make(layout));
  std::unique_ptr<SharedOut> shared(
      new SharedOut(collective, places, std::move(layout), options));
  OPTSTATE_ASSIGN_OR_RETURN(
      shared->shares_,
      MakeShares(whole, options.ownership, collective->world_size()));
  for (const Share& each : shared->shares_) {
    shared->byte_shares_.push_back(InBytes(each, shared->layout_));
    shared->longest_elements_ =
        std::max(shared->longest_elements_, each.size());
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
    shared->reduced_.emplace_back(part.count *
                                  SizeInBytes(spec.gradient_dtype));
  }
  return shared;
}

SharedOut::SharedOut(Collective* collective, const Places& places,
                     LayoutSpec layout, const SharedOutOptions& options)
    : collective_(*collective),
      places_(places),
      layout_(std::move(layout)),
      options_(options) {}

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
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<Unlike> unlike,
                            FindUnlike(collective_, settings));
  if (!unlike.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks share out other parameters, or in another way: ", unlike->of_first,
      " on rank 0 (", places_.name_of(0), "), ", unlike->of_other, " on rank ",
      unlike->rank, " (", places_.name_of(unlike->rank),
      "). Give all ranks the same layout and options"));
}

void SharedOut::Place(SessionOptions* options) const {
  options->layout = node_layout_;
  options->partition = PartitionMode::kLocal;
  options->rank = places_.local_rank();
  options->world_size = places_.local_world_size();
  options->local_world_size = places_.local_world_size();
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
  return CheckNumbers(facts, names, kBeginAgain);
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
  if (!ClipsByNorm(commit)) return absl::OkStatus();
  return absl::UnimplementedError(
      "each daemon knows the norm of its own share alone: clip gradients "
      "before the step, and leave max_norm out");
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

void SharedOut::Pack(absl::Span<const absl::Span<const std::byte>> gradients,
                     uint64_t begin, uint64_t size) {
  sums_.assign(size * shares_.size(), 0.0f);
  for (size_t rank = 0; rank < shares_.size(); ++rank) {
    float* const to = sums_.data() + rank * size;
    const Share& share = shares_[rank];
    share.Visit(begin, begin + size,
                [&](size_t index, uint64_t at, uint64_t count, uint64_t place) {
                  const uint32_t p = share.parts()[index].parameter;
                  if (!has_mine_[p]) return;
                  const DType dtype = layout_.parameters[p].gradient_dtype;
                  for (uint64_t i = 0; i < count; ++i) {
                    const auto value = static_cast<double>(
                        LoadGradient(dtype, gradients[p].data(), at + i));
                    to[place + i] = static_cast<float>(
                        value / options_.reduction.predivide_factor);
                  }
                });
  }
}

absl::Status SharedOut::ScatterSums(uint64_t size) {
  scattered_.resize(size);
  if (options_.reduction.communication == ElementType::kFloat32) {
    return collective_.ReduceScatter(ElementType::kFloat32,
                                     BytesOf(sums_, sums_.size()),
                                     BytesOf(scattered_, size));
  }
  halves_.resize(sums_.size());
  scattered_halves_.resize(size);
  std::transform(sums_.begin(), sums_.end(), halves_.begin(),
                 &BFloat16FromFloat);
  OPTSTATE_RETURN_IF_ERROR(collective_.ReduceScatter(
      ElementType::kBFloat16, BytesOf(halves_, halves_.size()),
      BytesOf(scattered_halves_, size)));
  std::transform(scattered_halves_.begin(), scattered_halves_.end(),
                 scattered_.begin(), &FloatFromBFloat16);
  return absl::OkStatus();
}

void SharedOut::Unpack(uint64_t begin, uint64_t size) {
  const ReducerOptions& how = options_.reduction;
  const double factor = how.predivide_factor * how.postscale_factor;
  const double divisor = how.reduction == ReductionOp::kMean
                             ? static_cast<double>(collective_.world_size())
                             : 1.0;
  mine().Visit(
      begin, begin + size,
      [&](size_t index, uint64_t at, uint64_t count, uint64_t place) {
        const OwnedPart& part = mine().parts()[index];
        const DType dtype = layout_.parameters[part.parameter].gradient_dtype;
        std::byte* const to = reduced_[index].data();
        for (uint64_t i = 0; i < count; ++i) {
          const auto sum = static_cast<double>(scattered_[place + i]);
          const uint64_t element = at - part.begin + i;
          StoreGradient(dtype, to, element,
                        static_cast<float>(sum * factor / divisor));
          found_inf_ |= !std::isfinite(LoadGradient(dtype, to, element));
        }
      });
}

// The buckets of all ranks have as many elements of each share, so that each
// rank sums as much.
absl::Status SharedOut::Reduce(
    absl::Span<const absl::Span<const std::byte>> gradients) {
  const uint64_t bucket = std::max<uint64_t>(
      1, options_.reduction.bucket_bytes /
             SizeInBytes(options_.reduction.communication) / shares_.size());
  for (uint64_t begin = 0; begin < longest_elements_; begin += bucket) {
    const uint64_t size = std::min(bucket, longest_elements_ - begin);
    Pack(gradients, begin, size);
    OPTSTATE_RETURN_IF_ERROR(ScatterSums(size));
    Unpack(begin, size);
  }
  return absl::OkStatus();
}

absl::Status SharedOut::Push(Session& session, uint64_t step) {
  std::vector<uint32_t> parameters;
  std::vector<const void*> gradients;
  for (size_t i = 0; i < reduced_.size(); ++i) {
    if (!has_any_[mine().parts()[i].parameter]) continue;
    parameters.push_back(node_parameters_[i]);
    gradients.push_back(reduced_[i].data());
  }
  OPTSTATE_RETURN_IF_ERROR(
      session.PushGradients(step, /*micro_step=*/0, parameters, gradients));
  return session.Flush();
}

absl::StatusOr<Outcome> SharedOut::Step(
    Session& session, CommitOptions commit,
    absl::Span<const absl::Span<const std::byte>> gradients,
    absl::Span<const absl::Span<std::byte>> parameters,
    const std::vector<bool>* has_gradient) {
  OPTSTATE_RETURN_IF_ERROR(
      AgreeOn(collective_,
              CheckStep(session, commit, gradients, parameters, has_gradient)));
  has_mine_.assign(layout_.parameters.size(), true);
  if (has_gradient != nullptr) has_mine_ = *has_gradient;
  found_inf_ = commit.found_inf;
  const std::string of_step = "step that they take";
  OPTSTATE_RETURN_IF_ERROR(CheckNumbers(absl::MakeConstSpan(&commit.step, 1),
                                        absl::MakeConstSpan(&of_step, 1),
                                        "All ranks take the same steps"));
  OPTSTATE_RETURN_IF_ERROR(ShareHasGradient());
  OPTSTATE_RETURN_IF_ERROR(Reduce(gradients));
  const uint64_t found_inf = found_inf_ ? 1 : 0;
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::vector<uint64_t> found_by,
      GatherNumbers(collective_, absl::MakeConstSpan(&found_inf, 1)));
  commit.found_inf = std::any_of(found_by.begin(), found_by.end(),
                                 [](uint64_t each) { return each != 0; });
  const absl::Status pushed = Push(session, commit.step);
  const absl::Status all_pushed = AgreeOn(collective_, pushed);
  if (!all_pushed.ok()) {
    // The step may be taken again, with other gradients.
    if (pushed.ok()) session.Abort(commit.step).IgnoreError();
    return all_pushed;
  }
  absl::StatusOr<Outcome> outcome = session.Commit(commit);
  OPTSTATE_RETURN_IF_ERROR(AgreeOn(collective_, outcome.status()));
  const std::array<uint64_t, 2> facts = {outcome->step,
                                         outcome->applied ? uint64_t{1} : 0};
  const std::array<std::string, 2> names = {"step that was committed",
                                            "application of the step"};
  OPTSTATE_RETURN_IF_ERROR(CheckNumbers(facts, names, kBeginAgain));
  if (outcome->applied) OPTSTATE_RETURN_IF_ERROR(Spread(session, parameters));
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
