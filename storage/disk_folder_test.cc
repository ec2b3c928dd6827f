#include "storage/disk_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/file.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "proto/types/unique_fd.h"
#include "storage/format/sealed_text.h"

namespace optstate::storage {
namespace {

namespace fs = std::filesystem;

class DiskFolderTest : public testing::Test {
 protected:
  DiskFolderTest() {
    std::string name = testing::TempDir() + "/disk-folder-XXXXXX";
    root_ = ::mkdtemp(name.data());
    folder_ = DiskFolder(root_, "a");
    fs::create_directories(folder_);
  }
  ~DiskFolderTest() override { fs::remove_all(root_); }

  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + name) << text;
  }

  // Damages each bit of a file, which must be noticed by who reads it.
  void ExpectDamageIsNoticed(const std::string& path,
                             const std::function<absl::Status()>& read,
                             const std::string& remedy) const {
    const std::string text = *ReadDiskText(path);
    ASSERT_TRUE(IsSealed(text)) << path;
    for (size_t at = 0; at < text.size(); ++at) {
      for (int bit = 0; bit < 8; ++bit) {
        std::string damaged = text;
        damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
        std::ofstream(path) << damaged;
        const absl::Status status = read();
        const std::string where =
            absl::StrCat("bit ", bit, " of byte ", at, ": ", status.ToString());
        EXPECT_TRUE(absl::IsDataLoss(status)) << where;
        EXPECT_NE(status.message().find(path), std::string::npos) << where;
        EXPECT_NE(status.message().find(remedy), std::string::npos) << where;
      }
    }
    std::ofstream(path) << text;
    EXPECT_EQ(read(), absl::OkStatus());
    // A former build's, and what it reads of ours.
    const std::string plain(absl::StripTrailingAsciiWhitespace(text));
    std::ofstream(path) << plain << "\n";
    EXPECT_EQ(read(), absl::OkStatus());
  }

  std::string root_;
  std::string folder_;
};

TEST_F(DiskFolderTest, DamageIsNoticedWithAFileAndARemedy) {
  const DiskIdentity identity = {0xfedcba9876543210, 1, 3};
  ASSERT_TRUE(WriteDiskIdentity(folder_, identity).ok());
  ExpectDamageIsNoticed(
      folder_ + kDiskIdentityFile,
      [this] { return ReadDiskIdentity(folder_).status(); }, "remove the file");
  EXPECT_EQ(*ReadDiskIdentity(folder_), identity);

  const DiskExtent extent = {"0123456789abcdef0123456789abcdef",
                             {1 << 20, 8192}};
  for (const uint32_t arrangement : {0, 1}) {
    ASSERT_TRUE(WriteDiskExtent(folder_, extent, arrangement).ok());
    ExpectDamageIsNoticed(
        DiskExtentPath(folder_, arrangement),
        [this, arrangement] {
          return ReadDiskExtent(folder_, arrangement).status();
        },
        "delete the job");
    EXPECT_EQ(*ReadDiskExtent(folder_, arrangement), extent);
  }

  Write(kDiskOwnerFile, SealText("1000\n"));
  ExpectDamageIsNoticed(
      folder_ + kDiskOwnerFile,
      [this] { return ReadDiskOwner(folder_).status(); },
      "write the uid of the job's owner to it");
  EXPECT_EQ(*ReadDiskOwner(folder_), 1000u);
}

TEST_F(DiskFolderTest, TheIdentityIsReadAsItWasWritten) {
  EXPECT_EQ(*ReadDiskIdentity(folder_), std::nullopt);
  const DiskIdentity identity = {0xfedcba9876543210, 1, 3};
  ASSERT_TRUE(WriteDiskIdentity(folder_, identity).ok());
  EXPECT_EQ(*ReadDiskIdentity(folder_), identity);
}

TEST_F(DiskFolderTest, AnIdentityThatIsNoneIsDataLoss) {
  for (const char* text :
       {"", "incarnation x\ndirectory 1 of 2\n", "incarnation 1\n",
        "incarnation 1\ndirectory 0 of 2\n",
        "incarnation 1\ndirectory 3 of 2\n",
        "incarnation 1\ndirectory 1 of 2\nmore"}) {
    Write(kDiskIdentityFile, text);
    EXPECT_TRUE(absl::IsDataLoss(ReadDiskIdentity(folder_).status())) << text;
  }
}

TEST_F(DiskFolderTest, Owners) {
  EXPECT_EQ(*ReadDiskOwner(folder_), std::nullopt);
  Write(kDiskOwnerFile, "1000\n");
  EXPECT_EQ(*ReadDiskOwner(folder_), 1000u);
  Write(kDiskOwnerFile, "root\n");
  EXPECT_TRUE(absl::IsDataLoss(ReadDiskOwner(folder_).status()));
}

