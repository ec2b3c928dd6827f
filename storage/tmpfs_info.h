#ifndef OPTSTATE_STORAGE_TMPFS_INFO_H_
#define OPTSTATE_STORAGE_TMPFS_INFO_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace optstate::storage {

// The kind of pages that a directory's files will have. 4 KiB pages cost an
// update up to a quarter of its speed.
struct TmpfsInfo {
  bool is_tmpfs = false;
  bool is_hugetlbfs = false;
  std::string file_system;  // "tmpfs", "ext4", ...
  std::string mount_point;
  std::string huge_option;    // the tmpfs mount's huge=; empty: not given
  std::string shmem_enabled;  // the machine's setting: never, advise, force, ..
  uint64_t bytes_total = 0;
  uint64_t bytes_left = 0;  // to this user
  uint64_t files_left = 0;  // inodes, to this user; UINT64_MAX: no limit

  bool huge_pages() const;
};

// Inspects a directory. NOT_FOUND when there is none.
absl::StatusOr<TmpfsInfo> InspectDirectory(const std::string& directory);

// Returns RESOURCE_EXHAUSTED when the directory's file system lacks the blocks
// or the inodes for the small files of one more engine or job: names what is
// exhausted and what to do. OK also when that cannot be found out.
absl::Status CheckNotFull(const std::string& directory);

// Returns `status` of a file operation below the directory; when it is
// RESOURCE_EXHAUSTED, adds what CheckNotFull says: the kernel has one word for
// blocks and inodes. An error that says what to do (io/file_error.h) stays as
// it is.
absl::Status ExplainFull(const absl::Status& status,
                         const std::string& directory);

// Returns one sentence for operators: what the pages are, why, and what would
// help.
std::string DescribePages(const TmpfsInfo& info);

// Mounts a tmpfs with huge=within_size on the directory, unless one with huge
// pages is there already. FAILED_PRECONDITION when the directory is not empty
// (what is in it would be hidden), PERMISSION_DENIED without CAP_SYS_ADMIN.
absl::Status MountHugeTmpfs(const std::string& directory);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_TMPFS_INFO_H_
