#include "tests/crash/crash_script.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "client/fake/fake_arithmetic.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"
#include "tests/crash/crash_layout.h"
#include "tests/crash/draw.h"

namespace optstate::crash {
namespace {

using client::StateArray;

// The number of places where windows may begin.
constexpr size_t kWindowStarts = 1 << 16;
// Small, so that a few frames hold a small part of the state. A record of a
// whole parameter may be larger.
constexpr uint64_t kSubGroupElements = 4 * kTileElements;
constexpr uint64_t kFrames = 4;
constexpr uint64_t kElementBytesMax = 24;  // in a frame
// The budget of each device is small, so that a part of the records stays.
constexpr uint64_t kDeviceBudget = 2 << 20;
// The divisor of gradients that are divided at all.
constexpr double kScale = 1024;

// The purpose that a number is drawn for.
enum Purpose : uint64_t {
  kNoise = 1,
  kWindow,
  kMissingInStep,
  kMissingInMicroStep,
  kSkip,
  kInfiniteParameter,
  kHyperparameters,
  kMaxNorm,
  kGradScale,
  kMaxValue,
  kGroupIsClipped,
  kGroupMaxNorm,
  kLoadMaster,
  kLoadState,
  kLoadWindow,
};

// Returns a scaler that shrinks and grows within a few steps.
client::LossScaler ScalerOf(Scaling scaling) {
  return {.dynamic = scaling == Scaling::kDynamic,
          .init_scale = kScale,
          .growth_interval = 3,
          .hysteresis = 2,
          .min_scale = kScale / 4};
}

double NumberOf(NormType norm_type) {
  switch (norm_type) {
    case NormType::kL1:
      return 1;
    case NormType::kL2:
      return 2;
    case NormType::kInfinity:
      return std::numeric_limits<double>::infinity();
  }
  return 0;
}

// Returns a norm of gradients in [-0.5, 0.5) that are divided by kScale, about.
double UsualNorm(NormType norm_type, uint64_t elements) {
  const auto count = static_cast<double>(elements);
  switch (norm_type) {
    case NormType::kL1:
      return count / 4 / kScale;
    case NormType::kL2:
      return std::sqrt(count / 12) / kScale;
    case NormType::kInfinity:
      return 0.5 / kScale;
  }
  return 0;
}

// The copies that come back while a step is taken, by this engine and perhaps
// the next; they equal what is there at the end.
class ParameterCopies {
 public:
  // There are none of a session that fetches parameters.
  explicit ParameterCopies(const client::Session& session) {
    if (!session.CheckHasParameters().ok()) return;
    const auto count =
        static_cast<uint32_t>(session.layout().parameters().size());
    for (uint32_t p = 0; p < count; ++p) {
      copies_.emplace_back(session.parameter(p).size());
      indices_.push_back(p);
      // The pointer is not null, also without elements.
      copies_.back().reserve(1);
      destinations_.push_back(copies_.back().data());
    }
  }

  client::ParameterTargets targets() const {
    return {.parameters = indices_, .destinations = destinations_};
  }

  absl::Status Check(const client::Session& session) const {
    for (const uint32_t p : indices_) {
      const auto now = session.parameter(p);
      if (std::equal(now.begin(), now.end(), copies_[p].begin())) continue;
      return absl::InternalError(absl::StrCat(
          "parameter ", p, " was read with other values than it has"));
    }
    return absl::OkStatus();
  }

