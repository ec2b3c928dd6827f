// Tests the work of CUDA's blocks of threads for whole parameters, done by
// loops, against Highway's kernels on every target, bit by bit. No GPU is
// needed.

#include "kernels/cuda/whole_blocks.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/cpu/targets.h"
#include "kernels/cpu/whole_rules.h"
#include "kernels/cuda/serial_block.h"
#include "kernels/cuda/serial_launch.h"
#include "kernels/cuda/test_parameters.h"
#include "kernels/cuda/test_tiles.h"
#include "kernels/cuda/whole_task.h"
#include "kernels/test_seed.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {
namespace {

using Order = SerialBlock::Order;

class WholeBlocksTest : public testing::TestWithParam<OptimizerKind> {
 protected:
  // Compares both orders of the threads with every target.
  static void Compare(const TestParameter& parameter) {
    const auto by_blocks = [&](Order order) {
      return parameter.ComputedBy<AlignedMemory>(
          [&](const std::vector<WholeTask>& tasks, Copies<AlignedMemory>*) {
            return UpdateWholeSerially(order, GetParam(), tasks,
                                       RoundsOf(tasks));
          });
    };
    const TestParameter::Bits computed = by_blocks(Order::kUp);
    ASSERT_FALSE(computed.empty());
    ASSERT_EQ(by_blocks(Order::kDown), computed);
    for (const cpu::Target target : cpu::SupportedTargets()) {
      ASSERT_EQ(parameter.ComputedOn(target), computed)
          << cpu::TargetName(target);
    }
  }
};

TEST_P(WholeBlocksTest, IsWhatEveryTargetDoes) {
  std::mt19937 random(TestSeed());
  for (const TestParameter::Shape& shape : TestParameter::Shapes(GetParam())) {
    SCOPED_TRACE(testing::PrintToString(shape));
    for (const int64_t step_count : {1, 2, 1000}) {
      TestParameter parameter(GetParam(), shape, &random);
      parameter.input().step_count = step_count;
      ASSERT_NO_FATAL_FAILURE(Compare(parameter));
    }
  }
}

TEST_P(WholeBlocksTest, SpecialValuesHaveTheSameBits) {
  std::mt19937 random(TestSeed());
  for (const TestParameter::Shape& shape : TestParameter::Shapes(GetParam())) {
    SCOPED_TRACE(testing::PrintToString(shape));
    for (const uint32_t bits :
         {0xFFF12345u, 0x7F800000u, 0xFF800000u, 0x00000001u, 0x7F7FFFFFu}) {
      const float special = std::bit_cast<float>(bits);
      TestParameter parameter(GetParam(), shape, &random);
      const uint64_t numel = parameter.numel();
      parameter.gradient()[random() % numel] = special;
      if (random() % 2 == 0) parameter.master()[random() % numel] = special;
      for (size_t k = 0; k < kStateArraysMax; ++k) {
        std::vector<float>& state = parameter.state(k);
        if (state.empty() || random() % 2 == 0) continue;
        state[random() % state.size()] = std::abs(special);
      }
      ASSERT_NO_FATAL_FAILURE(Compare(parameter)) << special;
    }
  }
}

TEST_P(WholeBlocksTest, ZerosHaveTheSameBits) {
  std::mt19937 random(TestSeed());
  for (const TestParameter::Shape& shape : TestParameter::Shapes(GetParam())) {
    SCOPED_TRACE(testing::PrintToString(shape));
    TestParameter parameter(GetParam(), shape, &random);
    for (float& value : parameter.gradient()) value = 0;
    ASSERT_NO_FATAL_FAILURE(Compare(parameter));
    for (float& value : parameter.master()) value = 0;
    ASSERT_NO_FATAL_FAILURE(Compare(parameter));
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, WholeBlocksTest,
                         testing::Values(OptimizerKind::kLamb,
                                         OptimizerKind::kAdafactor,
                                         OptimizerKind::kMuon),
                         [](const auto& kind) {
                           return std::string(InfoOf(kind.param).name);
                         });

TEST(MuonBlocksTest, StepsAndNesterovAreThoseOfTheCpu) {
  std::mt19937 random(TestSeed());
  for (const TestParameter::Shape& shape :
       {TestParameter::Shape{66, 70}, {70, 66}}) {
    for (const int steps : {0, 1, 2, 7}) {
      for (const double nesterov : {0.0, 1.0}) {
        TestParameter parameter(OptimizerKind::kMuon, shape, &random);
        parameter.input().hyperparams[muon::kNsSteps] = steps;
        parameter.input().hyperparams[muon::kNesterov] = nesterov;
        // Other tasks of a launch may have more rounds.
        for (const uint32_t more : {0, 3}) {
          ASSERT_EQ(parameter.ComputedBy<AlignedMemory>(
                        [&](const std::vector<WholeTask>& tasks,
                            Copies<AlignedMemory>*) {
                          return UpdateWholeSerially(
                              Order::kUp, OptimizerKind::kMuon, tasks,
                              RoundsOf(tasks) + more);
                        }),
                    parameter.ComputedOn(cpu::SupportedTargets().front()))
              << testing::PrintToString(shape) << " " << steps;
        }
      }
    }
  }
}

TEST(WholeTaskTest, OptimizersThatNeedWholeParametersHaveBlocks) {
  for (const OptimizerInfo& info : Optimizers()) {
    EXPECT_EQ(HasWholeBlocks(info.kind), !info.is_separable) << info.name;
    EXPECT_EQ(UpdateWholeSerially(Order::kUp, info.kind, {}, /*rounds=*/0),
              !info.is_separable)
        << info.name;
  }
}

TEST(WholeTaskTest, MatricesAreTheLastTwoDimensions) {
  const std::vector<int64_t> shape = {2, 5, 3, 4};
  const WholeTask task = WholeTaskOf(OptimizerKind::kAdafactor, {}, shape);
  EXPECT_EQ(task.numel, 120u);
  EXPECT_EQ(task.rows, 3u);
  EXPECT_EQ(task.columns, 4u);
  EXPECT_EQ(task.all_rows, 30u);
  EXPECT_EQ(task.all_columns, 40u);
  EXPECT_EQ(MeansOf(OptimizerKind::kAdafactor, shape), 10u);
  EXPECT_EQ(MeansOf(OptimizerKind::kLamb, shape), 0u);
  EXPECT_EQ(WholeTaskOf(OptimizerKind::kLamb, {}, shape).columns, 0u);
}

TEST(WholeTaskTest, NewtonSchulzHasNoMoreRowsThanColumns) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{3, 4}, {4, 3}}) {
    const WholeTask task = WholeTaskOf(
        OptimizerKind::kMuon,
        {.hyperparams = DefaultHyperparams(OptimizerKind::kMuon)}, shape);
    EXPECT_EQ(task.rows, 3u);
    EXPECT_EQ(task.columns, 4u);
    EXPECT_EQ(task.factors.muon.is_transposed, shape[0] == 4);
    EXPECT_EQ(RoundsOf({&task, 1}), 5u);
    EXPECT_EQ(ScratchOf(OptimizerKind::kMuon, shape), 12u + 2 * 9);
  }
  EXPECT_EQ(ScratchOf(OptimizerKind::kLamb, {}), 0u);
}

}  // namespace
}  // namespace optstate::kernels::cuda