TEST_F(DiskFolderTest, AFolderIsInUseWhileItsMemoryMayBeThere) {
  EXPECT_FALSE(IsDiskFolderInUse(folder_)) << "of a build without `memory`";
  ASSERT_TRUE(WriteDiskMemory(folder_, root_ + "/jobs/a").ok());
  EXPECT_TRUE(IsDiskFolderInUse(folder_)) << "the machine has not restarted";
  EXPECT_FALSE(IsDiskFolderInUse(folder_, root_ + "/jobs/a"));
  Write(kDiskMemoryFile, "a-former-boot\n" + root_ + "/jobs/a\n");
  EXPECT_FALSE(IsDiskFolderInUse(folder_));
  fs::create_directory(folder_ + "/state");
  EXPECT_TRUE(IsDiskFolderInUse(folder_)) << "memory that is on a disk itself";
  Write(kDiskMemoryFile, "");
  EXPECT_TRUE(IsDiskFolderInUse(folder_)) << "nobody knows";
}

TEST_F(DiskFolderTest, AFolderIsInUseWhileAnEngineHasItsRecords) {
  Write(kDiskRecordsFile, "");
  Write(kDiskMemoryFile, "a-former-boot\n/nowhere/jobs/a\n");
  EXPECT_FALSE(IsDiskFolderInUse(folder_));
  const UniqueFd engine(
      ::open((folder_ + kDiskRecordsFile).c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(engine.get(), LOCK_EX), 0);
  EXPECT_TRUE(IsDiskFolderInUse(folder_));
  EXPECT_TRUE(IsDiskFolderInUse(folder_, "/nowhere/jobs/a"));
}

TEST_F(DiskFolderTest, TheExtentIsReadAsItWasWritten) {
  EXPECT_EQ(*ReadDiskExtent(folder_), std::nullopt);
  EXPECT_FALSE(HasRecords(folder_));
  const DiskExtent extent = {"0123456789abcdef", {1 << 20, 8192}};
  ASSERT_TRUE(WriteDiskExtent(folder_, extent).ok());
  EXPECT_EQ(*ReadDiskExtent(folder_), extent);
  EXPECT_TRUE(HasRecords(folder_));
  for (const char* text :
       {"", "device a\nbegin 4096\n", "device a\nbegin 1\nbytes 4096\n",
        "device a\nbegin 4096\nbytes 0\n",
        "device a\nbegin 18446744073709547520\nbytes 8192\n",
        "device a\nbegin 4096\nbytes -4096\n"}) {
    Write(kDiskExtentFile, text);
    EXPECT_TRUE(absl::IsDataLoss(ReadDiskExtent(folder_).status())) << text;
  }
}

TEST_F(DiskFolderTest, AFolderIsInUseWhileAnEngineHasItsExtent) {
  const std::string device = root_ + "/device";
  std::ofstream(device) << "x";
  ASSERT_TRUE(WriteDiskExtent(folder_, {"id", {8192, 8192}}).ok());
  EXPECT_FALSE(IsDiskFolderInUse(folder_, "", device));
  EXPECT_TRUE(IsDiskFolderInUse(folder_)) << "nobody knows";
  EXPECT_TRUE(IsDiskFolderInUse(folder_, "", root_ + "/none"));
  const UniqueFd engine(::open(device.c_str(), O_RDWR | O_CLOEXEC));
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_start = 16384;
  lock.l_len = 4096;
  ASSERT_EQ(::fcntl(engine.get(), F_OFD_SETLK, &lock), 0);
  EXPECT_FALSE(IsDiskFolderInUse(folder_, "", device)) << "that of another job";
  lock.l_start = 12288;
  ASSERT_EQ(::fcntl(engine.get(), F_OFD_SETLK, &lock), 0);
  EXPECT_TRUE(IsDiskFolderInUse(folder_, "", device));
}

TEST_F(DiskFolderTest, OnlyWhatIsSurelyAbsentIsGone) {
  EXPECT_FALSE(MayExist(folder_ + "/none"));
  Write("/file", "");
  EXPECT_FALSE(MayExist(folder_ + "/file/below"));
  EXPECT_TRUE(MayExist(folder_ + "/" + std::string(300, 'x')))
      << "ENAMETOOLONG says nothing";
  EXPECT_FALSE(IsDurableFolder(folder_));
  Write(kDiskDurableFile, "");
  EXPECT_TRUE(IsDurableFolder(folder_));
}

}  // namespace
}  // namespace optstate::storage
