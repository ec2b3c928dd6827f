#include "server/scheduler/run_table.h"

#include <vector>

#include "gtest/gtest.h"
#include "proto/types/random_layout.h"

namespace optstate {
namespace {

uint64_t NumelOf(const Layout& layout, uint32_t parameter) {
  return static_cast<uint64_t>(layout.parameters()[parameter].numel);
}

class RunTableTest : public ::testing::Test {
 protected:
  RandomLayouts layouts_;
};

TEST_F(RunTableTest, RunsCoverEachParameterAndStayWithinTiles) {
  for (int round = 0; round < 100; ++round) {
    const Layout layout = *Layout::Make(layouts_.Next(40));
    const RunTable runs(&layout, 0);
    uint64_t next_run = 0;
    for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
      EXPECT_EQ(runs.first_run(p), next_run);
      uint64_t next_element = 0;
      runs.ForEachRun(p, 0, NumelOf(layout, p),
                      [&](uint64_t run, uint64_t begin, uint64_t numel) {
                        EXPECT_EQ(run, next_run++);
                        EXPECT_EQ(begin, next_element);
                        EXPECT_GT(numel, 0u);
                        const uint64_t flat = layout.flat_offset(p) + begin;
                        EXPECT_EQ(flat / kTileElements,
                                  (flat + numel - 1) / kTileElements);
                        next_element += numel;
                      });
      EXPECT_EQ(next_element, NumelOf(layout, p));
    }
    EXPECT_EQ(runs.run_count(), next_run);
    EXPECT_EQ(layout.run_count(), next_run);
  }
}

TEST_F(RunTableTest, SubGroupsCoverTheFlatSpaceAndNameTheirParameters) {
  for (int round = 0; round < 100; ++round) {
    const Layout layout = *Layout::Make(layouts_.Next(40));
    const uint64_t elements = layouts_.Uniform(1, 5 * kTileElements);
    const RunTable runs(&layout, elements);
    uint64_t next = 0;
    for (const RunTable::SubGroup& subgroup : runs.subgroups()) {
      EXPECT_EQ(subgroup.begin, next);
      EXPECT_GT(subgroup.end, subgroup.begin);
      EXPECT_EQ(subgroup.begin % kTileElements, 0u);
      EXPECT_LT(subgroup.end - subgroup.begin, elements + kTileElements);
      EXPECT_LE(subgroup.end, layout.group_end(subgroup.group));
      next = subgroup.end;
    }
    EXPECT_EQ(next, layout.flat_elements());
    for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
      const uint64_t flat = layout.flat_offset(p);
      for (uint64_t i = 0; i < NumelOf(layout, p); i += 100) {
        const uint32_t s =
            runs.SubGroupOf(layout.parameters()[p].group, flat + i);
        const RunTable::SubGroup& subgroup = runs.subgroups()[s];
        EXPECT_LE(subgroup.begin, flat + i);
        EXPECT_GT(subgroup.end, flat + i);
        EXPECT_LE(subgroup.first_parameter, p);
        EXPECT_GT(subgroup.end_parameter, p);
      }
    }
  }
}

}  // namespace
}  // namespace optstate
