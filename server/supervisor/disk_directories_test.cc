#include "server/supervisor/disk_directories.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/unique_fd.h"
#include "server/config/nvme_directory.h"
#include "server/supervisor/device_formatter.h"
#include "server/supervisor/job_registry.h"
#include "server/supervisor/sleep/job_sleeper.h"
#include "storage/disk_folder.h"
#include "storage/testing/test_mounts.h"

namespace optstate::supervisor {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Pair;

class DiskDirectoriesTest : public testing::Test {
 protected:
  DiskDirectoriesTest() {
    std::string name = testing::TempDir() + "/disks-XXXXXX";
    root_ = ::mkdtemp(name.data());
    fs::create_directory(Disk(0));
    fs::create_directory(Disk(1));
  }
  ~DiskDirectoriesTest() override { fs::remove_all(root_); }

  std::string Disk(int number) const {
    return root_ + "/disk" + std::to_string(number);
  }
  std::string Folder(int disk, const std::string& name) const {
    return storage::DiskFolder(Disk(disk), name);
  }
  // Writes files as a job's engine does.
  void MakeJob(int disk, const std::string& name, bool is_durable,
               const std::string& owner = "7\n") const {
    const std::string directory = Folder(disk, name);
    fs::create_directories(directory);
    std::ofstream(directory + "/records") << "r";
    if (is_durable) std::ofstream(directory + "/durable").flush();
    if (disk != 0) return;
    std::ofstream(directory + "/owner") << owner;
    if (is_durable) std::ofstream(directory + "/commits") << "c";
  }
  void MakeOfFormerBoot(int disk, const std::string& name) const {
    MakeJob(disk, name, false);
    std::ofstream(Folder(disk, name) + storage::kDiskMemoryFile)
        << "a-former-boot\n"
        << root_ << "/nowhere\n";
  }
  static absl::StatusOr<DiskDirectories> Open(
      const std::vector<std::string>& texts) {
    v1::NvmeSettings nvme;
    for (const std::string& text : texts) {
      const v1::NvmeDirectory directory = *config::ParseNvmeDirectory(text);
      nvme.add_directories(directory.path());
      if (!directory.device().empty()) {
        *nvme.add_directory_settings() = directory;
      }
    }
    return DiskDirectories::Open(nvme);
  }
  DiskDirectories OpenDisks() const {
    auto disks = Open({Disk(0), Disk(1)});
    EXPECT_TRUE(disks.ok()) << disks.status();
    return *std::move(disks);
  }
  JobRegistry OpenRegistry() const {
    auto registry = JobRegistry::Open(root_ + "/state");
    EXPECT_TRUE(registry.ok()) << registry.status();
    registry->UseDisks(OpenDisks());
    return *std::move(registry);
  }
  // Another disk, empty or with `jobs`, appears where the first one was.
  void MountOver() const {
    fs::rename(Disk(0), root_ + "/below");
    fs::create_directory(Disk(0));
  }

