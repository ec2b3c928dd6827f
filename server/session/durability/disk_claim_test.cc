#include "server/session/durability/disk_claim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "storage/access_file.h"
#include "storage/disk_folder.h"
#include "storage/format/sealed_text.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class DiskClaimTest : public testing::Test {
 protected:
  DiskClaimTest() {
    std::string name = testing::TempDir() + "/disk-claim-XXXXXX";
    root_ = ::mkdtemp(name.data());
    for (const char* disk : {"/0", "/1", "/2"}) {
      fs::create_directory(root_ + disk);
      all_.push_back(storage::DiskFolder(root_ + disk, "a"));
    }
    two_ = {all_[0], all_[1]};
  }
  ~DiskClaimTest() override { fs::remove_all(root_); }

  DiskClaim Claim(uint64_t incarnation, bool is_new) const {
    return {.incarnation = incarnation,
            .owner = 7,
            .job_directory = root_ + "/state/jobs/a",
            .is_new = is_new};
  }
  // Makes a job over two directories, as its engine does.
  void Make(bool is_durable) const {
    ASSERT_TRUE(ClaimDiskFolders(two_, Claim(1, /*is_new=*/true)).ok());
    for (const std::string& folder : two_) {
      std::ofstream(folder + storage::kDiskRecordsFile) << "r";
      if (is_durable) std::ofstream(folder + storage::kDiskDurableFile).flush();
    }
    if (is_durable) std::ofstream(two_[0] + storage::kDiskCommitsFile) << "c";
  }

  OwnArrangement Own(uint32_t count, uint32_t number) const {
    return {all_, count, number, /*incarnation=*/1};
  }

  std::string root_;
  std::vector<std::string> all_;
  std::vector<std::string> two_;
};

TEST_F(DiskClaimTest, AJobFindsItsFolders) {
  Make(/*is_durable=*/true);
  EXPECT_EQ(*storage::ReadDiskOwner(two_[0]), 7u);
  EXPECT_EQ(*storage::ReadDiskIdentity(two_[1]),
            (storage::DiskIdentity{1, 1, 2}));
  EXPECT_TRUE(ClaimDiskFolders(two_, Claim(1, false)).ok());
  EXPECT_TRUE(ClaimDiskFolders(two_, Claim(1, true)).ok()) << "was cut short";
}

TEST_F(DiskClaimTest, TheFirstFolderSaysWhoMayUseTheJob) {
  const std::string memory = Claim(1, true).job_directory;
  fs::create_directories(memory);
  std::ofstream(memory + storage::kAccessFile) << "access 1 private\n";
  Make(/*is_durable=*/true);
  EXPECT_EQ(*storage::ReadAccessText(two_[0]), "access 1 private\n");
  EXPECT_FALSE(fs::exists(two_[1] + storage::kAccessFile));
  // The next engine finds that it was changed while none ran.
  std::ofstream(memory + storage::kAccessFile) << "access 1 open\n";
  EXPECT_TRUE(ClaimDiskFolders(two_, Claim(1, false)).ok());
  EXPECT_EQ(*storage::ReadAccessText(two_[0]), "access 1 open\n");
  // The disk has all that is left of it.
  fs::remove(memory + storage::kAccessFile);
  EXPECT_TRUE(ClaimDiskFolders(two_, Claim(1, false)).ok());
  EXPECT_EQ(*storage::ReadAccessText(two_[0]), "access 1 open\n");
}

TEST_F(DiskClaimTest, ANewJobTakesOverNothingOfWhoMayUseAnother) {
  fs::create_directories(two_[0]);
  std::ofstream(two_[0] + storage::kAccessFile) << "access 1 open\n";
  Make(/*is_durable=*/false);
  EXPECT_FALSE(fs::exists(two_[0] + storage::kAccessFile));
}

