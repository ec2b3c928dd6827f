#include "proto/types/runs.h"

#include "gtest/gtest.h"
#include "proto/types/random_layout.h"

namespace optstate {
namespace {

TEST(RunsTest, CoverEachParameterAndStayWithinTiles) {
  RandomLayouts layouts;
  for (int round = 0; round < 100; ++round) {
    const Layout layout = *Layout::Make(layouts.Next(40));
    uint64_t next_run = 0;
    for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
      EXPECT_EQ(layout.first_run(p), next_run);
      const auto numel = static_cast<uint64_t>(layout.parameters()[p].numel);
      uint64_t next_element = 0;
      ForEachRun(layout, p, 0, numel,
                 [&](uint64_t run, uint64_t begin, uint64_t elements) {
                   EXPECT_EQ(run, next_run++);
                   EXPECT_EQ(begin, next_element);
                   EXPECT_GT(elements, 0u);
                   const uint64_t flat = layout.flat_offset(p) + begin;
                   EXPECT_EQ(flat / kTileElements,
                             (flat + elements - 1) / kTileElements);
                   next_element += elements;
                 });
      EXPECT_EQ(next_element, numel);
    }
    EXPECT_EQ(layout.run_count(), next_run);
  }
}

}  // namespace
}  // namespace optstate