  std::string root_;
};

TEST_F(DiskDirectoriesTest, NoDirectoryHasNoJobs) {
  auto disks = Open({});
  ASSERT_TRUE(disks.ok()) << disks.status();
  EXPECT_TRUE(disks->DurableJobs().empty());
  EXPECT_THAT(*disks->Discard("a"), IsEmpty());
  EXPECT_TRUE(disks->CheckMayCreate("a", 1).ok());
}

TEST_F(DiskDirectoriesTest, OnlyOneDaemonHasADirectory) {
  const DiskDirectories disks = OpenDisks();
  const auto other = Open({Disk(1)});
  EXPECT_THAT(other.status().ToString(), HasSubstr(Disk(1)));
}

TEST_F(DiskDirectoriesTest, ADirectoryThatOthersMayWriteToIsRefused) {
  fs::permissions(Disk(0), fs::perms::all);
  EXPECT_FALSE(Open({Disk(0)}).ok());
}

TEST_F(DiskDirectoriesTest, ADirectoryOfADiskThatIsReadOnlyIsRefused) {
  const auto mounted =
      storage::TestTmpfs::Mount(Disk(0), "size=1m,mode=0700,ro");
  if (absl::IsFailedPrecondition(mounted.status())) {
    GTEST_SKIP() << mounted.status();
  }
  ASSERT_TRUE(mounted.ok()) << mounted.status();
  const auto disks = Open({Disk(1), Disk(0)});
  EXPECT_FALSE(disks.ok());
  EXPECT_THAT(disks.status().ToString(),
              AllOf(HasSubstr(Disk(0)), HasSubstr("Read-only file system")));
}

// A made directory would become a folder of another disk, which a mount hides.
TEST_F(DiskDirectoriesTest, ADirectoryThatIsNotThereIsNotMade) {
  const auto disks = Open({Disk(0), Disk(2)});
  EXPECT_TRUE(absl::IsFailedPrecondition(disks.status())) << disks.status();
  EXPECT_THAT(disks.status().ToString(), HasSubstr(Disk(2) + " is not there"));
  EXPECT_FALSE(fs::exists(Disk(2)));
}

TEST_F(DiskDirectoriesTest, JobsOfADiskAreFoundAndOthersRemoved) {
  MakeJob(0, "durable", true);
  MakeJob(1, "durable", true);
  MakeOfFormerBoot(0, "ended");
  MakeOfFormerBoot(1, "ended");
  MakeJob(0, "of-a-former-build", false);
  MakeJob(0, "no-owner", true, "nobody");
  EXPECT_THAT(OpenDisks().DurableJobs(), ElementsAre(Pair("durable", 7u)));

  JobRegistry registry = OpenRegistry();
  EXPECT_THAT(registry.jobs(), ElementsAre(Key("durable")));
  EXPECT_FALSE(fs::exists(Folder(0, "ended")));
  EXPECT_FALSE(fs::exists(Folder(1, "ended")));
  EXPECT_FALSE(fs::exists(Folder(0, "of-a-former-build")));
  // Files that may be a job's only state are removed on request alone.
  EXPECT_TRUE(fs::exists(Folder(0, "no-owner")));

  const auto discarded = registry.Discard("durable");
  ASSERT_TRUE(discarded.ok()) << discarded.status();
  EXPECT_EQ(discarded->size(), 3u);
  EXPECT_FALSE(fs::exists(Folder(0, "durable")));
  EXPECT_FALSE(fs::exists(Folder(1, "durable")));
}

// The jobs' memory is in another state directory, or their engine lives on.
TEST_F(DiskDirectoriesTest, FilesOfAJobThatMayGoOnElsewhereStay) {
  MakeJob(1, "elsewhere", false);
  ASSERT_TRUE(
      storage::WriteDiskMemory(Folder(1, "elsewhere"), "/other/jobs/a").ok());
  MakeOfFormerBoot(0, "engine");
  const UniqueFd engine(
      ::open((Folder(0, "engine") + "/records").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(engine.get(), LOCK_EX), 0);
  OpenRegistry();
  EXPECT_TRUE(fs::exists(Folder(1, "elsewhere") + "/records"));
  EXPECT_TRUE(fs::exists(Folder(0, "engine") + "/records"));
}

TEST_F(DiskDirectoriesTest, RecordsOfADurableJobStayWithoutTheFirstDisk) {
  MakeJob(1, "durable", true);
  JobRegistry registry = OpenRegistry();
  EXPECT_TRUE(registry.jobs().empty());
  EXPECT_TRUE(fs::exists(Folder(1, "durable") + "/records"));
  const absl::Status status = registry.Create("durable", 7);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("is its disk mounted?"));
}

TEST_F(DiskDirectoriesTest, TheStateInMemoryWins) {
  {
    auto registry = JobRegistry::Open(root_ + "/state");
    ASSERT_TRUE(registry->Create("a", 5).ok());
  }
  MakeJob(0, "a", true);
  const JobRegistry registry = OpenRegistry();
  // The job's engine refuses: see session/disk_claim.h.
  EXPECT_THAT(registry.jobs(), ElementsAre(Pair("a", 5u)));
  EXPECT_TRUE(fs::exists(Folder(0, "a") + "/commits"));
}

TEST_F(DiskDirectoriesTest, NobodyElseGetsANameThatADurableJobHas) {
  JobRegistry registry = OpenRegistry();
  MakeJob(0, "a", true);
  EXPECT_TRUE(absl::IsPermissionDenied(registry.Create("a", 65534)));
  for (const bool is_missing : {false, true}) {
    std::ofstream(Folder(0, "a") + "/owner") << "root";
    if (is_missing) fs::remove(Folder(0, "a") + "/owner");
    const absl::Status status = registry.Create("a", 65534);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(Folder(0, "a") + "/owner"));
  }
  std::ofstream(Folder(0, "a") + "/owner") << "65534\n";
  EXPECT_TRUE(registry.Create("a", 65534).ok());
}