TEST_F(DiskClaimTest, AnotherOrderIsNamedAndChangesNothing) {
  Make(/*is_durable=*/false);
  const std::vector<std::string> swapped = {two_[1], two_[0]};
  const absl::Status status = ClaimDiskFolders(swapped, Claim(1, false));
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.ToString(),
              AllOf(HasSubstr(two_[1] + " is number 2"), HasSubstr("order")));
  EXPECT_EQ(*storage::ReadDiskIdentity(two_[1]),
            (storage::DiskIdentity{1, 1, 2}));
  EXPECT_FALSE(fs::exists(two_[1] + storage::kDiskOwnerFile));
}

TEST_F(DiskClaimTest, AnotherNumberIsNamedAndChangesNothing) {
  Make(/*is_durable=*/true);
  for (const std::string& folder : two_) {
    const absl::Status status =
        CheckDiskIdentities({folder}, /*incarnation=*/1, /*count=*/0);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(status.ToString(),
                HasSubstr("was made with 2 nvme.directories"));
  }
  const absl::Status more = ClaimDiskFolders(all_, Claim(1, false));
  EXPECT_TRUE(absl::IsDataLoss(more)) << more;
  EXPECT_THAT(more.ToString(), HasSubstr(all_[2]));
  EXPECT_FALSE(fs::exists(all_[2]));
}

// An engine may die between a change of the number and that of identities.
TEST_F(DiskClaimTest, ANumberThatIsKnownIsWrittenAnew) {
  Make(/*is_durable=*/true);
  EXPECT_TRUE(CheckDiskIdentities(all_, 1, /*count=*/0).ok());
  EXPECT_TRUE(CheckDiskIdentities(all_, 1, /*count=*/1).ok());
  ASSERT_TRUE(ClaimDiskFolders({two_[0]}, Claim(1, false)).ok());
  EXPECT_EQ(*storage::ReadDiskIdentity(two_[0]),
            (storage::DiskIdentity{1, 0, 1}));
  RemoveOtherArrangements(Own(/*count=*/1, /*number=*/1));
  EXPECT_TRUE(fs::exists(two_[0]));
  EXPECT_FALSE(fs::exists(two_[1]));
}

// A folder that could not be removed, as its disk was read-only; then the
// operator has put another directory before it.
TEST_F(DiskClaimTest, AFolderThatTheJobHasNoMoreIsInNobodysWay) {
  Make(/*is_durable=*/true);
  ASSERT_TRUE(ClaimDiskFolders({two_[0]}, Claim(1, false)).ok());
  ASSERT_EQ(*storage::ReadDiskIdentity(two_[1]),
            (storage::DiskIdentity{1, 1, 2}));
  const std::vector<std::string> moved = {two_[0], all_[2], two_[1]};
  EXPECT_TRUE(CheckDiskIdentities(moved, 1, /*count=*/0).ok());
  EXPECT_TRUE(CheckDiskIdentities(moved, std::nullopt, /*count=*/1).ok());
  // Its place is that of the one that the job has.
  EXPECT_TRUE(absl::IsFailedPrecondition(
      CheckDiskIdentities({two_[1], two_[0]}, 1, /*count=*/0)));
  // One that the job has is not behind another.
  ASSERT_TRUE(storage::WriteDiskIdentity(two_[0], {1, 0, 2}).ok());
  const absl::Status status = CheckDiskIdentities(moved, 1, /*count=*/0);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("order"));
}

TEST_F(DiskClaimTest, ADirectoryIsClaimedForAJobThatIsThere) {
  Make(/*is_durable=*/true);
  DiskClaim claim = Claim(1, /*is_new=*/true);
  claim.first = 2;
  // Another job of this name is in the way, which has to be told.
  fs::create_directories(all_[2]);
  ASSERT_TRUE(storage::WriteDiskIdentity(all_[2], {2, 0, 1}).ok());
  std::ofstream(all_[2] + storage::kDiskDurableFile).flush();
  std::ofstream(all_[2] + storage::kDiskRecordsFile) << "r";
  EXPECT_TRUE(absl::IsFailedPrecondition(ClaimDiskFolders(all_, claim)));
  EXPECT_TRUE(CheckDiskIdentities(all_, 1, /*count=*/2).ok());
  RemoveOtherArrangements(Own(/*count=*/2, /*number=*/0));
  EXPECT_TRUE(fs::exists(all_[2]));
  fs::remove_all(all_[2]);
  ASSERT_TRUE(ClaimDiskFolders(all_, claim).ok());
  EXPECT_EQ(*storage::ReadDiskIdentity(all_[2]),
            (storage::DiskIdentity{1, 2, 3}));
  EXPECT_EQ(*storage::ReadDiskIdentity(all_[1]),
            (storage::DiskIdentity{1, 1, 2}));
}

