#include "server/os/cpu_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace optstate::os {
namespace {

using ::testing::HasSubstr;

// A fixture with files as in cgroup v2. The kernel creates a child group's
// files by itself, so here they exist beforehand.
class CpuGroupTest : public testing::Test {
 protected:
  ~CpuGroupTest() override { std::filesystem::remove_all(root_); }
  void Make(const std::string& own, const std::string& controllers) {
    Write("/proc/self/cgroup", "5:memory:/other\n0::" + own + "\n");
    group_ = own == "/" ? "" : own;
    Write(InGroup("cgroup.controllers"), controllers + "\n");
    for (const char* file : {"cgroup.type", "cgroup.subtree_control"}) {
      Write(InGroup(file), "");
    }
    for (const char* child :
         {"optstate.probe", "optstate.user-7", "optstate.user-7/optstate-a",
          "optstate.user-7/optstate-b"}) {
      for (const char* file : {"cgroup.type", "cpu.weight", "cgroup.procs",
                               "cgroup.subtree_control"}) {
        Write(InGroup(absl::StrCat(child, "/", file)), "");
      }
    }
  }
  // Returns why the group cannot be used.
  std::string Problem() const {
    return std::string(CpuGroup::Find(root_).status().message());
  }
  std::string InGroup(const std::string& file) const {
    return absl::StrCat("/sys/fs/cgroup", group_, "/", file);
  }
  std::string Read(const std::string& file) const {
    std::ifstream stream(root_ + InGroup(file));
    std::string text;
    std::getline(stream, text);
    return text;
  }
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  const std::string root_ =
      testing::TempDir() + "/cgroup." + std::to_string(::getpid());
  std::string group_;
};

TEST_F(CpuGroupTest, ThreadedGroupsWithWeightsInADelegatedGroup) {
  Make("/a/optstated.service", "cpuset cpu io memory");
  const std::string path = root_ + "/sys/fs/cgroup" + group_;
  EXPECT_THAT(Problem(), HasSubstr("not delegated"));
  if (::setxattr(path.c_str(), "user.delegate", "1", 1, 0) != 0) {
    GTEST_SKIP() << "no extended attributes in " << path;
  }
  const absl::StatusOr<CpuGroup> group = CpuGroup::Find(root_);
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_EQ(group->path(), path);
  EXPECT_EQ(Read("cgroup.subtree_control"), "+cpu");
  EXPECT_EQ(Read("optstate.probe/cgroup.type"), "threaded");
  const absl::Status put =
      group->Put({"optstate.user-7", 300}, {"optstate-a", 200}, 77);
  ASSERT_TRUE(put.ok()) << put;
  EXPECT_EQ(Read("optstate.user-7/cgroup.type"), "threaded");
  EXPECT_EQ(Read("optstate.user-7/cpu.weight"), "300");
  EXPECT_EQ(Read("optstate.user-7/cgroup.subtree_control"), "+cpu");
  EXPECT_EQ(Read("optstate.user-7/cgroup.procs"), "");
  EXPECT_EQ(Read("optstate.user-7/optstate-a/cgroup.type"), "threaded");
  EXPECT_EQ(Read("optstate.user-7/optstate-a/cpu.weight"), "200");
  EXPECT_EQ(Read("optstate.user-7/optstate-a/cgroup.procs"), "77");
}

TEST_F(CpuGroupTest, TheTopOfOurOwnNamespaceIsOurs) {
  Make("/", "cpu");
  EXPECT_TRUE(CpuGroup::Find(root_).ok());
  // The machine's top group has no type.
  std::filesystem::remove(root_ + InGroup("cgroup.type"));
  EXPECT_THAT(Problem(), HasSubstr("the group / is not delegated"));
}

TEST_F(CpuGroupTest, WhatTheKernelRefusesIsSaid) {
  Make("/", "cpuset io");
  EXPECT_THAT(Problem(), HasSubstr("the group / has no cpu controller"));
  Make("/", "cpu");
  std::filesystem::remove(root_ + InGroup("optstate.probe/cpu.weight"));
  EXPECT_THAT(Problem(), HasSubstr("cpu.weight"));
  std::filesystem::remove(root_ + "/proc/self/cgroup");
  EXPECT_THAT(Problem(), HasSubstr("there is no cgroup v2"));
}

TEST_F(CpuGroupTest, WhatAGroupBelowRefusesIsSaid) {
  Make("/", "cpu");
  const absl::StatusOr<CpuGroup> own = CpuGroup::Find(root_);
  ASSERT_TRUE(own.ok()) << own.status();
  std::filesystem::remove(root_ +
                          InGroup("optstate.user-7/cgroup.subtree_control"));
  const absl::Status put =
      own->Put({"optstate.user-7", 100}, {"optstate-a", 100}, 77);
  EXPECT_THAT(std::string(put.message()), HasSubstr("cgroup.subtree_control"));
  EXPECT_EQ(Read("optstate.user-7/optstate-a/cgroup.procs"), "");
}

TEST_F(CpuGroupTest, AGroupIsRemoved) {
  Make("/", "cpu");
  const absl::StatusOr<CpuGroup> own = CpuGroup::Find(root_);
  ASSERT_TRUE(own.ok()) << own.status();
  const std::string group = root_ + InGroup("optstate-gone");
  ASSERT_EQ(::mkdir(group.c_str(), 0755), 0);
  own->Remove("optstate-gone");
  EXPECT_FALSE(std::filesystem::exists(group));
  own->Remove("optstate-gone");
}

}  // namespace
}  // namespace optstate::os