TEST_F(DiskDirectoriesTest, ADiskThatIsMountedLaterIsNotTouched) {
  JobRegistry registry = OpenRegistry();
  MakeJob(0, "a", true);
  ASSERT_TRUE(registry.Create("a", 7).ok());
  ASSERT_TRUE(registry.Create("in-memory", 7).ok());
  MountOver();
  MakeJob(0, "a", true);
  const absl::Status discarded = registry.Discard("a").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(discarded)) << discarded;
  EXPECT_THAT(discarded.ToString(), HasSubstr(Disk(0)));
  EXPECT_TRUE(fs::exists(Folder(0, "a") + "/commits"));
  EXPECT_TRUE(fs::exists(registry.JobDirectory("a") + "/owner"));
  EXPECT_TRUE(absl::IsFailedPrecondition(registry.CheckDisksOf("a")));
  EXPECT_TRUE(absl::IsFailedPrecondition(registry.Create("new", 7)));
  // A job that has nothing there does not depend on it.
  EXPECT_TRUE(registry.CheckDisksOf("in-memory").ok());
  EXPECT_TRUE(registry.Discard("in-memory").ok());
}

TEST_F(DiskDirectoriesTest, AJobThatCannotBeDeletedIsAsItWas) {
  MakeJob(0, "a", true);
  MakeJob(1, "a", true);
  JobRegistry registry = OpenRegistry();
  std::ofstream(registry.JobDirectory("a") + "/state") << "x";
  // It sleeps, too.
  const std::string asleep_in = root_ + "/sleep/a";
  fs::create_directories(asleep_in);
  std::ofstream(asleep_in + "/state") << "x";
  ASSERT_TRUE(MarkAsleep(registry.JobDirectory("a"), asleep_in).ok());
  {
    // A mount point cannot be renamed.
    const auto mounted = storage::TestTmpfs::Mount(Folder(1, "a"), "size=1m");
    if (absl::IsFailedPrecondition(mounted.status())) {
      GTEST_SKIP() << mounted.status();
    }
    ASSERT_TRUE(mounted.ok()) << mounted.status();
    EXPECT_FALSE(registry.Discard("a").ok());
  }
  EXPECT_TRUE(fs::exists(Folder(0, "a") + "/commits"));
  EXPECT_TRUE(fs::exists(Folder(1, "a") + "/records"));
  EXPECT_TRUE(fs::exists(registry.JobDirectory("a") + "/state"));
  EXPECT_EQ(registry.SleepFolder("a"), asleep_in);
  EXPECT_TRUE(fs::exists(asleep_in + "/state"));
  EXPECT_THAT(registry.jobs(), ElementsAre(Key("a")));
}

TEST_F(DiskDirectoriesTest, ADeletionThatWasInterruptedIsFinished) {
  MakeJob(0, "a", true);
  {
    JobRegistry registry = OpenRegistry();
    ASSERT_TRUE(registry.Discard("a").ok());  // what is renamed stays
  }
  EXPECT_TRUE(fs::exists(Disk(0) + "/jobs/.deleted-1/commits"));
  EXPECT_THAT(OpenRegistry().jobs(), IsEmpty());
  EXPECT_TRUE(fs::is_empty(Disk(0) + "/jobs"));
}

// Files of two arrangements, and a folder in a directory that the job was to
// get.
TEST_F(DiskDirectoriesTest, ADeletedJobLeavesNothingOfAnotherArrangement) {
  MakeJob(0, "a", true);
  for (const char* left : {"/records.1", "/extent.1", "/commits.1"}) {
    std::ofstream(Folder(0, "a") + left) << "x";
  }
  fs::create_directories(Folder(1, "a"));
  std::ofstream(Folder(1, "a") + "/identity.new") << "x";
  JobRegistry registry = OpenRegistry();
  const auto discarded = registry.Discard("a");
  ASSERT_TRUE(discarded.ok()) << discarded.status();
  for (const auto& folder : *discarded) fs::remove_all(folder);
  EXPECT_TRUE(fs::is_empty(Disk(0) + "/jobs"));
  EXPECT_TRUE(fs::is_empty(Disk(1) + "/jobs"));
}

