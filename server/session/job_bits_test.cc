// What the arithmetic of steps promises: equal bits whatever the circumstances,
// and torch's numbers.

#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/reference/adam_reference.h"
#include "proto/types/random_layout.h"
#include "server/session/job_harness.h"

namespace optstate {
namespace {

// Hyperparameters that differ by group and step, as schedulers make them.
std::vector<Hyperparams> GroupsAt(size_t count, uint64_t step) {
  std::vector<Hyperparams> groups(count);
  for (size_t i = 0; i < count; ++i) {
    groups[i].lr =
        1e-3 * static_cast<double>(i + 1) / static_cast<double>(step);
    groups[i].weight_decay = 0.01 * static_cast<double>(i);
    groups[i].maximize = i % 3 == 2;
  }
  return groups;
}

struct Trained {
  std::string state;
  std::vector<double> norms;
};

// Five steps with clipping, scaling, a missing gradient and a skipped step.
Trained Train(JobHarness* harness) {
  const size_t group_count = harness->layout().groups().size();
  const auto last =
      static_cast<uint32_t>(harness->layout().parameters().size() - 1);
  Trained run;
  harness->Start(harness->RandomTensors(1));
  for (uint64_t step = 1; step <= 5; ++step) {
    const std::vector<Hyperparams> groups = GroupsAt(group_count, step);
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

TEST(JobBitsTest, IndependentOfRanksPartitionThreadsAndSubGroups) {
  RandomLayouts layouts;
  for (int round = 0; round < 6; ++round) {
    JobHarness::Setup setup;
    setup.layout = layouts.Next(20);
    setup.workers = 1;
    setup.subgroup_elements = 1 << 20;
    JobHarness plain(setup);
    const Trained expected = Train(&plain);
    for (const uint32_t world_size : {1, 2, 3}) {
      for (const PartitionMode mode :
           {PartitionMode::kGreedy, PartitionMode::kContiguous}) {
        setup.world_size = world_size;
        setup.partition = mode;
        setup.workers = static_cast<uint32_t>(layouts.Uniform(1, 4));
        setup.subgroup_elements =
            static_cast<uint32_t>(layouts.Uniform(1, 4) * kTileElements);
        JobHarness harness(setup);
        const Trained run = Train(&harness);
        EXPECT_EQ(run.norms, expected.norms);
        EXPECT_TRUE(run.state == expected.state)
            << world_size << " ranks, " << setup.workers << " workers, "
            << setup.subgroup_elements << " elements a sub-group";
      }
    }
  }
}

TEST(JobBitsTest, ARestartBetweenStepsChangesNothing) {
  RandomLayouts layouts;
  JobHarness::Setup setup;
  setup.layout = layouts.Next(20);
  setup.world_size = 2;
  JobHarness plain(setup);
  JobHarness restarted(setup);
  plain.Start(plain.RandomTensors(1));
  restarted.Start(plain.RandomTensors(1));
  for (uint64_t step = 1; step <= 4; ++step) {
    const std::vector<Hyperparams> groups =
        GroupsAt(plain.layout().groups().size(), step);
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
  spec.groups = {{}, {true}};
  spec.parameters = {MakeParameter("plain", 5000),
                     MakeParameter("amsgrad", 3000, 1)};
  return spec;
}

// The truth in double, with clipping as torch.nn.utils.clip_grad_norm_ has it.
class Truth {
 public:
  Truth(OptimizerKind optimizer, const Tensors& masters) {
    for (size_t p = 0; p < masters.size(); ++p) {
      const std::vector<double> values(masters[p].begin(), masters[p].end());
      parameters_.emplace_back(optimizer, p == 1, values);
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
  std::vector<AdamReference<double>> parameters_;
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
      const std::vector<Hyperparams> groups = GroupsAt(2, step);
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
        // A few roundings of values below 1 in each of 50 steps.
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
  AdamReference<double> truth(OptimizerKind::kAdamW, true, start);
  const std::vector<Hyperparams> groups(2);
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
  const std::vector<Hyperparams> groups(2);
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
}  // namespace optstate
