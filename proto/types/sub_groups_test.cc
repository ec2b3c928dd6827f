#include "proto/types/sub_groups.h"

#include <vector>

#include "gtest/gtest.h"
#include "proto/types/random_layout.h"

namespace optstate {
namespace {

uint64_t NumelOf(const Layout& layout, uint32_t parameter) {
  return static_cast<uint64_t>(layout.parameters()[parameter].numel);
}

// Checks that every element of every parameter is in the sub-group that IndexOf
// returns, and that sub-groups cover the flat space.
void Check(const Layout& layout, const SubGroupTable& sub_groups) {
  uint64_t next = 0;
  for (const SubGroup& sub_group : sub_groups.all()) {
    EXPECT_EQ(sub_group.begin, next);
    EXPECT_LE(sub_group.end, layout.group_end(sub_group.group));
    next = sub_group.end;
  }
  EXPECT_EQ(next, layout.flat_elements());
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    const uint64_t flat = layout.flat_offset(p);
    for (uint64_t i = 0; i < NumelOf(layout, p); i += 100) {
      const SubGroup& sub_group = sub_groups[sub_groups.IndexOf(p, i)];
      EXPECT_LE(sub_group.begin, flat + i);
      EXPECT_GT(sub_group.end, flat + i);
      EXPECT_LE(sub_group.first_parameter, p);
      EXPECT_GT(sub_group.end_parameter, p);
    }
  }
}

TEST(SubGroupTableTest, CutsAtTiles) {
  RandomLayouts layouts;
  for (int round = 0; round < 100; ++round) {
    const Layout layout = *Layout::Make(layouts.Next(40));
    const uint64_t elements = layouts.Uniform(1, 5 * kTileElements);
    const SubGroupTable sub_groups(&layout, elements,
                                   SubGroupTable::Cut::kTiles);
    Check(layout, sub_groups);
    for (const SubGroup& sub_group : sub_groups.all()) {
      EXPECT_EQ(sub_group.begin % kTileElements, 0u);
      EXPECT_GT(sub_group.end, sub_group.begin);
      EXPECT_LT(sub_group.elements(), elements + kTileElements);
    }
  }
}

TEST(SubGroupTableTest, CutsAtParameters) {
  RandomLayouts layouts;
  for (int round = 0; round < 100; ++round) {
    const Layout layout = *Layout::Make(layouts.Next(40));
    const uint64_t elements = layouts.Uniform(1, 5 * kTileElements);
    const SubGroupTable sub_groups(&layout, elements,
                                   SubGroupTable::Cut::kParameters);
    Check(layout, sub_groups);
    for (const SubGroup& sub_group : sub_groups.all()) {
      EXPECT_EQ(sub_group.begin, layout.flat_offset(sub_group.first_parameter));
      EXPECT_TRUE(sub_group.end_parameter == sub_group.first_parameter + 1 ||
                  sub_group.elements() < elements + 2 * kTileElements);
    }
    for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
      if (NumelOf(layout, p) == 0) continue;
      EXPECT_EQ(sub_groups.IndexOf(p, 0),
                sub_groups.IndexOf(p, NumelOf(layout, p) - 1));
    }
  }
}

}  // namespace
}  // namespace optstate
