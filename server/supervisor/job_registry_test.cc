#include "server/supervisor/job_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "server/os/private_directory.h"

namespace optstate::supervisor {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

class JobRegistryTest : public testing::Test {
 protected:
  JobRegistryTest() {
    std::string name = testing::TempDir() + "/registry-XXXXXX";
    root_ = std::string(::mkdtemp(name.data())) + "/jobs";
  }
  ~JobRegistryTest() override { EXPECT_TRUE(os::RemoveTree(root_).ok()); }

  JobRegistry Open() {
    auto registry = JobRegistry::Open(root_);
    EXPECT_TRUE(registry.ok()) << registry.status();
    return *std::move(registry);
  }

  std::string root_;
};

TEST_F(JobRegistryTest, RemembersJobsAndOwners) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("b", 0).ok());
    ASSERT_TRUE(registry.Create("a", 1000).ok());
    EXPECT_TRUE(absl::IsAlreadyExists(registry.Create("a", 1000)));
  }
  EXPECT_THAT(Open().jobs(), ElementsAre(Pair("a", 1000), Pair("b", 0)));
}

TEST_F(JobRegistryTest, DiscardFreesTheName) {
  JobRegistry registry = Open();
  ASSERT_TRUE(registry.Create("a", 1000).ok());
  std::ofstream(registry.JobDirectory("a") + "/state") << "x";
  const auto discarded = registry.Discard("a");
  ASSERT_TRUE(discarded.ok()) << discarded.status();
  ASSERT_EQ(discarded->size(), 1u);
  EXPECT_EQ(::access((discarded->front() + "/state").c_str(), F_OK), 0);
  EXPECT_THAT(registry.jobs(), IsEmpty());
  EXPECT_TRUE(registry.Create("a", 7).ok());
  EXPECT_NE(*registry.Discard("a"), *discarded);
  EXPECT_TRUE(absl::IsNotFound(registry.Discard("a").status()));
}

TEST_F(JobRegistryTest, CleansUpAfterACrash) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", 1).ok());
    ASSERT_TRUE(registry.Create("gone", 1).ok());
    ASSERT_TRUE(registry.Discard("gone").ok());  // the directory stays
  }
  ASSERT_TRUE(os::EnsurePrivateDirectory(root_ + "/.new-half", 0700).ok());
  EXPECT_THAT(Open().jobs(), ElementsAre(Pair("a", 1)));
  EXPECT_EQ(::access((root_ + "/.new-half").c_str(), F_OK), -1);
  EXPECT_EQ(::access((root_ + "/.deleted-1").c_str(), F_OK), -1);
}

TEST_F(JobRegistryTest, LeavesWhatIsNoJobAlone) {
  Open();
  ASSERT_TRUE(os::EnsurePrivateDirectory(root_ + "/no-owner", 0700).ok());
  ASSERT_TRUE(os::EnsurePrivateDirectory(root_ + "/bad-owner", 0700).ok());
  std::ofstream(root_ + "/bad-owner/owner") << "root\n";
  std::ofstream(root_ + "/a-file") << "x";
  EXPECT_THAT(Open().jobs(), IsEmpty());
  EXPECT_EQ(::access((root_ + "/no-owner").c_str(), F_OK), 0);
}

}  // namespace
}  // namespace optstate::supervisor
