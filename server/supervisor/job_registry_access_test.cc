// The registry knows who may use jobs, over restarts, a reboot, sleep
// and damage.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"
#include "server/access/job_access.h"
#include "server/supervisor/job_registry.h"
#include "server/supervisor/sleep/job_sleeper.h"
#include "storage/access_file.h"
#include "storage/disk_folder.h"
#include "storage/format/sealed_text.h"

namespace optstate::supervisor {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr uid_t kOwner = 1000;

v1::JobAccess Private(const std::string& reader) {
  v1::JobAccess access;
  access.set_is_private(true);
  access.add_readers(reader);
  return access;
}

class JobRegistryAccessTest : public testing::Test {
 protected:
  JobRegistryAccessTest() {
    EXPECT_NE(::mkdtemp(root_.data()), nullptr);
    for (const std::string& path : {disk(), sleep()}) {
      EXPECT_TRUE(fs::create_directory(path));
    }
    config_.mutable_nvme()->add_directories(disk());
    config_.set_sleep_directory(sleep());
  }
  ~JobRegistryAccessTest() override { fs::remove_all(root_); }

  std::string jobs() const { return root_ + "/jobs"; }
  std::string disk() const { return root_ + "/disk"; }
  std::string sleep() const { return root_ + "/sleep"; }
  std::string DiskFolder() const { return storage::DiskFolder(disk(), "a"); }

  // Opens the registry as a daemon does that starts.
  JobRegistry Open() const {
    auto registry = JobRegistry::Open(jobs());
    EXPECT_TRUE(registry.ok()) << registry.status();
    auto sleep = SleepDirectory::Open(config_);
    EXPECT_TRUE(sleep.ok()) << sleep.status();
    auto disks = DiskDirectories::Open(config_.nvme());
    EXPECT_TRUE(disks.ok()) << disks.status();
    registry->UseSleepDirectory(*std::move(sleep));
    registry->UseDisks(*std::move(disks));
    return *std::move(registry);
  }
  // Has the memory be lost, as when the machine starts again.
  void Reboot() const { fs::remove_all(jobs()); }

  // Writes the files of a durable job on the disk, as its engine does.
  void MakeDurable(uid_t owner) const {
    fs::create_directories(DiskFolder());
    std::ofstream(DiskFolder() + "/records") << "r";
    std::ofstream(DiskFolder() + "/durable").flush();
    std::ofstream(DiskFolder() + "/commits") << "c";
    ASSERT_TRUE(storage::CopyAccess(jobs() + "/a", DiskFolder(), true).ok());
    std::ofstream(DiskFolder() + "/owner")
        << storage::SealText(std::to_string(owner) + "\n");
  }

  SleepPlace Place() const {
    return {.job = "a",
            .uid = kOwner,
            .job_directory = jobs() + "/a",
            .folder = sleep() + "/jobs/a"};
  }
  absl::Status Sleep() const {
    fs::create_directories(sleep() + "/jobs");
    fs::create_directory(jobs() + "/a/state");
    std::ofstream(jobs() + "/a/state/control") << "state";
    CopyControl control;
    return PutToSleep(
               Place(), [] { return absl::OkStatus(); }, &control)
        .status();
  }
  absl::Status WakeUp() const {
    CopyControl control;
    return Wake(
        Place(),
        [](const v1::SleepManifest&, absl::FunctionRef<absl::Status()> make) {
          return make();
        },
        &control);
  }

  static std::string Text(const JobRegistry& registry) {
    const KnownAccess& known = registry.AccessOf("a");
    EXPECT_EQ(known.problem, "");
    return access::AccessText(known.access);
  }
  static std::string TextIn(const std::string& folder) {
    const KnownAccess known = ReadAccess(folder);
    EXPECT_EQ(known.problem, "");
    return access::AccessText(known.access);
  }

  v1::DaemonConfig config_;

 private:
  std::string root_ = ::testing::TempDir() + "/registry_access-XXXXXX";
};

TEST_F(JobRegistryAccessTest, ItSurvivesARestart) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
    ASSERT_TRUE(registry.Create("b", kOwner).ok());
    EXPECT_EQ(Text(registry), "private; readers alice");
  }
  {
    JobRegistry registry = Open();
    EXPECT_EQ(Text(registry), "private; readers alice");
    EXPECT_FALSE(registry.AccessOf("b").access.is_private());
    EXPECT_FALSE(fs::exists(jobs() + "/b" + storage::kAccessFile));
    ASSERT_TRUE(registry.SetAccess("a", {}).ok());
  }
  EXPECT_EQ(Text(Open()), "not private");
}

TEST_F(JobRegistryAccessTest, WhatIsNotAJobHasNobody) {
  JobRegistry registry = Open();
  EXPECT_TRUE(registry.AccessOf("a").access.is_private());
  ASSERT_TRUE(registry.Create("a", kOwner).ok());
  EXPECT_FALSE(registry.AccessOf("a").access.is_private());
  ASSERT_TRUE(registry.Discard("a").ok());
  EXPECT_TRUE(registry.AccessOf("a").access.is_private());
}

TEST_F(JobRegistryAccessTest, ADamagedFileMeansPrivateUntilItIsSetAnew) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
  }
  std::ofstream(jobs() + "/a" + storage::kAccessFile) << "access 1 open\n";
  JobRegistry registry = Open();
  const KnownAccess known = registry.AccessOf("a");
  EXPECT_TRUE(known.access.is_private());
  EXPECT_EQ(known.access.readers_size(), 0);
  EXPECT_THAT(known.problem, HasSubstr(jobs() + "/a/access is damaged"));
  ASSERT_TRUE(registry.SetAccess("a", Private("bob")).ok());
  EXPECT_EQ(Text(registry), "private; readers bob");
}

