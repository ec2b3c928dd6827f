#include "proto/types/access_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace optstate {
namespace {

using ::testing::HasSubstr;

TEST(AccessNamesTest, UsersGroupsAndNumbers) {
  EXPECT_TRUE(CheckAccessNames("", false, {}).ok());
  EXPECT_TRUE(CheckAccessNames("research", false, {}).ok());
  EXPECT_TRUE(CheckAccessNames("2000", true, {"alice", "@ops", "1000"}).ok());
  EXPECT_TRUE(CheckAccessNames("", true, {"a@corp", "@domain users"}).ok());
  EXPECT_TRUE(CheckAccessNames("CORP\\users", true, {}).ok());
  EXPECT_EQ(ReaderGroup("@ops"), "ops");
  EXPECT_EQ(ReaderGroup("alice"), "");
}

TEST(AccessNamesTest, WhatNoOneCanBeCalled) {
  for (const std::string name :
       {"a,b", "a:b", "a/b", " a", "a ", "a\nb", "@a"}) {
    const absl::Status group = CheckAccessNames(name, true, {});
    EXPECT_TRUE(absl::IsInvalidArgument(group)) << name;
    EXPECT_THAT(std::string(group.message()), HasSubstr("group \""));
    EXPECT_FALSE(CheckAccessNames("", true, {"@" + name}).ok()) << name;
  }
  for (const std::string reader : {"", "@", "@@a", "a\tb"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckAccessNames("", true, {reader})))
        << reader;
  }
  const std::string longest(kAccessNameBytesMax, 'x');
  EXPECT_TRUE(CheckAccessNames(longest, true, {longest, "@" + longest}).ok());
  EXPECT_FALSE(CheckAccessNames(longest + "x", true, {}).ok());
}

TEST(AccessNamesTest, ReadersAreOfAPrivateJob) {
  const absl::Status status = CheckAccessNames("", false, {"alice"});
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("private"));
  const std::vector<std::string> many(kReadersMax + 1, "alice");
  EXPECT_THAT(std::string(CheckAccessNames("", true, many).message()),
              HasSubstr("33 readers; at most 32"));
}

}  // namespace
}  // namespace optstate
