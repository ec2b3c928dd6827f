// Tests of the walk that deploy/benchmark times, and of what it is measured
// against.

#include "tests/benchmarks/tensors_step.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/update_kernel.h"
#include "proto/types/optimizer.h"

namespace optstate {
namespace {

// The sizes are before, within and behind a tile's border, and several ranges.
constexpr size_t kSizes[] = {1, 255, 4096, 4097, 300001, 1, 70000};

struct Tensor {
  Tensor(size_t numel, size_t ranks)
      : gradients(ranks, std::vector<float>(numel, 0.25f)),
        parameter(numel, 1),
        exp_avg(numel, 0.5f),
        exp_avg_sq(numel, 0.5f) {
    for (size_t i = 0; i < numel; ++i) {
      parameter[i] += static_cast<float>(i % 997);
    }
  }
  OptstateBenchTensor View() {
    OptstateBenchTensor view = {};
    for (size_t rank = 0; rank < gradients.size(); ++rank) {
      view.gradients[rank] = gradients[rank].data();
    }
    view.master = view.parameter = parameter.data();
    view.state[0] = exp_avg.data();
    view.state[1] = exp_avg_sq.data();
    view.numel = parameter.size();
    return view;
  }

  std::vector<std::vector<float>> gradients;
  std::vector<float> parameter, exp_avg, exp_avg_sq;
};

struct Tensors {
  explicit Tensors(size_t ranks) {
    for (const size_t numel : kSizes) all.emplace_back(numel, ranks);
    for (Tensor& tensor : all) views.push_back(tensor.View());
  }

  std::vector<Tensor> all;
  std::vector<OptstateBenchTensor> views;
};

class TensorsStepTest : public testing::TestWithParam<size_t> {
 protected:
  Workers workers_{2};
  Tensors tensors_{GetParam()};
  const std::unique_ptr<TensorsStep> step_ =
      *TensorsStep::Create({}, GetParam(), tensors_.views, &workers_);
};

TEST_P(TensorsStepTest, UpdatesEachElementOnce) {
  kernels::UpdateInput input;
  input.hyperparams = DefaultHyperparams(OptimizerKind::kAdamW);
  input.step = 1;
  step_->Update(input);

  const kernels::UpdateKernel& kernel = **kernels::FindUpdateKernel({});
  Tensors expected(GetParam());
  for (Tensor& tensor : expected.all) {
    const OptstateBenchTensor of = tensor.View();
    kernels::TileView view;
    view.gradients = absl::MakeConstSpan(of.gradients, GetParam());
    view.parameter = of.parameter;
    view.master = of.master;
    view.state[0] = of.state[0];
    view.state[1] = of.state[1];
    view.numel = of.numel;
    kernel.apply(kernel.prepare(input), view);
  }
  for (size_t i = 0; i < expected.all.size(); ++i) {
    EXPECT_EQ(tensors_.all[i].parameter, expected.all[i].parameter);
    EXPECT_EQ(tensors_.all[i].exp_avg, expected.all[i].exp_avg);
    EXPECT_EQ(tensors_.all[i].exp_avg_sq, expected.all[i].exp_avg_sq);
  }
}

TEST_P(TensorsStepTest, AddsAndLeavesTheState) {
  const Tensors before(GetParam());
  for (const auto order : {AdditionsOrder::kVectors, AdditionsOrder::kBlocks}) {
    step_->AddOnly(order);
    for (size_t i = 0; i < before.all.size(); ++i) {
      Tensor& tensor = tensors_.all[i];
      EXPECT_EQ(tensor.exp_avg, before.all[i].exp_avg);
      EXPECT_EQ(tensor.exp_avg_sq, before.all[i].exp_avg_sq);
      const std::vector<float>& old = before.all[i].parameter;
      for (size_t k = 0; k < old.size(); ++k) {
        ASSERT_EQ(tensor.parameter[k],
                  old[k] + 0.25f * static_cast<float>(GetParam()));
      }
      tensor.parameter = old;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TensorsStepTest, testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace optstate