 private:
  std::vector<std::vector<std::byte>> copies_;
  std::vector<uint32_t> indices_;
  std::vector<void*> destinations_;
};

}  // namespace

CrashScript::CrashScript(const Scenario& scenario)
    : scenario_(scenario), layout_(MakeLayout(scenario)) {
  noise_[DType::kFloat32];
  for (const ParameterSpec& parameter : layout_.parameters) {
    noise_[parameter.gradient_dtype];
    noise_elements_ =
        std::max(noise_elements_, static_cast<size_t>(parameter.numel));
  }
  zeros_.resize(noise_elements_ * sizeof(float));
  noise_elements_ += kWindowStarts;
  for (auto& [dtype, bytes] : noise_) {
    bytes.resize((noise_elements_ + 1) * SizeInBytes(dtype));
    for (size_t i = 0; i < noise_elements_; ++i) {
      client::StoreElement(
          dtype, bytes.data(), i,
          static_cast<float>(DrawUnit(scenario_.seed, kNoise, i) - 0.5));
    }
    client::StoreElement(dtype, bytes.data(), noise_elements_,
                         std::numeric_limits<float>::infinity());
  }
}

client::SessionOptions CrashScript::Options(const std::string& endpoint,
                                            const std::string& job,
                                            uint32_t rank) const {
  client::SessionOptions options;
  options.endpoint = endpoint;
  options.job = job;
  options.layout = layout_;
  options.partition = scenario_.partition;
  options.rank = rank;
  options.world_size = scenario_.world_size;
  options.accumulate = scenario_.accumulation.has_value();
  options.accumulate_dtype =
      scenario_.accumulation.value_or(AccumulateDType::kFloat32);
  options.speculative = scenario_.speculates();
  if (scenario_.shares()) options.storage.offload_fraction = 0.3;
  if (scenario_.keeps_on_devices()) {
    options.storage.device_budget_bytes = kDeviceBudget;
  }
  options.notice = [](const std::string&) {};  // ranks are lost all the time
  if (scenario_.scaling != Scaling::kRanks) {
    options.loss_scaler = ScalerOf(scenario_.scaling);
  }
  if (scenario_.swapped()) {
    options.storage.placement = client::Placement::kNvme;
    options.storage.host_budget_bytes = FramesBytes();
  }
  if (scenario_.has_parameters_on_disk()) {
    options.storage.parameters_on_disk = true;
    options.fetches_parameters = true;
  }
  if (scenario_.durable()) {
    options.storage.durability = client::Durability::kStep;
  }
  if (scenario_.swapped() || scenario_.durable()) {
    options.storage.sub_group_elements = kSubGroupElements;
  }
  return options;
}

uint64_t CrashScript::FramesBytes() const {
  uint64_t elements = kSubGroupElements;
  if (!InfoOf(layout_.optimizer).is_separable) {
    for (const ParameterSpec& parameter : layout_.parameters) {
      elements = std::max(elements, static_cast<uint64_t>(parameter.numel));
    }
  }
  return kFrames * (elements + kTileElements) * kElementBytesMax;
}

uint64_t CrashScript::Source(uint32_t rank) const {
  return scenario_.partition == PartitionMode::kReplicated ? rank : 0;
}

const void* CrashScript::Gradient(uint64_t step, uint32_t micro_step,
                                  uint32_t parameter, uint32_t rank) const {
  const DType dtype = layout_.parameters[parameter].gradient_dtype;
  const uint64_t start =
      Draw(scenario_.seed, kWindow + 16 * Source(rank),
           step * scenario_.micro_steps() + micro_step, parameter) %
      kWindowStarts;
  return noise_.at(dtype).data() + start * SizeInBytes(dtype);
}

// Returns a gradient whose last element is infinite.
const void* CrashScript::InfiniteGradient(uint32_t parameter) const {
  const ParameterSpec& spec = layout_.parameters[parameter];
  const uint64_t start =
      noise_elements_ + 1 - static_cast<uint64_t>(spec.numel);
  return noise_.at(spec.gradient_dtype).data() +
         start * SizeInBytes(spec.gradient_dtype);
}

absl::Status CrashScript::Load(client::Session& session) const {
  OPTSTATE_RETURN_IF_ERROR(session.BeginLoad());
  for (uint32_t i = 0; i < layout_.parameters.size(); ++i) {
    const auto bytes =
        static_cast<size_t>(layout_.parameters[i].numel) * sizeof(float);
    const size_t start =
        Draw(scenario_.seed, kWindow, 0, i) % kWindowStarts * sizeof(float);
    OPTSTATE_RETURN_IF_ERROR(
        session.Load(StateArray::kMaster, i, DType::kFloat32,
                     {noise_.at(DType::kFloat32).data() + start, bytes}));
  }
  return session.FinishLoad();
}

// Returns the step count that the first parameter is given, which no training
// leaves, so that it says whether the load was made.
int64_t CountLoadedAfter(uint64_t step) {
  return 1000000 + 1000 * static_cast<int64_t>(step);
}

absl::StatusOr<bool> CrashScript::IsLoadedAfter(client::Session& session,
                                                uint64_t step) const {
  int64_t count = 0;
  const absl::StatusOr<uint64_t> fetched =
      session.Fetch(StateArray::kStepCount, 0,
                    {reinterpret_cast<std::byte*>(&count), sizeof(count)});
  // A later step is being finished, or was by now: all ranks were in it.
  if (absl::IsUnavailable(fetched.status())) return true;
  OPTSTATE_RETURN_IF_ERROR(fetched.status());
  return *fetched > step || count == CountLoadedAfter(step);
}

absl::Status CrashScript::LoadOnce(client::Session& session,
                                   uint64_t step) const {
  const uint64_t seed = scenario_.seed;
  OPTSTATE_RETURN_IF_ERROR(session.BeginLoad());
  for (uint32_t i = 0; i < layout_.parameters.size(); ++i) {
    const ParameterSpec& spec = layout_.parameters[i];
    const auto bytes = static_cast<size_t>(spec.numel) * sizeof(float);
    if (DrawUnit(seed, kLoadMaster, step, i) < 0.7) {
      const size_t start = Draw(seed, kLoadWindow, step, i) % kWindowStarts;
      OPTSTATE_RETURN_IF_ERROR(session.Load(
          StateArray::kMaster, i, DType::kFloat32,
          {noise_.at(DType::kFloat32).data() + start * sizeof(float), bytes}));
    }
    const Layout& layout = session.layout();
    if (DrawUnit(seed, kLoadState, step, i) < 0.7 &&
        layout.has_state_array(0, spec.group)) {
      const uint64_t elements =
          client::ElementCount(layout, StateArray::kState0, spec);
      OPTSTATE_RETURN_IF_ERROR(
          session.Load(StateArray::kState0, i, DType::kFloat32,
                       {zeros_.data(), elements * sizeof(float)}));
    }
  }
  const int64_t count = CountLoadedAfter(step);
  OPTSTATE_RETURN_IF_ERROR(session.Load(
      StateArray::kStepCount, 0, DType::kFloat32,
      {reinterpret_cast<const std::byte*>(&count), sizeof(count)}));
  return session.FinishLoad();
}

absl::Status CrashScript::LoadAfter(client::Session& session, uint64_t step,
                                    RankBoard* board) const {
  if (step % 4 != 2) return absl::OkStatus();
  OPTSTATE_ASSIGN_OR_RETURN(const bool is_loaded, IsLoadedAfter(session, step));
  if (is_loaded) return absl::OkStatus();
  board->phase = RankPhase::kLoad;
  absl::Status loaded;
  do {
    loaded = LoadOnce(session, step);
  } while (absl::IsAborted(loaded));
  return loaded;
}

// Says whether there is a gradient. Where the engine sums the ranks', each may
// have gradients of other parameters.
bool CrashScript::HasGradient(uint64_t step, uint32_t micro_step,
                              uint32_t parameter, uint32_t rank) const {
  if (!scenario_.missing) return true;
  const uint64_t seed = scenario_.seed;
  const uint64_t source = Source(rank);
  return DrawUnit(seed, kMissingInStep, step, parameter) >= 0.3 &&
         DrawUnit(seed, kMissingInMicroStep + 16 * (micro_step + 4 * source),
                  step, parameter) >= 0.1;
}

absl::Status CrashScript::Push(client::Session& session, uint64_t step,
                               uint32_t micro_step, uint32_t rank) const {
  const uint64_t seed = scenario_.seed;
  std::vector<uint32_t> parameters;
  std::vector<const void*> gradients;
  const auto count = static_cast<uint32_t>(layout_.parameters.size());
  const bool infinite = scenario_.overflows() &&
                        DrawUnit(seed, kSkip, step) < 0.2 && micro_step == 0;
  const auto infinite_parameter =
      static_cast<uint32_t>(Draw(seed, kInfiniteParameter, step) % count);
  for (uint32_t i = 0; i < count; ++i) {
    if (!HasGradient(step, micro_step, i, rank)) continue;
    parameters.push_back(i);
    gradients.push_back(infinite && i == infinite_parameter &&
                                layout_.parameters[i].numel > 0
                            ? InfiniteGradient(i)
                            : Gradient(step, micro_step, i, rank));
  }
  return session.PushGradients(step, micro_step, parameters, gradients);
}

// Returns the scale, with a scaler the job's, of which the session knows after
// each step.
double CrashScript::GradScale(const client::Session& session,
                              uint64_t step) const {
  if (scenario_.scaling != Scaling::kRanks)
    return session.info().loss_scaler.loss_scale;
  return DrawUnit(scenario_.seed, kGradScale, step) < 0.5 ? 1 : kScale;
}

// Makes commit options. In some steps the last rank alone knows of an infinite
// gradient.
client::CommitOptions CrashScript::Commit(const client::Session& session,
                                          uint64_t step, uint32_t rank) const {
  const uint64_t seed = scenario_.seed;
  client::CommitOptions commit;
  commit.step = step;
  for (size_t i = 0; i < layout_.groups.size(); ++i) {
    uint64_t drawn = 0;
    commit.groups.push_back(DrawHyperparams(InfoOf(layout_.optimizer), [&] {
      return DrawUnit(seed, kHyperparameters, step, 64 * i + drawn++);
    }));
    if (scenario_.clip_groups && DrawUnit(seed, kGroupIsClipped, i) < 0.5) {
      commit.groups[i].max_norm = UsualNorm(NormType::kL2, scenario_.elements) *
                                  DrawUnit(seed, kGroupMaxNorm, step, i);
    }
  }
  commit.grad_scale = GradScale(session, step);
  if (scenario_.clip) {
    commit.norm_type = NumberOf(scenario_.norm_type);
    commit.max_norm = UsualNorm(scenario_.norm_type, scenario_.elements) *
                      (0.5 + DrawUnit(seed, kMaxNorm, step));
  }
  if (scenario_.clip_elements) {
    commit.max_value =
        (0.1 + 0.4 * DrawUnit(seed, kMaxValue, step)) / commit.grad_scale;
  }
  commit.found_inf = scenario_.skip && rank + 1 == scenario_.world_size &&
                     DrawUnit(seed, kSkip, step) > 0.8;
  return commit;
}

// Some optimizers have no array of their own in some groups.
absl::Status CrashScript::Fetch(client::Session& session, uint64_t step) const {
  const Layout& layout = session.layout();
  const auto parameter = static_cast<uint32_t>(
      Draw(scenario_.seed, kWindow, step) % layout_.parameters.size());
  const ParameterSpec& spec = layout_.parameters[parameter];
  const StateArray array = layout.has_state_array(0, spec.group)
                               ? StateArray::kState0
                               : StateArray::kMaster;
  std::vector<float> values(client::ElementCount(layout, array, spec));
  OPTSTATE_ASSIGN_OR_RETURN(
      const uint64_t fetched,
      session.Fetch(array, parameter,
                    {reinterpret_cast<std::byte*>(values.data()),
                     values.size() * sizeof(float)}));
  if (scenario_.has_parameters_on_disk()) {
    OPTSTATE_RETURN_IF_ERROR(ParameterOf(session, parameter).status());
  }
  if (fetched == step) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("fetched step ", fetched, " after step ", step));
}

