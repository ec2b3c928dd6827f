// Runs the compiled device code of optimizers that need whole parameters
// without a device: the PTX that nvcc has made is interpreted, and compared
// with the CPU's kernels, bit by bit.

#include <gtest/gtest.h>

#ifndef OPTSTATE_HAS_CUDA

TEST(PtxWholeKernelsTest, NeedsDeviceCode) {
  GTEST_SKIP() << "built without device code: there is no CUDA Toolkit in "
                  "$CUDA_HOME or /usr/local/cuda, or --//:cuda=off";
}

#else

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <typeinfo>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/rule_calls.h"
#include "kernels/cuda/test_parameters.h"
#include "kernels/cuda/test_ptx.h"
#include "kernels/cuda/test_tiles.h"
#include "kernels/cuda/whole_blocks.h"
#include "kernels/cuda/whole_task.h"
#include "kernels/test_seed.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::cuda {
namespace {

using Shape = TestParameter::Shape;

// Does what LaunchWhole of launch.h has a device do.
bool UpdateWholeByPtx(OptimizerKind kind, const std::vector<WholeTask>& tasks,
                      uint32_t rounds) {
  static const TestPtx* const ptx =
      new TestPtx("kernels/cuda/_nvcc/launch/whole_launch.ptx");
  return VisitWholeRule(kind, [&]<class Rule>() {
    return VisitWholePhases<Rule>(
        rounds, [&]<WholePhase kPhase>(uint32_t round) {
          const std::string name =
              absl::StrCat("RunPhase<", Demangled(typeid(Rule).name()),
                           ",(optstate::kernels::cuda::WholePhase)",
                           static_cast<int>(kPhase), ">");
          return RunPtx(ptx->Find(name), tasks.size() * WholeParts(kPhase),
                        {Argument(tasks.data()), round});
        });
  });
}

// Compares what the compiled kernels make of a parameter with what the CPU's
// do. `more_rounds`: other tasks of a launch may have more than this one.
void Compare(OptimizerKind kind, const TestParameter& parameter,
             uint32_t more_rounds = 0) {
  const TestParameter::Bits computed = parameter.ComputedBy<AlignedMemory>(
      [&](const std::vector<WholeTask>& tasks, Copies<AlignedMemory>*) {
        return UpdateWholeByPtx(kind, tasks, RoundsOf(tasks) + more_rounds);
      });
  ASSERT_EQ(computed, parameter.ComputedOn(cpu::PlainTarget()));
}

class PtxWholeTest : public ::testing::TestWithParam<OptimizerKind> {
 protected:
  // Two rounds of Muon read and write both of its matrices, and take less time
  // than five.
  TestParameter ParameterOf(const Shape& shape) {
    TestParameter parameter(GetParam(), shape, &random_);
    if (GetParam() == OptimizerKind::kMuon) {
      parameter.input().hyperparams[muon::kNsSteps] = 2;
    }
    return parameter;
  }

  std::mt19937 random_{TestSeed()};
};

TEST_P(PtxWholeTest, IsWhatTheCpuDoes) {
  // Muon does not count its steps. Averages of others begin at the gradient
  // first, and at what they were later.
  std::vector<int64_t> step_counts = {1};
  if (GetParam() != OptimizerKind::kMuon) step_counts.push_back(1000);
  for (const Shape& shape : TestParameter::Shapes(GetParam())) {
    SCOPED_TRACE(::testing::PrintToString(shape));
    for (const int64_t step_count : step_counts) {
      TestParameter parameter = ParameterOf(shape);
      parameter.input().step_count = step_count;
      ASSERT_NO_FATAL_FAILURE(Compare(GetParam(), parameter)) << step_count;
    }
  }
}

TEST_P(PtxWholeTest, SpecialValuesHaveTheSameBits) {
  for (const Shape& shape : {Shape{3, 5}, {33, 31}, {1, 40}}) {
    SCOPED_TRACE(::testing::PrintToString(shape));
    for (const uint32_t bits :
         {0xFFF12345u, 0x7F800000u, 0xFF800000u, 0x00000001u, 0x7F7FFFFFu}) {
      const float special = std::bit_cast<float>(bits);
      TestParameter parameter = ParameterOf(shape);
      const uint64_t numel = parameter.numel();
      parameter.gradient()[random_() % numel] = special;
      if (random_() % 2 == 0) parameter.master()[random_() % numel] = special;
      std::vector<float>& state = parameter.state(0);
      if (random_() % 2 == 0) {
        state[random_() % state.size()] = std::abs(special);
      }
      ASSERT_NO_FATAL_FAILURE(Compare(GetParam(), parameter)) << special;
    }
  }
}

TEST_P(PtxWholeTest, ZerosHaveTheSameBits) {
  TestParameter parameter = ParameterOf({33, 31});
  for (float& value : parameter.gradient()) value = 0;
  ASSERT_NO_FATAL_FAILURE(Compare(GetParam(), parameter));
  for (float& value : parameter.master()) value = -0.0f;
  ASSERT_NO_FATAL_FAILURE(Compare(GetParam(), parameter));
}

INSTANTIATE_TEST_SUITE_P(Kinds, PtxWholeTest,
                         ::testing::Values(OptimizerKind::kLamb,
                                           OptimizerKind::kAdafactor,
                                           OptimizerKind::kMuon),
                         [](const auto& kind) {
                           return std::string(InfoOf(kind.param).name);
                         });

// Averages with such betas begin at the gradient: the kernel has other code for
// them.
TEST(PtxLambTest, BetasBelowAHalfAreThoseOfTheCpu) {
  std::mt19937 random(TestSeed());
  for (const double beta1 : {0.0, 0.3, 0.9}) {
    for (const double decay : {0.0, 0.07}) {
      TestParameter parameter(OptimizerKind::kLamb, {257}, &random);
      parameter.input().hyperparams[adam::kBeta1] = beta1;
      parameter.input().hyperparams[adam::kBeta2] = 0.4;
      parameter.input().hyperparams[adam::kWeightDecay] = decay;
      ASSERT_NO_FATAL_FAILURE(Compare(OptimizerKind::kLamb, parameter))
          << beta1 << " " << decay;
    }
  }
}

TEST(PtxAdafactorTest, UpdatesAreCutAsOnTheCpu) {
  std::mt19937 random(TestSeed());
  for (const Shape& shape : {Shape{257}, {33, 31}}) {
    for (const double update_max : {1e-3, 1e3}) {
      TestParameter parameter(OptimizerKind::kAdafactor, shape, &random);
      parameter.input().hyperparams[adafactor::kD] = update_max;
      ASSERT_NO_FATAL_FAILURE(Compare(OptimizerKind::kAdafactor, parameter))
          << ::testing::PrintToString(shape) << " " << update_max;
    }
  }
}

TEST(PtxMuonTest, StepsAndNesterovAreThoseOfTheCpu) {
  std::mt19937 random(TestSeed());
  for (const Shape& shape : {Shape{31, 34}, {34, 31}}) {
    for (const int steps : {0, 1, 3}) {
      for (const double nesterov : {0.0, 1.0}) {
        TestParameter parameter(OptimizerKind::kMuon, shape, &random);
        parameter.input().hyperparams[muon::kNsSteps] = steps;
        parameter.input().hyperparams[muon::kNesterov] = nesterov;
        ASSERT_NO_FATAL_FAILURE(
            Compare(OptimizerKind::kMuon, parameter, /*more_rounds=*/1))
            << ::testing::PrintToString(shape) << " " << steps << " "
            << nesterov;
      }
    }
  }
}

}  // namespace
}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_HAS_CUDA
