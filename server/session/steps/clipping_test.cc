#include "server/session/steps/clipping.h"

#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;

constexpr double kInf = std::numeric_limits<double>::infinity();

class ClippingTest : public ::testing::Test {
 protected:
  explicit ClippingTest(size_t groups = 3) : groups_(groups), out_(groups) {
    spec_.groups = groups_;
  }

  std::vector<double> Factors(const std::vector<double>& norms,
                              double coefficient) {
    FillGroups(spec_, norms, coefficient, absl::MakeSpan(out_));
    std::vector<double> factors;
    for (const storage::StepIntentGroup& group : out_) {
      factors.push_back(group.gradient_factor);
    }
    return factors;
  }

  std::vector<Hyperparams> groups_;
  std::vector<uint32_t> clips_with_;
  CommitSpec spec_;
  std::vector<storage::StepIntentGroup> out_;
};

TEST_F(ClippingTest, TheCoefficientIsTorchs) {
  EXPECT_EQ(ClipCoefficient(0, 1e9), 1);
  EXPECT_EQ(ClipCoefficient(1, 0.5), 1);
  EXPECT_EQ(ClipCoefficient(1, 4), 1 / (4 + 1e-6));
  EXPECT_EQ(ClipCoefficient(1, kInf), 0);
}

TEST_F(ClippingTest, GroupsAreClippedAlone) {
  std::vector<double> sums = {1, 2, 4};
  AddUpSharedNorms(spec_, absl::MakeSpan(sums));
  EXPECT_THAT(sums, ElementsAre(1, 2, 4));
}

TEST_F(ClippingTest, SharedSumsAreThoseOfTheFirstGroup) {
  clips_with_ = {0, 0, 1};  // the third with the first
  spec_.clips_with = clips_with_;
  std::vector<double> sums = {1, 2, 4};
  AddUpSharedNorms(spec_, absl::MakeSpan(sums));
  EXPECT_EQ(sums[0], 5);
  EXPECT_EQ(sums[1], 2);
}

TEST_F(ClippingTest, CoefficientsMultiply) {
  groups_[1].max_norm = 2;
  spec_.grad_scale = 4;
  // The norms are of gradients as they arrived: 80 / 4 is 20.
  EXPECT_THAT(Factors({80, 80, 80}, 0.5),
              ElementsAre(0.5 / 4, 0.5 * (2 / (20 + 1e-6)) / 4, 0.5 / 4));
  EXPECT_TRUE(IsClipped(spec_, out_));
}

TEST_F(ClippingTest, NothingIsClippedBelowTheNorms) {
  groups_[1].max_norm = 100;
  spec_.grad_scale = 4;
  EXPECT_THAT(Factors({80, 80, 80}, 1), ElementsAre(0.25, 0.25, 0.25));
  EXPECT_FALSE(IsClipped(spec_, out_));
  EXPECT_THAT(Factors({80, 800, 80}, 1),
              ElementsAre(0.25, 100 / (200 + 1e-6) / 4, 0.25));
  EXPECT_TRUE(IsClipped(spec_, out_));
}

}  // namespace
}  // namespace optstate::session
