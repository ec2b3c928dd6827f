// Tests that the digest of a block of threads is that of the host, and that it
// finds what a copy of gradients can be wrong by.

#include "kernels/cuda/digest.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/digest.h"
#include "kernels/cpu/targets.h"
#include "kernels/cuda/serial_block.h"
#include "kernels/cuda/serial_launch.h"
#include "kernels/test_seed.h"

namespace optstate::kernels::cuda {
namespace {

using Order = SerialBlock::Order;
using cpu::DigestOf;

// The words are aligned; `bytes` of them count.
std::vector<uint32_t> RandomWords(uint64_t bytes, std::mt19937_64* random) {
  std::vector<uint32_t> words((bytes + 3) / 4);
  for (uint32_t& word : words) word = static_cast<uint32_t>((*random)());
  return words;
}

class DigestTest : public testing::Test {
 protected:
  std::mt19937_64 random_{TestSeed()};
};

TEST_F(DigestTest, ThreadsAndHostAgree) {
  for (const uint64_t bytes :
       std::vector<uint64_t>{0, 1, 2, 3, 4, 6, 1022, 1024, 1026, 16384}) {
    const std::vector<uint32_t> words = RandomWords(bytes, &random_);
    const uint64_t expected = DigestOf(words.data(), bytes);
    for (const cpu::Target target : cpu::SupportedTargets()) {
      EXPECT_EQ(cpu::DigestOn(target, words.data(), bytes), expected)
          << bytes << " bytes on " << cpu::TargetName(target);
    }
    for (const Order order : {Order::kUp, Order::kDown}) {
      EXPECT_EQ(DigestSerially(order, {words.data(), bytes}), expected)
          << bytes << " bytes";
    }
  }
}

TEST_F(DigestTest, TheHostReadsFromAnyAddress) {
  constexpr uint64_t kBytes = 4096;
  const std::vector<uint32_t> words = RandomWords(kBytes, &random_);
  const auto* const bytes = reinterpret_cast<const std::byte*>(words.data());
  for (uint64_t begin = 1; begin < 4; ++begin) {
    const std::vector<std::byte> moved(bytes + begin, bytes + kBytes);
    EXPECT_EQ(DigestOf(bytes + begin, kBytes - begin),
              DigestOf(moved.data(), moved.size()));
  }
}

TEST_F(DigestTest, FindsWhatDiffers) {
  constexpr uint64_t kBytes = 16384;
  std::vector<uint32_t> words = RandomWords(kBytes, &random_);
  const uint64_t before = DigestOf(words.data(), kBytes);
  const auto digest = [&] { return DigestOf(words.data(), kBytes); };
  // One bit, of any word.
  for (int i = 0; i < 100; ++i) {
    uint32_t& word = words[random_() % words.size()];
    const uint32_t bit = uint32_t{1} << random_() % 32;
    word ^= bit;
    EXPECT_NE(digest(), before);
    word ^= bit;
  }
  // The signs of two floats, which no sum of squares would show.
  words[5] ^= uint32_t{1} << 31;
  words[7] ^= uint32_t{1} << 31;
  EXPECT_NE(digest(), before);
  words[5] ^= uint32_t{1} << 31;
  words[7] ^= uint32_t{1} << 31;
  EXPECT_EQ(digest(), before);
  // The order.
  words[0] = 1;
  words[1] = 2;
  const uint64_t in_order = digest();
  words[0] = 2;
  words[1] = 1;
  EXPECT_NE(digest(), in_order);
  // Half of another one.
  const std::vector<uint32_t> other = RandomWords(kBytes / 2, &random_);
  std::copy(other.begin(), other.end(), words.begin());
  EXPECT_NE(digest(), before);
}

// All bits set: the sums are exact.
TEST_F(DigestTest, TheLargestTileOverflowsNothing) {
  constexpr uint64_t kWords = 4096;
  const std::vector<uint32_t> words(kWords, ~uint32_t{0});
  const uint64_t sum = kWords * ~uint32_t{0};
  const uint64_t weighted = kWords * (kWords + 1) / 2 * ~uint32_t{0};
  EXPECT_EQ(DigestOf(words.data(), 4 * kWords), DigestOfSums(sum, weighted));
}

}  // namespace
}  // namespace optstate::kernels::cuda
