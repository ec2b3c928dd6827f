#include "tests/fuzz/mutator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace optstate::fuzz {
namespace {

const std::vector<std::string> kInputs = {"the first input", "",
                                          std::string(300, 'x')};

std::vector<std::string> Draw(uint64_t seed, int count) {
  Mutator mutator(seed);
  std::vector<std::string> inputs;
  for (int i = 0; i < count; ++i) inputs.push_back(mutator.Mutate(kInputs));
  return inputs;
}

TEST(MutatorTest, FollowsItsSeed) {
  EXPECT_EQ(Draw(1, 100), Draw(1, 100));
  EXPECT_NE(Draw(1, 100), Draw(2, 100));
}

TEST(MutatorTest, ChangesWhatItIsGiven) {
  const std::vector<std::string> drawn = Draw(3, 1000);
  const std::set<std::string> different(drawn.begin(), drawn.end());
  EXPECT_GT(different.size(), 500u);
}

TEST(MutatorTest, IsBounded) {
  const std::vector<std::string> large = {
      std::string(2 * Mutator::kBytesMax, 'y')};
  Mutator mutator(4);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_LE(mutator.Mutate(large).size(), Mutator::kBytesMax);
  }
}

}  // namespace
}  // namespace optstate::fuzz
