#include "proto/types/path_owners.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate {
namespace {

using ::testing::HasSubstr;

constexpr uid_t kStranger = 4711;

class PathOwnersTest : public testing::Test {
 protected:
  PathOwnersTest() {
    std::string name = "/tmp/owners-XXXXXX";
    root_ = ::mkdtemp(name.data());
  }
  ~PathOwnersTest() override { std::filesystem::remove_all(root_); }

  // Makes a directory below root_ with this mode, owned by the stranger or by
  // us.
  std::string Make(const std::string& name, mode_t mode,
                   bool is_strangers = false) const {
    const std::string path = root_ + "/" + name;
    EXPECT_EQ(::mkdir(path.c_str(), 0700), 0);
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    if (is_strangers) {
      EXPECT_EQ(::chown(path.c_str(), kStranger, kStranger), 0);
    }
    return path;
  }

  static void ExpectRefused(const std::string& path, PathOwners owners,
                            const std::string& why) {
    const absl::Status status = CheckPathOwners(path, owners);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << path << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
  static void ExpectRefused(const std::string& path, const std::string& why) {
    ExpectRefused(path, PathOwners::kOurs, why);
    ExpectRefused(path, PathOwners::kTrusted, why);
  }
  static void ExpectFine(const std::string& path) {
    for (const PathOwners owners : {PathOwners::kOurs, PathOwners::kTrusted}) {
      const absl::Status status = CheckPathOwners(path, owners);
      EXPECT_TRUE(status.ok()) << path << ": " << status;
    }
  }

  std::string root_;
};

TEST_F(PathOwnersTest, OursIsFine) {
  ExpectFine("/");
  ExpectFine("/tmp");
  ExpectFine(root_);
  ExpectFine(Make("a", 0755));
  ExpectFine(root_ + "/a/not/there/yet.sock");
  ExpectFine(root_ + "/a/");
}

TEST_F(PathOwnersTest, StickyDirectoriesAreFine) {
  ExpectFine(Make("shared", 01777));
  ExpectFine(Make("shared/ours", 0700));
}

TEST_F(PathOwnersTest, WhatAnybodyMayReplaceIsRefused) {
  Make("open", 0777);
  ExpectRefused(Make("open/ours", 0700), "/open is writable by other users");
  ExpectRefused(root_ + "/open/not-there", "mode 0777");
}

class StrangersTest : public PathOwnersTest {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root to give files away";
  }
};

TEST_F(StrangersTest, ADirectoryThatTheyMadeInAStickyOneIsRefused) {
  Make("tmp", 01777);
  const std::string theirs = Make("tmp/optstate-0", 0777, true);
  ExpectRefused(theirs, "/optstate-0 belongs to uid 4711");
  ExpectRefused(theirs + "/optstated.sock", "belongs to uid 4711");
  ::mkdir((theirs + "/ours").c_str(), 0700);
  ExpectRefused(theirs + "/ours/optstated.sock", "belongs to uid 4711");
}

TEST_F(StrangersTest, ASocketOrALinkOfTheirsInAStickyOneIsRefused) {
  const std::string tmp = Make("tmp", 01777);
  const std::string file = tmp + "/optstated.sock";
  std::ofstream(file) << "x";
  ExpectFine(file);
  ASSERT_EQ(::chown(file.c_str(), kStranger, kStranger), 0);
  ExpectRefused(file, "belongs to uid 4711");
  const std::string ours = Make("ours", 0700);
  const std::string link = tmp + "/link";
  ASSERT_EQ(::symlink(ours.c_str(), link.c_str()), 0);
  ExpectFine(link + "/optstated.sock");
  ASSERT_EQ(::lchown(link.c_str(), kStranger, kStranger), 0);
  ExpectRefused(link + "/optstated.sock", "belongs to uid 4711");
}

TEST_F(StrangersTest, ALinkOfOursLeadsWhereItLeads) {
  const std::string open = Make("open", 0777);
  const std::string link = root_ + "/link";
  ASSERT_EQ(::symlink(open.c_str(), link.c_str()), 0);
  ExpectRefused(link + "/x", "/open is writable by other users");
}

// Root makes /run/optstate in this way for a daemon with a user of its own.
TEST_F(StrangersTest, WhoWasGivenADirectoryIsTrustedByClientsAlone) {
  const std::string given = Make("given", 0755, true);
  EXPECT_TRUE(CheckPathOwners(given + "/s", PathOwners::kTrusted).ok());
  ExpectRefused(given + "/s", PathOwners::kOurs, "belongs to uid 4711");
}

TEST_F(StrangersTest, AGroupThatIsNotOursCountsAsOthersToTheDaemon) {
  const std::string path = Make("group", 0770);
  ExpectFine(path);
  ASSERT_EQ(::chown(path.c_str(), 0, kStranger), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0770), 0);
  ExpectRefused(path, PathOwners::kOurs, "mode 0770");
  EXPECT_TRUE(CheckPathOwners(path, PathOwners::kTrusted).ok());
}

}  // namespace
}  // namespace optstate
