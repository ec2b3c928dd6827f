#include "client/collective/gradients/block_quantizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

constexpr size_t kBlock = 32;

struct Quantized {
  std::vector<float> scales;
  std::vector<int8_t> codes;
  std::vector<float> feedback;  // the next one
};

Quantized Quantize(const std::vector<double>& values,
                   const std::vector<float>& feedback) {
  Quantized result;
  result.scales.resize(CountBlocks(values.size(), kBlock));
  result.codes.resize(values.size());
  result.feedback.resize(values.size());
  QuantizeBlocks(values, kBlock, feedback, absl::MakeSpan(result.feedback),
                 absl::MakeSpan(result.scales), absl::MakeSpan(result.codes));
  return result;
}

std::vector<float> Sent(const Quantized& quantized) {
  std::vector<float> sums(quantized.codes.size());
  EXPECT_TRUE(
      AddBlocks(quantized.scales, quantized.codes, kBlock, absl::MakeSpan(sums))
          .ok());
  return sums;
}

// Values of many magnitudes, denormals among them.
std::vector<double> Draw(std::mt19937_64& draw, size_t count) {
  std::vector<double> values;
  std::uniform_real_distribution<double> unit(-1, 1);
  std::uniform_int_distribution<int> exponent(-140, 120);
  int block_exponent = 0;
  for (size_t i = 0; i < count; ++i) {
    if (i % kBlock == 0) block_exponent = exponent(draw);
    // Within a block they differ by up to 2^20.
    const int own = static_cast<int>(draw() % 20);
    values.push_back(static_cast<double>(
        static_cast<float>(std::ldexp(unit(draw), block_exponent - own))));
  }
  return values;
}

TEST(BlockQuantizer, TheFirstFeedbackIsExact) {
  std::mt19937_64 draw(ScriptSeed());
  for (int round = 0; round < 200; ++round) {
    const std::vector<double> values = Draw(draw, 5 * kBlock + 7);
    const Quantized quantized =
        Quantize(values, std::vector<float>(values.size()));
    const std::vector<float> sent = Sent(quantized);
    for (size_t i = 0; i < values.size(); ++i) {
      // The product has no rounding, and neither has the difference.
      const double product = static_cast<double>(quantized.codes[i]) *
                             static_cast<double>(quantized.scales[i / kBlock]);
      ASSERT_EQ(static_cast<double>(sent[i]), product);
      ASSERT_EQ(product + static_cast<double>(quantized.feedback[i]), values[i])
          << i;
    }
  }
}

TEST(BlockQuantizer, ErrorsAreWithinHalfAScale) {
  std::mt19937_64 draw(ScriptSeed());
  const std::vector<double> values = Draw(draw, 100 * kBlock);
  const Quantized quantized =
      Quantize(values, std::vector<float>(values.size()));
  for (size_t block = 0; block < quantized.scales.size(); ++block) {
    const double scale = static_cast<double>(quantized.scales[block]);
    double largest = 0;
    for (size_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
      largest = std::max(largest, std::abs(values[i]));
      EXPECT_LE(std::abs(static_cast<double>(quantized.feedback[i])),
                0.5000001 * scale);
    }
    // The scale is no larger than it has to be.
    EXPECT_LE(scale, largest / 127 * (1 + 0x1p-14) + 0x1p-140);
    EXPECT_GE(scale + 0x1p-149, largest / 127 * (1 - 0x1p-23));
  }
}

