// Tests the text of each error of files and disks, and what it says of the
// surroundings.

#include "storage/io/file_error.h"

#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/io/request_rules.h"

namespace optstate::io {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Code = absl::StatusCode;

constexpr char kCall[] = "write of 8192 bytes at 4096 of /no/such/disk/f";
constexpr char kPath[] = "/no/such/disk/f";

FileSurroundings Nothing() {
  FileSurroundings surroundings;
  surroundings.path = kPath;
  surroundings.uid = 998;
  return surroundings;
}

TEST(FileErrorTest, EachErrorSaysWhatWasWrongWhereAndWhatToDo) {
  for (const FileFault& each : FileFaults()) {
    SCOPED_TRACE(each.name);
    EXPECT_STREQ(each.name, ::strerrorname_np(each.error));
    EXPECT_STRNE(each.what, "");
    EXPECT_STRNE(each.advice, "");
    const std::string kernels =
        absl::StrCat(kCall, ": ", ::strerrordesc_np(each.error), " [errno ",
                     each.error, "]: ");
    for (const absl::Status& status : {FileError(each.error, kCall, kPath),
                                       IoError(each.error, kCall, kPath)}) {
      EXPECT_THAT(
          std::string(status.message()),
          AllOf(StartsWith(kernels), HasSubstr("; "), HasSubstr(each.advice)));
    }
  }
}

TEST(FileErrorTest, ErrorsAreListedByNumberAndOnce) {
  int former = 0;
  for (const FileFault& each : FileFaults()) {
    EXPECT_LT(former, each.error) << each.name;
    former = each.error;
  }
}

// The codes of requests, by which stores decide, and what an operator has to
// find in the text.
TEST(FileErrorTest, RequestsHaveTheCodeAndTheWayOut) {
  const struct {
    int error;
    Code code;
    const char* text;
  } kErrors[] = {
      {EPERM, Code::kPermissionDenied, "runs as uid"},
      {EIO, Code::kDataLoss, "dmesg"},
      {ENXIO, Code::kUnavailable, "the device is gone"},
      {EACCES, Code::kPermissionDenied, "runs as uid"},
      {ENODEV, Code::kUnavailable, "the device is gone"},
      {ENFILE, Code::kResourceExhausted, "fs.file-max"},
      {EMFILE, Code::kResourceExhausted, "LimitNOFILE="},
      {EFBIG, Code::kResourceExhausted, "LimitFSIZE="},
      {ENOSPC, Code::kResourceExhausted, "optctl delete job"},
      {EROFS, Code::kUnavailable, "remount,rw"},
      {ENODATA, Code::kDataLoss, "smartctl"},
      {ENOLINK, Code::kUnavailable, "link"},
      {EBADMSG, Code::kDataLoss, "checksum"},
      {EILSEQ, Code::kDataLoss, "protection information"},
      {ESHUTDOWN, Code::kUnavailable, "fsck"},
      {ETIMEDOUT, Code::kUnavailable, "does not answer"},
      {EUCLEAN, Code::kDataLoss, "xfs_repair"},
      {EREMOTEIO, Code::kDataLoss, "smartctl"},
      {EDQUOT, Code::kResourceExhausted, "setquota"},
  };
  EXPECT_EQ(std::size(kErrors), FileFaults().size());
  for (const auto& each : kErrors) {
    const absl::Status status = IoError(each.error, kCall, kPath);
    EXPECT_EQ(status.code(), each.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(each.text));
  }
  // A disk that fails is left with the command that moves a job.
  for (const int failing :
       {EIO, ENODATA, EREMOTEIO, EBADMSG, EILSEQ, ETIMEDOUT}) {
    EXPECT_THAT(IoError(failing, kCall, kPath).message(),
                HasSubstr("optctl set job NAME directory_weights="));
  }
}

TEST(FileErrorTest, OtherErrorsAreTheirCallers) {
  for (const int error : {ENOENT, EEXIST, EINVAL, 4711}) {
    EXPECT_EQ(FileAdvice(error, Nothing()), "") << error;
    EXPECT_THAT(std::string(FileError(error, kCall, kPath).message()),
                EndsWith(absl::StrCat("[errno ", error, "]")));
  }
}

TEST(FileErrorTest, AFullFileSystemIsNamedWithTheBytesThatAreMissing) {
  FileSurroundings full = Nothing();
  EXPECT_THAT(
      FileAdvice(ENOSPC, full),
      StartsWith(": the file system of /no/such/disk is full; optctl "));
  full.bytes_left = 1000;
  EXPECT_THAT(FileAdvice(ENOSPC, full), HasSubstr("has 1000 bytes left; "));
  full.bytes_needed = 8192;
  EXPECT_THAT(FileAdvice(ENOSPC, full),
              HasSubstr("/no/such/disk has 1000 bytes left, 7192 too few; "));
  full.bytes_left = 8192;  // a quota of a container, or another writer
  EXPECT_THAT(FileAdvice(ENOSPC, full), HasSubstr("has 8192 bytes left; "));
  full.files_left = 0;
  full.bytes_needed = 8193;  // XFS makes inodes of free blocks
  EXPECT_THAT(FileAdvice(ENOSPC, full),
              HasSubstr("8192 bytes left, 1 too few"));
  full.bytes_needed = 8192;
  EXPECT_THAT(FileAdvice(ENOSPC, full),
              AllOf(HasSubstr("has no inodes left; "), Not(HasSubstr("8192"))));
}

TEST(FileErrorTest, RoomIsAdvisedOnce) {
  for (const FileFault& each : FileFaults()) {
    const bool is_full = each.error == ENOSPC || each.error == EDQUOT;
    EXPECT_EQ(HasRoomAdvice(FileError(each.error, kCall, kPath).message()),
              is_full)
        << each.name;
  }
}

TEST(FileErrorTest, OwnerAndUserAreNamed) {
  FileSurroundings closed = Nothing();
  for (const int error : {EPERM, EACCES}) {
    closed.owner = std::nullopt;
    EXPECT_THAT(FileAdvice(error, closed),
                StartsWith(": this process runs as uid 998; "));
    closed.owner = {.path = "/no/such", .uid = 7, .gid = 8, .mode = 0750};
    EXPECT_THAT(FileAdvice(error, closed),
                StartsWith(": /no/such belongs to uid 7, gid 8 (mode 0750), "
                           "and this process runs as uid 998; "));
  }
  EXPECT_THAT(FileAdvice(EDQUOT, closed),
              AllOf(HasSubstr("uid 998"), HasSubstr("/no/such/disk")));
}

TEST(FileErrorTest, AMountIsToBeFoundByItsFolder) {
  EXPECT_THAT(FileAdvice(EROFS, Nothing()),
              HasSubstr("findmnt -T /no/such/disk says"));
}

TEST(FileErrorTest, LooksAtWhatIsThere) {
  const std::string folder = testing::TempDir();
  const std::string path = folder + "/file_error_test";
  std::ofstream(path) << "x";
  ASSERT_EQ(::chmod(path.c_str(), 0640), 0);
  const FileSurroundings closed = LookAround(EACCES, path, 0);
  ASSERT_TRUE(closed.owner.has_value());
  EXPECT_EQ(closed.owner->path, path);
  EXPECT_EQ(closed.owner->uid, ::geteuid());
  EXPECT_EQ(closed.owner->gid, ::getegid());
  EXPECT_EQ(closed.owner->mode, 0640u);
  EXPECT_EQ(closed.uid, ::geteuid());
  EXPECT_FALSE(closed.bytes_left.has_value());

  struct statvfs info;
  ASSERT_EQ(::statvfs(folder.c_str(), &info), 0);
  const FileSurroundings full = LookAround(ENOSPC, path, 12);
  EXPECT_EQ(full.bytes_needed, 12u);
  EXPECT_EQ(full.bytes_left.has_value(), info.f_blocks != 0);
  EXPECT_EQ(full.files_left.has_value(), info.f_files != 0);
  EXPECT_FALSE(full.owner.has_value());

  struct rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(LookAround(EMFILE, path, 0).open_files_max, limit.rlim_cur);
  EXPECT_THAT(FileError(EMFILE, kCall, path).message(),
              HasSubstr(absl::StrCat(limit.rlim_cur, " files; ")));
  ::unlink(path.c_str());
  // A file that is not there yet is to be made in a folder.
  const FileSurroundings absent = LookAround(EACCES, path, 0);
  ASSERT_TRUE(absent.owner.has_value());
  EXPECT_NE(absent.owner->path, path);
}

TEST(FileErrorTest, LooksAtNothingElse) {
  const std::string path = testing::TempDir() + "/file_error_test";
  for (const FileFault& each : FileFaults()) {
    const FileSurroundings seen = LookAround(each.error, path, 1);
    EXPECT_TRUE(each.error == ENOSPC ||
                (!seen.bytes_left.has_value() && !seen.files_left.has_value()))
        << each.name;
    EXPECT_EQ(seen.owner.has_value(),
              each.error == EPERM || each.error == EACCES)
        << each.name;
    EXPECT_EQ(seen.open_files_max.has_value(), each.error == EMFILE)
        << each.name;
  }
}

}  // namespace
}  // namespace optstate::io
