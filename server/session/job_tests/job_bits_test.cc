// Tests the guarantees of the arithmetic of steps: equal bits in all
// circumstances, and torch's numbers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/reference/optimizer_reference.h"
#include "proto/types/random_layout.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

// Returns hyperparameters that differ by group and step, as schedulers make
// them.
std::vector<Hyperparams> GroupsAt(const Layout& layout, uint64_t step) {
  const OptimizerInfo& info = layout.optimizer_info();
  std::vector<Hyperparams> groups(layout.groups().size(),
                                  DefaultHyperparams(info.kind));
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t k = 0; k < info.hyperparams.size(); ++k) {
      const absl::string_view name = info.hyperparams[k].name;
      if (name == "weight_decay") groups[i][k] = 0.01 * static_cast<double>(i);
      if (name == "maximize") groups[i][k] = i % 3 == 2 ? 1 : 0;
      if (name == "momentum") groups[i][k] = 0.9;
    }
    groups[i][kLr] =
        1e-3 * static_cast<double>(i + 1) / static_cast<double>(step);
  }
  return groups;
}

// Sets the optimizer, with the options that it has; Muon takes only matrices.
void TakeOptimizer(OptimizerKind optimizer, LayoutSpec* layout) {
  layout->optimizer = optimizer;
  for (GroupSpec& group : layout->groups) {
    group.options &= (1u << InfoOf(optimizer).options.size()) - 1;
  }
  if (optimizer != OptimizerKind::kMuon) return;
  for (ParameterSpec& parameter : layout->parameters) {
    parameter.shape = {parameter.numel % 40 + 1, parameter.numel % 50 + 2};
    parameter.numel = parameter.shape[0] * parameter.shape[1];
  }
}

// Returns a job in host memory that the CPU alone updates, wherever the
// environment puts the others: it is what they are compared with.
JobHarness::Setup InHostMemory(JobHarness::Setup setup) {
  setup.storage.set_placement(v1::PLACEMENT_HOST);
  setup.storage.set_offload_fraction(1);
  return setup;
}

// The frames in memory of a job whose records are on disk.
enum class Frames : uint8_t { kLeast, kHalf, kAll };
constexpr const char* kFramesNames[] = {"the least", "half", "all"};

// Sets the budget of a job that has the least frames, when its records are on
// disk. A job with fewer records keeps them.
void SetFrames(Frames frames, JobHarness* harness) {
  const v1::Job job = harness->job().Describe();
  if (job.storage().placement() != v1::PLACEMENT_NVME) return;
  const uint64_t least = job.disk().frames();
  const uint64_t all = std::max(least, job.disk().records());
  uint64_t count = least;
  if (frames == Frames::kHalf) count = (least + all) / 2;
  if (frames == Frames::kAll) count = all;
  if (count == least) return;
  v1::SetJobRequest request;
  request.set_host_budget_bytes(count * job.disk().frame_bytes());
  const auto reply = harness->job().Set(request);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->frames(), count);
}

struct Trained {
  std::string state;
  std::vector<double> norms;
};

// Takes five steps with clipping, scaling, a missing gradient and a skipped
// step.
Trained Train(JobHarness* harness, Frames frames = Frames::kLeast) {
  const auto last =
      static_cast<uint32_t>(harness->layout().parameters().size() - 1);
  Trained run;
  harness->Start(harness->RandomTensors(1));
  SetFrames(frames, harness);
  for (uint64_t step = 1; step <= 5; ++step) {
    const std::vector<Hyperparams> groups = GroupsAt(harness->layout(), step);
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    spec.grad_scale = step == 2 ? 1024 : 1;
    spec.max_norm = step == 3 ? 0.5 : 0;
    spec.found_inf = step == 4;
    harness->SetGradients(
        harness->RandomTensors(step + 10, step == 2 ? 512 : 1));
    std::vector<uint32_t> without;
    if (step == 5) without.push_back(last);
    harness->PushAll(step, 0, without);
    const auto answer = harness->CommitAll(spec);
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.outcome.applied, step != 4);
    run.norms.push_back(answer.outcome.gradient_norm);
    run.norms.push_back(answer.outcome.clip_coefficient);
  }
  run.state = harness->StateBytes();
  return run;
}

