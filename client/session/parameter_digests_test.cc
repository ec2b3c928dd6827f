#include "client/session/parameter_digests.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/area_parts.h"

namespace optstate::client {
namespace {

Layout OneParameter(int64_t numel, DType dtype) {
  return *Layout::Make({.optimizer = OptimizerKind::kAdamW,
                        .groups = {{.options = 0}},
                        .parameters = {{.name = "p",
                                        .shape = {numel},
                                        .numel = numel,
                                        .dtype = dtype,
                                        .gradient_dtype = dtype,
                                        .group = 0}}});
}

std::vector<std::byte> Bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>(i * 31 + i / 4096);
  }
  return bytes;
}

TEST(ParameterDigestsTest, WhatWasNeverCopiedIsNotKnown) {
  const Layout layout = OneParameter(100, DType::kFloat32);
  const ParameterDigests digests(&layout, ChangeDetection::kExact);
  EXPECT_FALSE(digests.Differs(0, Bytes(400).data()));
}

TEST(ParameterDigestsTest, AChangedBitIsFound) {
  constexpr int64_t kNumel = kPartElements + 3 * kTileElements + 5;
  const Layout layout = OneParameter(kNumel, DType::kBFloat16);
  ParameterDigests digests(&layout, ChangeDetection::kExact);
  std::vector<std::byte> bytes = Bytes(2 * kNumel);
  digests.BeginCopies(1);
  digests.AddWhole(0, bytes.data());
  EXPECT_FALSE(digests.Differs(0, bytes.data()));
  for (size_t at : {size_t{0}, 2 * kTileElements, bytes.size() - 1}) {
    bytes[at] ^= std::byte{128};
    EXPECT_TRUE(digests.Differs(0, bytes.data())) << at;
    bytes[at] ^= std::byte{128};
  }
}

TEST(ParameterDigestsTest, ExchangedElementsAreFound) {
  constexpr int64_t kNumel = 4 * kTileElements;
  const Layout layout = OneParameter(kNumel, DType::kFloat32);
  ParameterDigests digests(&layout, ChangeDetection::kExact);
  std::vector<std::byte> bytes = Bytes(4 * kNumel);
  digests.BeginCopies(1);
  digests.AddWhole(0, bytes.data());
  // Two whole blocks are exchanged: unseeded sums would be equal.
  std::swap_ranges(bytes.begin(), bytes.begin() + 4 * kTileElements,
                   bytes.begin() + 4 * kTileElements);
  EXPECT_TRUE(digests.Differs(0, bytes.data()));
}

TEST(ParameterDigestsTest, BlocksMayComeInAnyOrder) {
  constexpr uint64_t kNumel = 3 * kTileElements + 1;
  const Layout layout = OneParameter(kNumel, DType::kFloat32);
  ParameterDigests digests(&layout, ChangeDetection::kExact);
  const std::vector<std::byte> bytes = Bytes(4 * kNumel);
  digests.BeginCopies(1);
  for (uint64_t begin : {2, 0, 3, 1}) {
    const uint64_t first = begin * kTileElements;
    digests.AddBlock(0, first, bytes.data() + 4 * first);
  }
  EXPECT_FALSE(digests.Differs(0, bytes.data()));
  EXPECT_TRUE(digests.Differs(0, Bytes(4 * kNumel + 1).data() + 1));
}

TEST(ParameterDigestsTest, ACopyThatWasInterruptedIsNotKnown) {
  constexpr uint64_t kNumel = 2 * kTileElements;
  const Layout layout = OneParameter(kNumel, DType::kFloat32);
  ParameterDigests digests(&layout, ChangeDetection::kExact);
  std::vector<std::byte> bytes = Bytes(4 * kNumel);
  digests.BeginCopies(1);
  digests.AddWhole(0, bytes.data());
  digests.BeginCopies(1);
  EXPECT_FALSE(digests.Differs(0, bytes.data())) << "nothing was copied yet";
  bytes[0] ^= std::byte{1};
  EXPECT_TRUE(digests.Differs(0, bytes.data()));
  digests.AddBlock(0, 0, bytes.data());
  EXPECT_FALSE(digests.Differs(0, bytes.data())) << "half of it is new";
}

TEST(ParameterDigestsTest, ASampleFindsWhatIsWholeAndInTheEndAllThatStays) {
  constexpr int64_t kNumel = 2 * kTileElements;
  const Layout layout = OneParameter(kNumel, DType::kFloat32);
  ParameterDigests digests(&layout, ChangeDetection::kSample);
  const std::vector<std::byte> before = Bytes(4 * kNumel);
  std::vector<std::byte> after = before;
  after[4 * kTileElements + 1000] ^= std::byte{1};
  const std::vector<std::byte> other(before.size());
  int found = 0;
  for (uint64_t step = 0; step < 64; ++step) {
    digests.BeginCopies(step);
    digests.AddWhole(0, before.data());
    EXPECT_FALSE(digests.Differs(0, before.data()));
    EXPECT_TRUE(digests.Differs(0, other.data()));
    found += digests.Differs(0, after.data());
  }
  EXPECT_EQ(found, 1);
}

TEST(ParameterDigestsTest, ASampleHasAllOfWhatIsSmall) {
  const Layout layout = OneParameter(10, DType::kFloat32);
  ParameterDigests digests(&layout, ChangeDetection::kSample);
  std::vector<std::byte> bytes = Bytes(40);
  digests.BeginCopies(1);
  digests.AddWhole(0, bytes.data());
  bytes[39] ^= std::byte{1};
  EXPECT_TRUE(digests.Differs(0, bytes.data()));
}

}  // namespace
}  // namespace optstate::client
