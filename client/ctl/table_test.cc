#include "client/ctl/table.h"

#include <vector>

#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

Table Example() {
  Table table({{"NAME"}, {"STEP", /*right=*/true}, {"UID", true, true}});
  table.AddRow({"gpt", "7", "1000"});
  table.AddRow({std::string(300, 'x'), "123", "0"});
  return table;
}

TEST(TableTest, WideColumnsShowOnlyWhenAsked) {
  auto narrow = Example().Render(/*wide=*/false);
  auto wide = Example().Render(/*wide=*/true);
  ASSERT_TRUE(narrow.ok() && wide.ok());
  EXPECT_EQ(narrow->find("UID"), std::string::npos);
  EXPECT_NE(wide->find("UID"), std::string::npos);
  EXPECT_NE(wide->find("1000"), std::string::npos);
}

TEST(TableTest, LongCellsAreNeverCut) {
  auto text = Example().Render(false);
  ASSERT_TRUE(text.ok());
  EXPECT_NE(text->find(std::string(300, 'x')), std::string::npos);
}

TEST(TableTest, NumbersAlignRight) {
  auto text = Example().Render(false);
  ASSERT_TRUE(text.ok());
  const std::vector<std::string> lines = absl::StrSplit(*text, '\n');
  ASSERT_GE(lines.size(), 3u);
  EXPECT_EQ(lines[1].size(), lines[2].size()) << *text;
  EXPECT_EQ(lines[1].back(), '7');
}

TEST(TableTest, EveryLineEnds) {
  auto text = Example().Render(false);
  ASSERT_TRUE(text.ok());
  EXPECT_EQ(text->back(), '\n');
}

}  // namespace
}  // namespace optstate::ctl