struct Formats {
  StateFormat state;
  MasterFormat master;
};
constexpr Formats kFormats[] = {
    {StateFormat::kFloat32, MasterFormat::kFloat32},
    {StateFormat::kBFloat16, MasterFormat::kFloat32},
    {StateFormat::kDynamic8, MasterFormat::kFloat32},
    {StateFormat::kFloat32, MasterFormat::kSplit},
    {StateFormat::kDynamic8, MasterFormat::kSplit},
};

// float16 parameters have no other masters than floats.
void Split(LayoutSpec* layout) {
  layout->master_format = MasterFormat::kSplit;
  for (ParameterSpec& parameter : layout->parameters) {
    if (parameter.dtype == DType::kFloat16) parameter.dtype = DType::kBFloat16;
  }
}

constexpr PartitionMode kModes[] = {PartitionMode::kGreedy,
                                    PartitionMode::kContiguous,
                                    PartitionMode::kReplicated};

// Says whether a combination of world size, partition and format, each by its
// index, is run. A third is, chosen like a Latin square: each format has every
// world size and every partition, and all pairs of these are run.
// OPTSTATE_TEST_ALL_COMBINATIONS has all of them run.
bool IsRun(size_t world, size_t mode, size_t format) {
  static const bool all =
      std::getenv("OPTSTATE_TEST_ALL_COMBINATIONS") != nullptr;
  return all || (world + mode + format) % 3 == 0;
}

// Returns the frames of a job of this world size and partition. IsRun() and
// this are two Latin squares that fit together: each format, each world size
// and each partition is run with all three.
Frames FramesOf(size_t world, size_t mode) {
  return static_cast<Frames>((2 * world + mode) % 3);
}

// Tests the determinism of each optimizer, in every format.
class JobBitsOf : public ::testing::TestWithParam<OptimizerKind> {};

TEST_P(JobBitsOf, RanksPartitionsReductionsThreadsSubGroupsBudgetsAndRestarts) {
  RandomLayouts layouts;
  for (size_t f = 0; f < std::size(kFormats); ++f) {
    const auto& [format, master] = kFormats[f];
    JobHarness::Setup setup;
    setup.layout = layouts.Next(20);
    TakeOptimizer(GetParam(), &setup.layout);
    setup.layout.state_format = format;
    if (master == MasterFormat::kSplit) Split(&setup.layout);
    setup.workers = 1;
    setup.subgroup_elements = 1 << 20;
    JobHarness plain(InHostMemory(setup));
    const Trained expected = Train(&plain);
    for (const uint32_t world_size : {1, 2, 3}) {
      for (size_t m = 0; m < std::size(kModes); ++m) {
        if (!IsRun(world_size, m, f)) continue;
        setup.world_size = world_size;
        setup.partition = kModes[m];
        setup.workers = static_cast<uint32_t>(layouts.Uniform(1, 4));
        setup.subgroup_elements =
            static_cast<uint32_t>(layouts.Uniform(1, 4) * kTileElements);
        const Frames frames = FramesOf(world_size, m);
        JobHarness harness(setup);
        const Trained run = Train(&harness, frames);
        EXPECT_EQ(run.norms, expected.norms);
        EXPECT_TRUE(run.state == expected.state)
            << world_size << " ranks, " << setup.workers << " workers, "
            << setup.subgroup_elements << " elements a sub-group, partition "
            << static_cast<int>(kModes[m]) << ", " << Name(format)
            << ", master " << Name(master)
            << ", frames in memory: " << kFramesNames[static_cast<int>(frames)];
        harness.Close();
        ASSERT_TRUE(harness.Open().ok());
        harness.AttachAll();
        EXPECT_TRUE(harness.StateBytes() == expected.state)
            << "after a restart";
      }
    }
  }
}

