#include "storage/io/disk_bytes.h"

#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "storage/io/request_rules.h"

namespace optstate::io {

absl::StatusOr<uint64_t> DiskBytes(int fd, const std::string& path) {
  struct stat info;
  if (::fstat(fd, &info) != 0) {
    return IoError(errno, absl::StrCat("fstat of ", path), path);
  }
  if (S_ISREG(info.st_mode)) return static_cast<uint64_t>(info.st_size);
  if (!S_ISBLK(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not a block device"));
  }
  uint64_t bytes = 0;
  if (::ioctl(fd, BLKGETSIZE64, &bytes) != 0) {
    return IoError(errno, absl::StrCat("ioctl(BLKGETSIZE64) of ", path), path);
  }
  return bytes;
}

}  // namespace optstate::io
