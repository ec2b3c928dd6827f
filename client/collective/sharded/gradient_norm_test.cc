#include "client/collective/sharded/gradient_norm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "client/collective/single_rank.h"
#include "client/collective/testing/ranks.h"
#include "client/fake/fake_arithmetic.h"
#include "gtest/gtest.h"
#include "proto/types/partition.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

constexpr NormType kAllTypes[] = {NormType::kSumOfAbsolutes,
                                  NormType::kEuclidean,
                                  NormType::kLargestAbsolute};

// Values whose squares do not add up exactly.
std::vector<std::byte> RoughValues(DType dtype, uint64_t numel,
                                   std::mt19937_64& generator) {
  std::uniform_real_distribution<float> value(-1, 1);
  std::uniform_int_distribution<int> exponent(-10, 2);
  std::vector<std::byte> bytes(numel * SizeInBytes(dtype));
  for (uint64_t i = 0; i < numel; ++i) {
    StoreElement(dtype, bytes.data(), i,
                 std::ldexp(value(generator), exponent(generator)));
  }
  return bytes;
}

double Joined(NormType type, double a, double b) {
  return type == NormType::kLargestAbsolute ? std::max(a, b) : a + b;
}

// Computes the definition in kernels/reduce.h, word for word, for numbers.
double Defined(NormType type, DType dtype, const std::byte* gradient,
               uint64_t begin, uint64_t count) {
  double accumulators[16] = {};
  for (uint64_t i = 0; i < count; ++i) {
    const double element =
        std::abs(static_cast<double>(LoadElement(dtype, gradient, begin + i)));
    double& taken = accumulators[i % 16];
    taken = Joined(type, taken,
                   type == NormType::kEuclidean ? element * element : element);
  }
  for (const int half : {8, 4, 2, 1}) {
    for (int k = 0; k < half; ++k) {
      accumulators[k] = Joined(type, accumulators[k], accumulators[k + half]);
    }
  }
  return accumulators[0];
}

TEST(ReduceRun, HasTheOrderOfTheKernels) {
  std::mt19937_64 generator(ScriptSeed());
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const std::vector<std::byte> gradient = RoughValues(dtype, 5000, generator);
    for (const NormType type : kAllTypes) {
      for (const uint64_t count : {0, 1, 15, 16, 17, 1000, 4096}) {
        for (const uint64_t begin : {0, 3, 900}) {
          EXPECT_EQ(ReduceRun(type, dtype, gradient.data(), begin, count),
                    Defined(type, dtype, gradient.data(), begin, count))
              << count << " from " << begin << " on, type "
              << static_cast<int>(type);
        }
      }
    }
  }
}

TEST(ReduceRun, IsNotFiniteWhenAnElementIsNot) {
  for (const float bad : {std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    for (const uint64_t at : {0, 20, 99}) {
      std::vector<float> values(100, 1.0f);
      values[at] = bad;
      for (const NormType type : kAllTypes) {
        EXPECT_FALSE(std::isfinite(ReduceRun(
            type, DType::kFloat32,
            reinterpret_cast<const std::byte*>(values.data()), 0, 100)));
      }
    }
  }
}

// The gradients of all parameters, and what each rank owns of them.
class GradientNormTest : public testing::Test {
 protected:
  GradientNormTest() : layout_(*Layout::Make(MixedLayout())) {
    std::mt19937_64 generator(ScriptSeed());
    for (const ParameterSpec& each : layout_.parameters()) {
      gradients_.push_back(RoughValues(
          each.gradient_dtype, static_cast<uint64_t>(each.numel), generator));
      has_gradient_.push_back(true);
    }
    has_gradient_[2] = false;
  }

  std::vector<std::vector<std::byte>> PartsOf(const Share& share) const {
    std::vector<std::vector<std::byte>> parts;
    for (const OwnedPart& part : share.parts()) {
      const uint64_t bytes =
          SizeInBytes(layout_.parameters()[part.parameter].gradient_dtype);
      const auto begin = gradients_[part.parameter].begin() +
                         static_cast<int64_t>(part.begin * bytes);
      parts.emplace_back(begin,
                         begin + static_cast<int64_t>(part.count * bytes));
    }
    return parts;
  }

  absl::StatusOr<double> Compute(Collective& collective, PartitionMode mode,
                                 NormType type) const {
    OPTSTATE_ASSIGN_OR_RETURN(
        const std::vector<Share> shares,
        MakeShares(layout_, mode, collective.world_size()));
    const GradientNorm norm(&layout_, &shares);
    return norm.Compute(collective, type, PartsOf(shares[collective.rank()]),
                        has_gradient_);
  }

  const Layout layout_;
  std::vector<std::vector<std::byte>> gradients_;
  std::vector<bool> has_gradient_;
};

TEST_F(GradientNormTest, HasTheBitsOfOneRank) {
  const std::unique_ptr<Collective> single = MakeSingleRank();
  for (const uint32_t ranks : {2, 3, 5}) {
    const absl::StatusOr<Collectives> all = MakeTcpRanks(ranks);
    ASSERT_TRUE(all.ok()) << all.status();
    for (const PartitionMode mode :
         {PartitionMode::kGreedy, PartitionMode::kContiguous}) {
      for (const NormType type : kAllTypes) {
        const auto expected = Compute(*single, mode, type);
        ASSERT_TRUE(expected.ok()) << expected.status();
        EXPECT_GT(*expected, 0);
        const std::vector<absl::Status> results =
            OnRanks(*all, [&](Collective& each) -> absl::Status {
              OPTSTATE_ASSIGN_OR_RETURN(const double norm,
                                        Compute(each, mode, type));
              EXPECT_EQ(norm, *expected)
                  << ranks << " ranks, type " << static_cast<int>(type);
              return absl::OkStatus();
            });
        for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
      }
    }
  }
}

// The squares of a parameter without a gradient do not count.
TEST_F(GradientNormTest, IsThatOfTheGradientsThatThereAre) {
  const std::unique_ptr<Collective> single = MakeSingleRank();
  double sum = 0;
  for (uint32_t p = 0; p < gradients_.size(); ++p) {
    if (!has_gradient_[p]) continue;
    const ParameterSpec& spec = layout_.parameters()[p];
    for (uint64_t i = 0; i < static_cast<uint64_t>(spec.numel); ++i) {
      const double element =
          LoadElement(spec.gradient_dtype, gradients_[p].data(), i);
      sum += element * element;
    }
  }
  const auto norm =
      Compute(*single, PartitionMode::kGreedy, NormType::kEuclidean);
  ASSERT_TRUE(norm.ok()) << norm.status();
  EXPECT_NEAR(*norm, std::sqrt(sum), 1e-12 * std::sqrt(sum));
  has_gradient_.assign(has_gradient_.size(), false);
  const auto none =
      Compute(*single, PartitionMode::kGreedy, NormType::kEuclidean);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(*none, 0);
}

}  // namespace
}  // namespace optstate::client
