#include "storage/record_split.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "storage/io/test_seed.h"

namespace optstate::storage {
namespace {

using Weights = std::vector<uint32_t>;

TEST(RecordSplitTest, EqualPartsAreTaken) {
  for (const size_t directories : {1, 2, 3, 7}) {
    for (const Weights& weights : {Weights(), Weights(directories, 5)}) {
      const std::vector<uint32_t> split =
          SplitRecords(100, directories, weights);
      for (uint32_t record = 0; record < 100; ++record) {
        EXPECT_EQ(split[record], record % directories);
      }
    }
  }
}

// The split is part of the format.
TEST(RecordSplitTest, ASplitNeverChanges) {
  EXPECT_EQ(SplitRecords(8, 2, Weights{3, 1}),
            (Weights{0, 0, 1, 0, 0, 0, 1, 0}));
  EXPECT_EQ(SplitRecords(7, 3, Weights{5, 1, 1}),
            (Weights{0, 0, 1, 0, 2, 0, 0}));
}

// Each directory has its share of any number of records, give or take one or
// two.
TEST(RecordSplitTest, EachDirectoryHasItsShareAtAnyTime) {
  std::mt19937_64 random(io::TestSeed());
  for (int round = 0; round < 200; ++round) {
    Weights weights(1 + random() % 6);
    uint64_t sum = 0;
    for (uint32_t& weight : weights) {
      sum += weight = static_cast<uint32_t>(1 + random() % 50);
    }
    const std::vector<uint32_t> split =
        SplitRecords(500, weights.size(), weights);
    std::vector<uint64_t> counts(weights.size());
    for (uint64_t i = 0; i < split.size(); ++i) {
      ++counts[split[i]];
      for (size_t d = 0; d < weights.size(); ++d) {
        const double share = static_cast<double>((i + 1) * weights[d]) /
                             static_cast<double>(sum);
        EXPECT_LT(std::abs(static_cast<double>(counts[d]) - share), 2.5);
      }
    }
    EXPECT_EQ(SplitRecords(500, weights.size(), SmallestWeights(weights)),
              split);
  }
}

TEST(RecordSplitTest, SmallestWeightsAreTheSame) {
  EXPECT_EQ(SmallestWeights(Weights{6, 3, 9}), (Weights{2, 1, 3}));
  EXPECT_EQ(SmallestWeights(Weights{4, 4}), Weights());
  EXPECT_EQ(SmallestWeights(Weights{7}), Weights());
  EXPECT_EQ(SmallestWeights({}), Weights());
  EXPECT_EQ(WeightsText(Weights{2, 1}), "2:1");
  EXPECT_EQ(WeightsText({}), "equal parts");
}

TEST(RecordSplitTest, WeightsFollowRatesThatDiffer) {
  EXPECT_EQ(WeightsByRate({}), Weights());
  EXPECT_EQ(WeightsByRate({5}), Weights());
  EXPECT_EQ(WeightsByRate({3e9, 1e9}), (Weights{3, 1}));
  EXPECT_EQ(WeightsByRate({1e9, 2.46e9}), (Weights{2, 5}));
  // Alike within a tenth.
  EXPECT_EQ(WeightsByRate({1.09e9, 1e9}), Weights());
  EXPECT_EQ(WeightsByRate({1.2e9, 1e9}), (Weights{6, 5}));
  EXPECT_EQ(WeightsByRate({2.1e9, 1e9, 1.92e9}), (Weights{2, 1, 2}));
  // One is not known.
  EXPECT_EQ(WeightsByRate({1e9, 0}), Weights());
  EXPECT_EQ(WeightsByRate({std::nan(""), 1e9}), Weights());
  EXPECT_EQ(WeightsByRate({1, 1e30}), (Weights{1, kDirectoryWeightMax / 10}));
}

TEST(RecordSplitTest, ADirectoryWithoutWeightGetsNone) {
  EXPECT_TRUE(CheckWeights(Weights{0, 2, 1}, 3).ok());
  EXPECT_EQ(SmallestWeights(Weights{0, 4, 2}), (Weights{0, 2, 1}));
  EXPECT_EQ(SplitRecords(6, 3, Weights{0, 2, 1}), (Weights{1, 2, 1, 1, 2, 1}));
  EXPECT_EQ(SplitRecords(3, 2, Weights{1, 0}), (Weights{0, 0, 0}));
}

TEST(RecordSplitTest, WeightsThatDoNotFitAreRefused) {
  EXPECT_TRUE(CheckWeights({}, 3).ok());
  EXPECT_TRUE(CheckWeights(Weights{1, kDirectoryWeightMax}, 2).ok());
  for (const Weights& weights : {Weights{1}, Weights{1, 1, 1}, Weights{0, 0},
                                 Weights{1, kDirectoryWeightMax + 1}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckWeights(weights, 2)));
  }
}

}  // namespace
}  // namespace optstate::storage