// Split masters have the same fp32 values, in two bytes less.
TEST_P(JobBitsOf, SplitMastersAreTheFloatOnes) {
  RandomLayouts layouts;
  JobHarness::Setup setup;
  setup.layout = layouts.Next(20);
  ParameterSpec& first = setup.layout.parameters[0];
  first = MakeParameter(first.name, 1000, first.group, DType::kBFloat16);
  TakeOptimizer(GetParam(), &setup.layout);
  Split(&setup.layout);
  JobHarness split(setup);
  setup.layout.master_format = MasterFormat::kFloat32;
  JobHarness whole(setup);
  EXPECT_EQ(Train(&split).norms, Train(&whole).norms);
  for (uint32_t p = 0; p < setup.layout.parameters.size(); ++p) {
    EXPECT_EQ(split.Fetch(v1::STATE_ARRAY_MASTER, p),
              whole.Fetch(v1::STATE_ARRAY_MASTER, p));
    if (!split.layout().has_state_array(0, setup.layout.parameters[p].group)) {
      continue;
    }
    EXPECT_EQ(split.Fetch(v1::STATE_ARRAY_STATE_0, p),
              whole.Fetch(v1::STATE_ARRAY_STATE_0, p));
  }
  // Beside the log of records that stay on a device, which may take more.
  const auto state_bytes = [](JobHarness* job) {
    const v1::Job described = job->job().Describe();
    return described.state_bytes() - described.device_updates().log_bytes();
  };
  EXPECT_LT(state_bytes(&split), state_bytes(&whole));
}

INSTANTIATE_TEST_SUITE_P(All, JobBitsOf, ::testing::ValuesIn([] {
                           std::vector<OptimizerKind> kinds;
                           for (const OptimizerInfo& each : Optimizers())
                             kinds.push_back(each.kind);
                           return kinds;
                         }()),
                         [](const auto& param_info) {
                           return std::string(InfoOf(param_info.param).name);
                         });

// The state that one optimizer keeps for parameters of these shapes.
struct Kept {
  OptimizerKind optimizer;
  std::vector<std::pair<size_t, double>> hyperparams;  // other than defaults
  int array;
  uint32_t options = 0;
};

Tensors StateAfter(uint64_t steps, const Kept& kept, StateFormat format,
                   const std::vector<std::vector<int64_t>>& shapes) {
  JobHarness::Setup setup;
  setup.layout.optimizer = kept.optimizer;
  setup.layout.state_format = format;
  setup.layout.groups = {{.options = kept.options}};
  for (const std::vector<int64_t>& shape : shapes) {
    int64_t numel = 1;
    for (const int64_t size : shape) numel *= size;
    setup.layout.parameters.push_back(
        MakeParameter(absl::StrCat("p", numel), numel));
    setup.layout.parameters.back().shape = shape;
  }
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  Hyperparams group = DefaultHyperparams(kept.optimizer);
  for (const auto& [index, value] : kept.hyperparams) group[index] = value;
  CommitSpec spec;
  spec.groups = absl::MakeConstSpan(&group, 1);
  for (spec.step = 1; spec.step <= steps; ++spec.step) {
    harness.Step(spec.step, harness.RandomTensors(spec.step + 1), spec);
  }
  Tensors state;
  for (uint32_t p = 0; p < shapes.size(); ++p) {
    state.push_back(harness.Fetch(
        static_cast<v1::StateArray>(v1::STATE_ARRAY_STATE_0 + kept.array), p));
  }
  return state;
}

// The averages are the same and the updates of the parameter differ: the kept
// state, random bits included, must be equal.
TEST(JobBitsTest, WholeParametersKeepTheirStateAsOthersDo) {
  constexpr OptimizerKind kAdamW = OptimizerKind::kAdamW;
  const std::vector<std::vector<int64_t>> matrices = {{64, 65}, {10, 30}};
  const std::vector<std::vector<int64_t>> vectors = {{4160}, {300}};
  for (const StateFormat format :
       {StateFormat::kFloat32, StateFormat::kBFloat16,
        StateFormat::kDynamic8}) {
    for (const int array : {0, 1}) {
      EXPECT_EQ(
          StateAfter(3, {OptimizerKind::kLamb, {}, array}, format, matrices),
          StateAfter(3, {kAdamW, {}, array}, format, matrices))
          << Name(format) << " " << array;
    }
    EXPECT_EQ(
        StateAfter(3, {OptimizerKind::kMuon, {{muon::kMomentum, 0.9}}, 0},
                   format, matrices),
        StateAfter(3, {kAdamW, {{adam::kBeta1, 0.9}}, 0}, format, matrices))
        << Name(format);
    // In the first step both are the gradient's square.
    EXPECT_EQ(
        StateAfter(1, {OptimizerKind::kAdafactor, {}, 2}, format, vectors),
        StateAfter(1, {kAdamW, {{adam::kBeta2, 0}}, 2, adam::kAmsgrad}, format,
                   vectors))
        << Name(format);
  }
}

