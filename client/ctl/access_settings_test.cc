#include "client/ctl/access_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"

namespace optstate::ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

absl::StatusOr<std::optional<AccessChange>> Parse(const std::string& words) {
  const std::vector<std::string> split = absl::StrSplit(words, ' ');
  return ParseAccessChange(split);
}

// Returns the text of what a job that has `now` gets by the words.
std::string Changed(const v1::JobAccess& now, const std::string& words) {
  const auto change = Parse(words);
  if (!change.ok()) return std::string(change.status().message());
  if (!change->has_value()) return "nothing";
  const auto access = ChangedAccess(now, **change);
  return access.ok() ? AccessText(*access)
                     : std::string(access.status().message());
}

TEST(AccessSettingsTest, OtherWordsAreNone) {
  EXPECT_EQ(Changed({}, "host_budget=8GiB durability=step"), "nothing");
  EXPECT_EQ(Changed({}, "grouped=8GiB"), "nothing");
}

TEST(AccessSettingsTest, WhatIsNamedChangesAndTheRestStays) {
  v1::JobAccess access;
  EXPECT_EQ(Changed(access, "group=research"), "not private; group research");
  EXPECT_EQ(Changed(access, "private=true readers=alice,@ops"),
            "private; readers alice, @ops");
  access.set_group("research");
  access.set_is_private(true);
  access.add_readers("alice");
  EXPECT_EQ(Changed(access, "group="), "private; readers alice");
  EXPECT_EQ(Changed(access, "readers="), "private; group research");
  EXPECT_EQ(Changed(access, "readers=bob"),
            "private; group research; readers bob");
  EXPECT_EQ(Changed(access, "private=false"), "not private; group research");
  EXPECT_EQ(Changed(access, "private=false group="), "not private");
}

TEST(AccessSettingsTest, WordsArePartedFromValues) {
  const auto change = Parse("group=a=b readers=@ops,");
  ASSERT_TRUE(change.ok()) << change.status();
  EXPECT_EQ((*change)->group, "a=b");
  EXPECT_FALSE((*change)->is_private.has_value());
  EXPECT_THAT(*(*change)->readers, ElementsAre("@ops"));
  EXPECT_THAT(*(*Parse("readers="))->readers, IsEmpty());
}

TEST(AccessSettingsTest, WhatIsWrongIsSaid) {
  for (const auto& [words, says] :
       {std::pair<std::string, std::string>{"private=yes", "true or false"},
        {"private=", "true or false"},
        {"group=a:b", "no name or number"},
        {"readers=alice", "set private too"},
        {"private=false readers=alice", "set private too"},
        {"private=true readers=a/b", "reader \"a/b\""},
        {"group=g host_budget=8GiB", "\"host_budget=8GiB\" is another"},
        {"nonsense group=g", "\"nonsense\" is another"}}) {
    EXPECT_THAT(Changed({}, words), HasSubstr(says)) << words;
  }
}

}  // namespace
}  // namespace optstate::ctl
