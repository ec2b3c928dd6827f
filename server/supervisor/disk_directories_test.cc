#include "server/supervisor/disk_directories.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/supervisor/job_registry.h"

namespace optstate::supervisor {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Pair;

class DiskDirectoriesTest : public testing::Test {
 protected:
  DiskDirectoriesTest() {
    std::string name = testing::TempDir() + "/disks-XXXXXX";
    root_ = ::mkdtemp(name.data());
  }
  ~DiskDirectoriesTest() override { fs::remove_all(root_); }

  std::string Disk(int number) const {
    return root_ + "/disk" + std::to_string(number);
  }
  // Writes files as a job's engine does.
  void MakeJob(int disk, const std::string& name, bool is_durable,
               const std::string& owner = "7\n") const {
    const std::string directory = Disk(disk) + "/jobs/" + name;
    fs::create_directories(directory);
    std::ofstream(directory + "/records") << "r";
    if (is_durable) std::ofstream(directory + "/durable").flush();
    if (disk != 0) return;
    std::ofstream(directory + "/owner") << owner;
    if (is_durable) std::ofstream(directory + "/commits") << "c";
  }

  std::string root_;
};

TEST_F(DiskDirectoriesTest, NoDirectoryHasNoJobs) {
  const auto disks = DiskDirectories::Open({});
  ASSERT_TRUE(disks.ok()) << disks.status();
  EXPECT_TRUE(disks->DurableJobs().empty());
  disks->RemoveJob("a");
}

TEST_F(DiskDirectoriesTest, OnlyOneDaemonHasADirectory) {
  const auto disks = DiskDirectories::Open({Disk(0), Disk(1)});
  ASSERT_TRUE(disks.ok()) << disks.status();
  const auto other = DiskDirectories::Open({Disk(1)});
  EXPECT_THAT(other.status().ToString(), HasSubstr(Disk(1)));
}

TEST_F(DiskDirectoriesTest, ADirectoryThatOthersMayWriteToIsRefused) {
  fs::create_directory(Disk(0));
  fs::permissions(Disk(0), fs::perms::all);
  EXPECT_FALSE(DiskDirectories::Open({Disk(0)}).ok());
}

TEST_F(DiskDirectoriesTest, JobsOfADiskAreFoundAndOthersRemoved) {
  MakeJob(0, "durable", true);
  MakeJob(1, "durable", true);
  MakeJob(0, "not-durable", false);
  MakeJob(1, "not-durable", false);
  MakeJob(0, "no-owner", true, "nobody");
  auto disks = DiskDirectories::Open({Disk(0), Disk(1)});
  ASSERT_TRUE(disks.ok()) << disks.status();
  EXPECT_THAT(disks->DurableJobs(), ElementsAre(Pair("durable", 7u)));

  auto registry = JobRegistry::Open(root_ + "/state");
  ASSERT_TRUE(registry.ok());
  ASSERT_TRUE(registry->UseDisks(*std::move(disks)).ok());
  EXPECT_THAT(registry->jobs(), ElementsAre(Key("durable")));
  EXPECT_FALSE(fs::exists(Disk(0) + "/jobs/not-durable"));
  EXPECT_FALSE(fs::exists(Disk(1) + "/jobs/not-durable"));
  // Files that may be a job's only state are removed on request alone.
  EXPECT_TRUE(fs::exists(Disk(0) + "/jobs/no-owner"));

  ASSERT_TRUE(registry->Discard("durable").ok());
  EXPECT_FALSE(fs::exists(Disk(0) + "/jobs/durable"));
  EXPECT_FALSE(fs::exists(Disk(1) + "/jobs/durable"));
}

TEST_F(DiskDirectoriesTest, RecordsOfADurableJobStayWithoutTheFirstDisk) {
  MakeJob(1, "durable", true);
  auto disks = DiskDirectories::Open({Disk(0), Disk(1)});
  ASSERT_TRUE(disks.ok()) << disks.status();
  auto registry = JobRegistry::Open(root_ + "/state");
  ASSERT_TRUE(registry->UseDisks(*std::move(disks)).ok());
  EXPECT_TRUE(registry->jobs().empty());
  EXPECT_TRUE(fs::exists(Disk(1) + "/jobs/durable/records"));
}

TEST_F(DiskDirectoriesTest, TheStateInMemoryWins) {
  {
    auto registry = JobRegistry::Open(root_ + "/state");
    ASSERT_TRUE(registry->Create("a", 5).ok());
  }
  MakeJob(0, "a", true);
  auto registry = JobRegistry::Open(root_ + "/state");
  auto disks = DiskDirectories::Open({Disk(0)});
  ASSERT_TRUE(registry->UseDisks(*std::move(disks)).ok());
  EXPECT_THAT(registry->jobs(), ElementsAre(Pair("a", 5u)));
  EXPECT_TRUE(fs::exists(Disk(0) + "/jobs/a/commits"));
}

}  // namespace
}  // namespace optstate::supervisor