TEST_F(DiskClaimTest, AClaimThatWasCutShortLeavesNothing) {
  Make(/*is_durable=*/true);
  fs::create_directories(all_[2]);
  std::ofstream(all_[2] + storage::kDiskIdentityFile + ".new") << "inc";
  RemoveOtherArrangements(Own(/*count=*/2, /*number=*/0));
  EXPECT_FALSE(fs::exists(all_[2]));
  fs::create_directories(all_[2]);
  std::ofstream(all_[2] + storage::kDiskRecordsFile) << "r";
  RemoveOtherArrangements(Own(/*count=*/2, /*number=*/0));
  EXPECT_TRUE(fs::exists(all_[2] + storage::kDiskRecordsFile));
}

TEST_F(DiskClaimTest, WhatIsOfAnotherArrangementIsFoundAndNothingElse) {
  Make(/*is_durable=*/true);
  std::ofstream(two_[1] + storage::kDiskExtentFile) << "e";
  EXPECT_THAT(FindOtherArrangements(Own(/*count=*/2, /*number=*/0)), IsEmpty());
  const std::vector<std::string> odd = {
      two_[0] + storage::kDiskOddRecordsFile,
      two_[0] + storage::kDiskCommitsFile + ".1",
      two_[1] + storage::kDiskOddExtentFile};
  for (const std::string& path : odd) std::ofstream(path) << "o";
  EXPECT_THAT(FindOtherArrangements(Own(/*count=*/2, /*number=*/0)),
              ElementsAreArray(odd));
  // The job has the next number and one directory: files of before are others.
  EXPECT_THAT(FindOtherArrangements(Own(/*count=*/1, /*number=*/1)),
              ElementsAre(two_[0] + storage::kDiskRecordsFile, two_[1]));
  // A folder of another job is in a directory that this one does not have.
  ASSERT_TRUE(storage::WriteDiskIdentity(two_[1], {2, 0, 1}).ok());
  EXPECT_THAT(FindOtherArrangements(Own(/*count=*/1, /*number=*/1)),
              ElementsAre(two_[0] + storage::kDiskRecordsFile));
}

TEST_F(DiskClaimTest, FoldersOfAnotherJobAreNotTouched) {
  Make(/*is_durable=*/true);
  for (const bool is_new : {false, true}) {
    const absl::Status status = ClaimDiskFolders(two_, Claim(2, is_new));
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    RemoveDiskFolders(two_, 2);
    EXPECT_EQ(*storage::ReadDiskIdentity(two_[0]),
              (storage::DiskIdentity{1, 0, 2}));
    EXPECT_TRUE(fs::exists(two_[1] + storage::kDiskRecordsFile));
  }
  RemoveDiskFolders(two_, 1);
  EXPECT_FALSE(fs::exists(two_[0]));
}

// The registry knows that this state directory has no such job any more.
TEST_F(DiskClaimTest, ANewJobReplacesRecordsThatNobodyHas) {
  Make(/*is_durable=*/false);
  DiskClaim elsewhere = Claim(2, true);
  elsewhere.job_directory = "/another/jobs/a";
  const absl::Status status = ClaimDiskFolders(two_, elsewhere);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(ClaimDiskFolders(two_, Claim(2, true)).ok());
  EXPECT_EQ(*storage::ReadDiskIdentity(two_[1]),
            (storage::DiskIdentity{2, 1, 2}));
}