// One job that has no room in memory does not keep the daemon down.
TEST_F(DiskDirectoriesTest, AJobWhoseDirectoryCannotBeMadeIsListed) {
  MakeJob(0, "a", true);
  fs::create_directories(root_ + "/state/a/in-the-way");
  JobRegistry registry = OpenRegistry();
  EXPECT_THAT(registry.jobs(), ElementsAre(Pair("a", 7u)));
  fs::remove_all(root_ + "/state/a");
  ASSERT_TRUE(registry.MakeMissingDirectory("a").ok());
  EXPECT_TRUE(fs::exists(root_ + "/state/a/owner"));
}

class DiskDirectoriesDeviceTest : public DiskDirectoriesTest {
 protected:
  DiskDirectoriesDeviceTest() {
    std::ofstream(Device()).flush();
    fs::resize_file(Device(), 8 << 20);
  }
  std::string Device() const { return root_ + "/device"; }
  std::string Text() const { return Disk(0) + ",device=" + Device(); }
  void Format() const {
    const auto formatted = FormatDeviceOf(Text(), /*force=*/false);
    ASSERT_TRUE(formatted.ok()) << formatted.status();
    EXPECT_THAT(*formatted, HasSubstr("has 8388608 bytes for the records"));
  }
};

TEST_F(DiskDirectoriesDeviceTest, ADeviceIsFormattedFirst) {
  const auto refused = Open({Text()});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status()));
  EXPECT_THAT(refused.status().ToString(),
              HasSubstr("optstated --format-device " + Text()));
  ASSERT_NO_FATAL_FAILURE(Format());
  const auto disks = Open({Text()});
  EXPECT_TRUE(disks.ok()) << disks.status();
}

TEST_F(DiskDirectoriesDeviceTest, ADeviceIsNotFormattedUnderADaemon) {
  ASSERT_NO_FATAL_FAILURE(Format());
  {
    const auto disks = Open({Text()});
    ASSERT_TRUE(disks.ok()) << disks.status();
    for (const std::string& directory : {Disk(0), Disk(1)}) {
      const absl::Status status =
          FormatDeviceOf(directory + ",device=" + Device(), /*force=*/true)
              .status();
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(status.ToString(), HasSubstr("in use"));
    }
  }
  EXPECT_TRUE(FormatDeviceOf(Text(), /*force=*/true).ok());
}

TEST_F(DiskDirectoriesDeviceTest, WhatIsNoDirectoryWithADevice) {
  EXPECT_TRUE(absl::IsInvalidArgument(FormatDeviceOf(Disk(0), false).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      FormatDeviceOf(Disk(0) + ",dev=/x", false).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      FormatDeviceOf(Disk(2) + ",device=" + Device(), false).status()));
  EXPECT_FALSE(fs::exists(Disk(2)));
}

// The engine of a job that is known nowhere else may still have its extent.
TEST_F(DiskDirectoriesDeviceTest, AFolderWhoseExtentIsUsedIsLeftAlone) {
  ASSERT_NO_FATAL_FAILURE(Format());
  DiskDirectories disks = *Open({Text()});
  MakeOfFormerBoot(0, "a");
  fs::remove(Folder(0, "a") + "/records");
  ASSERT_TRUE(
      storage::WriteDiskExtent(Folder(0, "a"), {"id", {1 << 20, 4096}}).ok());
  const auto is_known = [](const std::string&) { return false; };
  {
    const UniqueFd engine(::open(Device().c_str(), O_RDWR | O_CLOEXEC));
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_start = 1 << 20;
    lock.l_len = 4096;
    ASSERT_EQ(::fcntl(engine.get(), F_OFD_SETLK, &lock), 0);
    disks.RemoveEnded(is_known);
    EXPECT_TRUE(fs::exists(Folder(0, "a")));
  }
  disks.RemoveEnded(is_known);
  EXPECT_FALSE(fs::exists(Folder(0, "a")));
}

}  // namespace
}  // namespace optstate::supervisor