TEST_F(JobRegistryAccessTest, ADurableJobHasItAfterAReboot) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
    MakeDurable(kOwner);
  }
  Reboot();
  {
    JobRegistry registry = Open();
    EXPECT_EQ(Text(registry), "private; readers alice");
    ASSERT_TRUE(registry.SetAccess("a", Private("bob")).ok());
    EXPECT_EQ(TextIn(DiskFolder()), "private; readers bob");
  }
  Reboot();
  EXPECT_EQ(Text(Open()), "private; readers bob");
}

// The daemon died between the two files.
TEST_F(JobRegistryAccessTest, MemoryIsNewerThanTheDisk) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
    MakeDurable(kOwner);
  }
  ASSERT_TRUE(WriteAccess(jobs() + "/a", Private("bob")).ok());
  EXPECT_EQ(Text(Open()), "private; readers bob");
  EXPECT_EQ(TextIn(DiskFolder()), "private; readers bob");
}

// A former build has lost the file in memory.
TEST_F(JobRegistryAccessTest, TheDiskHelpsOut) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
    MakeDurable(kOwner);
  }
  fs::remove(jobs() + "/a" + storage::kAccessFile);
  EXPECT_EQ(Text(Open()), "private; readers alice");
  EXPECT_EQ(TextIn(jobs() + "/a"), "private; readers alice");
}

TEST_F(JobRegistryAccessTest, DamageOnTheDiskIsKept) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
    MakeDurable(kOwner);
  }
  std::ofstream(DiskFolder() + storage::kAccessFile) << "access 1 open\n";
  Reboot();
  for (int start = 0; start < 2; ++start) {
    const JobRegistry registry = Open();
    EXPECT_TRUE(registry.AccessOf("a").access.is_private());
    EXPECT_THAT(registry.AccessOf("a").problem, HasSubstr("damaged"));
  }
}

TEST_F(JobRegistryAccessTest, AnotherUsersFolderIsLeftAlone) {
  JobRegistry registry = Open();
  ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
  MakeDurable(kOwner + 1);
  ASSERT_TRUE(registry.SetAccess("a", Private("bob")).ok());
  EXPECT_EQ(TextIn(DiskFolder()), "private; readers alice");
}

TEST_F(JobRegistryAccessTest, AnErrorLeavesItAsItWas) {
  JobRegistry registry = Open();
  ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
  MakeDurable(kOwner);
  // The name of the file that is to become `access` on the disk is taken.
  fs::create_directory(DiskFolder() + storage::kAccessFile + ".new");
  EXPECT_FALSE(registry.SetAccess("a", {}).ok());
  EXPECT_EQ(Text(registry), "private; readers alice");
  EXPECT_EQ(TextIn(jobs() + "/a"), "private; readers alice");
  EXPECT_EQ(TextIn(DiskFolder()), "private; readers alice");
}

TEST_F(JobRegistryAccessTest, AJobHasItWhileItSleepsAndAfterwards) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
  }
  ASSERT_TRUE(Sleep().ok());
  EXPECT_FALSE(fs::exists(jobs() + "/a/state"));
  Reboot();
  {
    JobRegistry registry = Open();
    EXPECT_EQ(registry.SleepFolder("a"), Place().folder);
    EXPECT_EQ(Text(registry), "private; readers alice");
    ASSERT_TRUE(registry.SetAccess("a", Private("bob")).ok());
  }
  Reboot();
  EXPECT_EQ(Text(Open()), "private; readers bob");
  ASSERT_TRUE(WakeUp().ok());
  EXPECT_TRUE(fs::exists(jobs() + "/a/state/control"));
  const JobRegistry registry = Open();
  EXPECT_EQ(registry.SleepFolder("a"), "");
  EXPECT_EQ(Text(registry), "private; readers bob");
}

// The daemon died between the two files.
TEST_F(JobRegistryAccessTest, MemoryIsNewerThanTheFolderOfASleepingJob) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", kOwner).ok());
  }
  ASSERT_TRUE(Sleep().ok());
  ASSERT_TRUE(WriteAccess(jobs() + "/a", Private("bob")).ok());
  EXPECT_EQ(Text(Open()), "private; readers bob");
  EXPECT_EQ(TextIn(Place().folder), "private; readers bob");
  Reboot();
  EXPECT_EQ(Text(Open()), "private; readers bob");
}

TEST_F(JobRegistryAccessTest, ASleepingJobWhoseDiskIsAwayKeepsIt) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
  }
  ASSERT_TRUE(Sleep().ok());
  JobRegistry registry = Open();
  fs::rename(Place().folder, Place().folder + "-away");
  const absl::Status refused = registry.SetAccess("a", {});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(Text(registry), "private; readers alice");
}

// A former build copies the file as any other, and takes that in memory away.
TEST_F(JobRegistryAccessTest, AJobThatAFormerBuildPutToSleepHasIt) {
  {
    JobRegistry registry = Open();
    ASSERT_TRUE(registry.Create("a", kOwner, Private("alice")).ok());
  }
  ASSERT_TRUE(Sleep().ok());
  fs::rename(Place().folder + storage::kAccessFile,
             Place().folder + "/files" + storage::kAccessFile);
  fs::remove(jobs() + "/a" + storage::kAccessFile);
  EXPECT_EQ(Text(Open()), "private; readers alice");
  EXPECT_EQ(TextIn(jobs() + "/a"), "private; readers alice");
}

}  // namespace
}  // namespace optstate::supervisor
