#include "proto/types/area_parts.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/random_layout.h"

namespace optstate {
namespace {

constexpr uint64_t kBytesMax = 1 << 20;

Layout LayoutOf(const std::vector<std::pair<int64_t, DType>>& sizes) {
  LayoutSpec spec;
  spec.groups.resize(1);
  for (const auto& [numel, dtype] : sizes) {
    spec.parameters.push_back({.name = std::to_string(spec.parameters.size()),
                               .shape = {numel},
                               .numel = numel,
                               .dtype = dtype,
                               .gradient_dtype = dtype,
                               .group = 0});
  }
  return *Layout::Make(std::move(spec));
}

// Checks that every byte of every parameter is in one part, with just the runs
// that write it.
void ExpectWhole(const Layout& layout, uint64_t bytes_max) {
  const std::vector<AreaPart> parts = AreaParts(layout, bytes_max);
  size_t at = 0;
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    const ParameterSpec& spec = layout.parameters()[p];
    for (int64_t i = 0; i < spec.numel; ++i) {
      const uint64_t byte = layout.parameter_offset_bytes(p) +
                            static_cast<uint64_t>(i) * SizeInBytes(spec.dtype);
      while (at < parts.size() && parts[at].end <= byte) ++at;
      ASSERT_LT(at, parts.size()) << "parameter " << p << ", element " << i;
      ASSERT_LE(parts[at].begin, byte);
      const uint64_t run = layout.run_of(p, static_cast<uint64_t>(i));
      ASSERT_LE(parts[at].first_run, run);
      ASSERT_LT(run, parts[at].end_run);
    }
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_LT(parts[i].begin, parts[i].end);
    EXPECT_LE(parts[i].end - parts[i].begin, bytes_max);
    EXPECT_LE(parts[i].end, layout.parameter_area_bytes());
    if (i == 0) continue;
    EXPECT_LE(parts[i - 1].end, parts[i].begin);
    // A tile that two parts share is two runs, or one run that both parts wait
    // for.
    EXPECT_LE(parts[i - 1].end_run, parts[i].first_run + 1);
  }
}

TEST(AreaPartsTest, AllOfRandomLayouts) {
  RandomLayouts layouts;
  for (int i = 0; i < 50; ++i) {
    const Layout layout = *Layout::Make(layouts.Next(40));
    ExpectWhole(layout, kBytesMax);
  }
}

TEST(AreaPartsTest, LargeParametersAreCutWhereWorkersAre) {
  const Layout layout = LayoutOf({{100, DType::kFloat32},
                                  {700'001, DType::kFloat32},
                                  {5, DType::kBFloat16},
                                  {600'000, DType::kBFloat16}});
  ExpectWhole(layout, kBytesMax);
  const std::vector<AreaPart> parts = AreaParts(layout, kBytesMax);
  ASSERT_GE(parts.size(), 3u);
  // The first cut lies kPartElements from the group's beginning.
  const uint64_t cut = kPartElements - layout.flat_offset(1);
  EXPECT_EQ(parts[1].end, layout.parameter_offset_bytes(1) + cut * 4);
}

TEST(AreaPartsTest, SmallParametersGoTogetherUpToTheLimit) {
  const Layout layout = LayoutOf(
      std::vector<std::pair<int64_t, DType>>(1000, {1, DType::kFloat32}));
  ExpectWhole(layout, kBytesMax);
  EXPECT_EQ(AreaParts(layout, kBytesMax).size(), 1u);
  // Each parameter takes 64 bytes.
  EXPECT_EQ(AreaParts(layout, 64 * 100).size(), 10u);
}

TEST(AreaPartsTest, NothingOfNothing) {
  EXPECT_TRUE(AreaParts(LayoutOf({{0, DType::kFloat32}}), kBytesMax).empty());
}

}  // namespace
}  // namespace optstate