// Rows and columns are few, and each element affects a row or a column.
TEST(JobBitsTest, AdafactorsRowsAndColumnsAreFloatsInEveryFormat) {
  const std::vector<std::vector<int64_t>> matrices = {{64, 65}, {10, 30}};
  for (const int array : {0, 1}) {
    const Kept kept = {OptimizerKind::kAdafactor, {}, array};
    const Tensors floats = StateAfter(3, kept, StateFormat::kFloat32, matrices);
    EXPECT_EQ(StateAfter(3, kept, StateFormat::kBFloat16, matrices), floats);
    EXPECT_EQ(StateAfter(3, kept, StateFormat::kDynamic8, matrices), floats);
  }
}

TEST(JobBitsTest, ARestartBetweenStepsChangesNothing) {
  RandomLayouts layouts;
  JobHarness::Setup setup;
  setup.layout = layouts.Next(20);
  setup.world_size = 2;
  JobHarness plain(InHostMemory(setup));
  JobHarness restarted(setup);
  plain.Start(plain.RandomTensors(1));
  restarted.Start(plain.RandomTensors(1));
  for (uint64_t step = 1; step <= 4; ++step) {
    const std::vector<Hyperparams> groups = GroupsAt(plain.layout(), step);
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    const Tensors gradients = plain.RandomTensors(step);
    plain.Step(step, gradients, spec);
    restarted.Step(step, gradients, spec);
    restarted.Close();
    ASSERT_TRUE(restarted.Open().ok());
    restarted.AttachAll();
    EXPECT_TRUE(restarted.StateBytes() == plain.StateBytes()) << step;
  }
}

LayoutSpec ReferenceLayout(OptimizerKind optimizer) {
  LayoutSpec spec;
  spec.optimizer = optimizer;
  spec.groups = {{}, {.options = adam::kAmsgrad}};
  spec.parameters = {MakeParameter("plain", 5000),
                     MakeParameter("amsgrad", 3000, 1)};
  return spec;
}

// Computes the truth in double, with clipping as in
// torch.nn.utils.clip_grad_norm_.
class Truth {
 public:
  Truth(OptimizerKind optimizer, const Tensors& masters) {
    for (size_t p = 0; p < masters.size(); ++p) {
      const std::vector<double> values(masters[p].begin(), masters[p].end());
      parameters_.emplace_back(optimizer, p == 1 ? adam::kAmsgrad : 0, values);
    }
  }
  void Step(const Tensors& gradients, const CommitSpec& spec) {
    double sum = 0;
    for (const auto& gradient : gradients) {
      for (const double g : gradient) {
        sum += g / spec.grad_scale * (g / spec.grad_scale);
      }
    }
    norm_ = std::sqrt(sum);
    const double clip =
        spec.max_norm > 0 ? std::min(1.0, spec.max_norm / (norm_ + 1e-6)) : 1;
    for (size_t p = 0; p < gradients.size(); ++p) {
      std::vector<double> unscaled(gradients[p].begin(), gradients[p].end());
      for (double& g : unscaled) g *= clip / spec.grad_scale;
      parameters_[p].Step(spec.groups[p], unscaled);
    }
  }
  double norm() const { return norm_; }
  const std::vector<double>& parameter(size_t p) const {
    return parameters_[p].parameter();
  }

 private:
  std::vector<kernels::OptimizerReference<double>> parameters_;
  double norm_ = 0;
};