TEST_F(DiskClaimTest, AJobIsItsOwners) {
  Make(/*is_durable=*/true);
  DiskClaim strangers = Claim(1, false);
  strangers.owner = 65534;
  EXPECT_TRUE(absl::IsPermissionDenied(ClaimDiskFolders(two_, strangers)));
  fs::remove(two_[0] + storage::kDiskOwnerFile);
  EXPECT_TRUE(absl::IsFailedPrecondition(ClaimDiskFolders(two_, strangers)));
  EXPECT_FALSE(fs::exists(two_[0] + storage::kDiskOwnerFile));
}

// A job of a build that knew no seals is opened, and has them then.
TEST_F(DiskClaimTest, TextsOfAFormerBuildAreSealed) {
  Make(/*is_durable=*/true);
  std::ofstream(two_[0] + storage::kDiskOwnerFile) << "7\n";
  for (const size_t i : {0, 1}) {
    std::ofstream(two_[i] + storage::kDiskIdentityFile)
        << "incarnation 0000000000000001\ndirectory " << i + 1 << " of 2\n";
  }
  ASSERT_TRUE(ClaimDiskFolders(two_, Claim(1, false)).ok());
  for (const std::string& path :
       {two_[0] + storage::kDiskOwnerFile, two_[0] + storage::kDiskIdentityFile,
        two_[1] + storage::kDiskIdentityFile}) {
    const auto text = storage::ReadDiskText(path);
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_TRUE(storage::IsSealed(*text)) << path;
  }
  EXPECT_EQ(*storage::ReadDiskOwner(two_[0]), 7u);
  EXPECT_EQ(*storage::ReadDiskIdentity(two_[1]),
            (storage::DiskIdentity{1, 1, 2}));
}

// A claim changes nothing when a file that says whose the folder is, is
// damaged, and does what its error advises afterwards.
TEST_F(DiskClaimTest, DamageIsNamedAndChangesNothing) {
  Make(/*is_durable=*/true);
  const std::string owner = two_[0] + storage::kDiskOwnerFile;
  const std::string identity = two_[1] + storage::kDiskIdentityFile;
  for (const std::string& path : {owner, identity}) {
    const std::string text = *storage::ReadDiskText(path);
    for (size_t at = 0; at < text.size(); ++at) {
      std::string damaged = text;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << at % 8));
      std::ofstream(path) << damaged;
      const absl::Status refused = ClaimDiskFolders(two_, Claim(1, false));
      EXPECT_TRUE(absl::IsDataLoss(refused)) << at << ": " << refused;
      EXPECT_THAT(refused.ToString(), HasSubstr(path)) << at;
      EXPECT_EQ(*storage::ReadDiskText(path), damaged) << at;
    }
    std::ofstream(path) << text;
  }
  std::ofstream(owner) << "7";
  fs::remove(identity);
  ASSERT_TRUE(ClaimDiskFolders(two_, Claim(1, false)).ok());
  EXPECT_EQ(*storage::ReadDiskOwner(two_[0]), 7u);
  EXPECT_EQ(*storage::ReadDiskIdentity(two_[1]),
            (storage::DiskIdentity{1, 1, 2}));
}

TEST_F(DiskClaimTest, AJobOfAFormerBuildGetsIdentities) {
  Make(/*is_durable=*/true);
  for (const std::string& folder : two_) {
    fs::remove(folder + storage::kDiskIdentityFile);
    fs::remove(folder + storage::kDiskMemoryFile);
  }
  // A directory that it does not have is not taken for one of its own.
  const absl::Status more = ClaimDiskFolders(all_, Claim(1, false));
  EXPECT_TRUE(absl::IsDataLoss(more)) << more;
  EXPECT_THAT(more.ToString(), HasSubstr(all_[2]));
  EXPECT_FALSE(fs::exists(all_[2]));
  ASSERT_TRUE(ClaimDiskFolders(two_, Claim(1, false)).ok());
  EXPECT_EQ(*storage::ReadDiskIdentity(two_[1]),
            (storage::DiskIdentity{1, 1, 2}));
  EXPECT_TRUE(storage::IsDiskFolderInUse(two_[0]));
}

}  // namespace
}  // namespace optstate::session