// Sums of multiples of 2^-10 are exact, so that nothing may be lost at all.
TEST(BlockQuantizer, WhatIsSentAndTheFeedbackAddUpToTheGradients) {
  std::mt19937_64 draw(ScriptSeed());
  constexpr size_t kCount = 3 * kBlock + 5;
  std::vector<double> gradients(kCount);
  std::vector<double> sent(kCount);
  std::vector<float> feedback(kCount);
  for (int step = 0; step < 500; ++step) {
    std::vector<double> values(kCount);
    for (double& each : values) {
      each = static_cast<double>(static_cast<int>(draw() % 2001) - 1000) / 1024;
    }
    const Quantized quantized = Quantize(values, feedback);
    const std::vector<float> now = Sent(quantized);
    for (size_t i = 0; i < kCount; ++i) {
      gradients[i] += values[i];
      sent[i] += static_cast<double>(now[i]);
      // The one rounding of a step, to float32.
      ASSERT_EQ(
          quantized.feedback[i],
          static_cast<float>(values[i] + static_cast<double>(feedback[i]) -
                             static_cast<double>(now[i])));
    }
    feedback = quantized.feedback;
  }
  for (size_t i = 0; i < kCount; ++i) {
    const double whole = sent[i] + static_cast<double>(feedback[i]);
    EXPECT_NEAR(whole, gradients[i], 500 * 0x1p-24 * 0x1p-7) << i;
  }
}

TEST(BlockQuantizer, DeterministicAndInPlace) {
  std::mt19937_64 draw(ScriptSeed());
  const std::vector<double> values = Draw(draw, 4 * kBlock + 1);
  std::vector<float> feedback(values.size(), 1e-3f);
  const Quantized first = Quantize(values, feedback);
  std::vector<float> scales(first.scales.size());
  std::vector<int8_t> codes(values.size());
  QuantizeBlocks(values, kBlock, feedback, absl::MakeSpan(feedback),
                 absl::MakeSpan(scales), absl::MakeSpan(codes));
  EXPECT_EQ(scales, first.scales);
  EXPECT_EQ(codes, first.codes);
  EXPECT_EQ(feedback, first.feedback);
}

TEST(BlockQuantizer, ZerosAndTinyAndLargeValues) {
  const double tiny = std::numeric_limits<float>::denorm_min();
  const auto large = static_cast<double>(3.39e38f);
  for (const double value : {0.0, -0.0, tiny, 100 * tiny, large}) {
    const std::vector<double> values(3, value);
    const Quantized quantized = Quantize(values, std::vector<float>(3));
    const std::vector<float> sent = Sent(quantized);
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(std::isfinite(sent[i]));
      EXPECT_EQ(static_cast<double>(sent[i]) +
                    static_cast<double>(quantized.feedback[i]),
                value);
    }
  }
}

TEST(BlockQuantizer, InfAndNanAreSentAndLeaveTheFeedback) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {infinity, -infinity, std::nan(""), 1e39}) {
    std::vector<double> values(2 * kBlock, 0.5);
    values[3] = bad;
    const std::vector<float> before(2 * kBlock, 0.25f);
    const Quantized quantized = Quantize(values, before);
    const std::vector<float> sent = Sent(quantized);
    for (size_t i = 0; i < kBlock; ++i) {
      EXPECT_TRUE(std::isnan(sent[i]));
      EXPECT_EQ(quantized.feedback[i], 0.25f);
    }
    EXPECT_FALSE(std::isnan(sent[kBlock]));  // another block
  }
}

TEST(BlockQuantizer, WhatNoQuantizerMakesIsRefused) {
  const std::vector<int8_t> codes(kBlock, 1);
  std::vector<float> sums(kBlock);
  const auto add = [&](float scale, const std::vector<int8_t>& of) {
    return AddBlocks(absl::MakeConstSpan(&scale, 1), of, kBlock,
                     absl::MakeSpan(sums));
  };
  EXPECT_TRUE(add(0.5f, codes).ok());
  EXPECT_TRUE(add(0, codes).ok());
  EXPECT_TRUE(absl::IsDataLoss(add(-0.5f, codes)));
  EXPECT_TRUE(absl::IsDataLoss(add(-0.0f, codes)));
  EXPECT_TRUE(
      absl::IsDataLoss(add(std::numeric_limits<float>::infinity(), codes)));
  EXPECT_TRUE(absl::IsDataLoss(add(std::nextafter(0.5f, 1.0f), codes)));
  EXPECT_TRUE(absl::IsDataLoss(add(0.5f, std::vector<int8_t>(kBlock, -128))));
}

}  // namespace
}  // namespace optstate::client