TEST(JobBitsTest, FollowsTheDoublePrecisionReference) {
  for (const OptimizerKind optimizer :
       {OptimizerKind::kAdam, OptimizerKind::kAdamW}) {
    JobHarness::Setup setup;
    setup.layout = ReferenceLayout(optimizer);
    setup.world_size = 2;
    setup.partition = PartitionMode::kContiguous;
    JobHarness harness(setup);
    const Tensors masters = harness.RandomTensors(1);
    harness.Start(masters);
    Truth truth(optimizer, masters);
    for (uint64_t step = 1; step <= 50; ++step) {
      const std::vector<Hyperparams> groups = GroupsAt(harness.layout(), step);
      CommitSpec spec;
      spec.step = step;
      spec.groups = groups;
      spec.grad_scale = step % 2 == 0 ? 256 : 1;
      spec.max_norm = step % 3 == 0 ? 1 : 0;
      const Tensors gradients = harness.RandomTensors(step + 10, 4);
      truth.Step(gradients, spec);
      const StepOutcome outcome = harness.Step(step, gradients, spec);
      EXPECT_NEAR(outcome.gradient_norm, truth.norm(), 1e-9 * truth.norm());
    }
    for (uint32_t p = 0; p < 2; ++p) {
      const auto master = harness.Fetch(v1::STATE_ARRAY_MASTER, p);
      for (size_t i = 0; i < master.size(); ++i) {
        // Values below 1 are rounded a few times in each of 50 steps.
        ASSERT_NEAR(master[i], truth.parameter(p)[i], 50 * 2e-7);
      }
    }
  }
}

// Per-parameter counts: a parameter that misses steps gets the bias correction
// of the steps that it took.
TEST(JobBitsTest, MissingGradientsCountAsInTorch) {
  JobHarness::Setup setup;
  setup.layout = ReferenceLayout(OptimizerKind::kAdamW);
  JobHarness harness(setup);
  const Tensors masters = harness.RandomTensors(1);
  harness.Start(masters);
  const std::vector<double> start(masters[1].begin(), masters[1].end());
  kernels::OptimizerReference<double> truth(OptimizerKind::kAdamW,
                                            adam::kAmsgrad, start);
  const std::vector<Hyperparams> groups(2, AdamHyperparams());
  for (uint64_t step = 1; step <= 20; ++step) {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    const Tensors gradients = harness.RandomTensors(step);
    std::vector<uint32_t> without;
    if (step % 3 != 0) without.push_back(1);
    harness.Step(step, gradients, spec, without);
    if (!without.empty()) continue;
    const std::vector<double> g(gradients[1].begin(), gradients[1].end());
    truth.Step(groups[1], g);
  }
  EXPECT_EQ(harness.StepCounts(), (std::vector<int64_t>{20, 6}));
  const auto master = harness.Fetch(v1::STATE_ARRAY_MASTER, 1);
  for (size_t i = 0; i < master.size(); ++i) {
    ASSERT_NEAR(master[i], truth.parameter()[i], 2e-6);
  }
}

TEST(JobBitsTest, AHundredThousandParameters) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}, {}};
  for (int i = 0; i < 100000; ++i) {
    setup.layout.parameters.push_back(
        MakeParameter(absl::StrCat("p", i), i % 5, i < 60000 ? 0 : 1));
  }
  setup.world_size = 2;
  JobHarness harness(setup);
  JobHarness other([&] {
    setup.partition = PartitionMode::kContiguous;
    return setup;
  }());
  const std::vector<Hyperparams> groups(2, AdamHyperparams());
  CommitSpec spec;
  spec.step = 1;
  spec.groups = groups;
  for (JobHarness* each : {&harness, &other}) {
    each->Start(each->RandomTensors(1));
    each->Step(1, each->RandomTensors(2), spec);
    EXPECT_EQ(each->StepCounts(), std::vector<int64_t>(100000, 1));
  }
  EXPECT_TRUE(harness.StateBytes() == other.StateBytes());
}

}  // namespace
}  // namespace optstate::session