absl::Status CrashScript::PushAndCommit(client::Session& session, uint64_t step,
                                        uint32_t rank, RankBoard* board) const {
  board->phase = RankPhase::kPush;
  for (uint32_t i = 0; i < scenario_.micro_steps(); ++i) {
    OPTSTATE_RETURN_IF_ERROR(Push(session, step, i, rank));
  }
  board->phase = RankPhase::kCommit;
  ParameterCopies copies(session);
  OPTSTATE_ASSIGN_OR_RETURN(
      const client::Outcome outcome,
      session.Commit(Commit(session, step, rank), copies.targets()));
  if (outcome.step != step) {
    return absl::InternalError(
        absl::StrCat("committed step ", step, ", got ", outcome.step));
  }
  board->answered_step = step;
  // A job that speculates may have begun the next step, in which another rank
  // is already.
  if (!outcome.applied || scenario_.speculates()) return absl::OkStatus();
  return copies.Check(session);
}

absl::Status CrashScript::RunStep(client::Session& session, uint64_t step,
                                  uint32_t rank, RankBoard* board) const {
  absl::Status taken = PushAndCommit(session, step, rank, board);
  // The process that started this rank knows whether it may have been told so.
  while (absl::IsAborted(taken)) {
    ++board->steps_again;
    OPTSTATE_RETURN_IF_ERROR(session.Abort(step));
    taken = PushAndCommit(session, step, rank, board);
  }
  OPTSTATE_RETURN_IF_ERROR(taken);
  OPTSTATE_RETURN_IF_ERROR(LoadAfter(session, step, board));
  if (step % 3 != 0) return absl::OkStatus();
  board->phase = RankPhase::kFetch;
  return Fetch(session, step);
}

}  // namespace optstate::crash
