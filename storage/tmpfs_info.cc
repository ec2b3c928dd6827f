#include "storage/tmpfs_info.h"

#include <linux/magic.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "storage/io/file_error.h"

namespace optstate::storage {
namespace {

constexpr char kShmemEnabled[] =
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

// Returns the word in brackets: "always within_size [advise] never".
std::string SelectedWord(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    absl::string_view selected = word;
    if (absl::ConsumePrefix(&selected, "[") &&
        absl::ConsumeSuffix(&selected, "]")) {
      return std::string(selected);
    }
  }
  return "";
}

std::string HugeOption(absl::string_view options) {
  for (absl::string_view option : absl::StrSplit(options, ',')) {
    if (absl::ConsumePrefix(&option, "huge=")) return std::string(option);
  }
  return "";
}

// Parses a line of /proc/self/mountinfo (proc(5)):
//   36 35 0:31 / /mnt rw,noatime shared:1 - tmpfs source rw,huge=always
// The number of fields before the dash varies.
void ParseMount(absl::string_view line, const std::string& device,
                TmpfsInfo* info) {
  const std::vector<absl::string_view> halves =
      absl::StrSplit(line, absl::MaxSplits(" - ", 1));
  if (halves.size() != 2) return;
  const std::vector<absl::string_view> fields = absl::StrSplit(halves[0], ' ');
  const std::vector<absl::string_view> tail = absl::StrSplit(halves[1], ' ');
  if (fields.size() < 5 || tail.size() < 3 || fields[2] != device) return;
  info->file_system = std::string(tail[0]);
  info->mount_point = std::string(fields[4]);
  info->huge_option = HugeOption(tail[2]);
}

bool IsEmpty(const std::string& directory) {
  std::error_code error;
  return std::filesystem::is_empty(directory, error) && !error;
}

}  // namespace

bool TmpfsInfo::huge_pages() const {
  if (is_hugetlbfs) return true;
  if (!is_tmpfs || shmem_enabled == "deny") return false;
  return shmem_enabled == "force" || huge_option == "always" ||
         huge_option == "within_size" || huge_option == "advise";
}

absl::StatusOr<TmpfsInfo> InspectDirectory(const std::string& directory) {
  struct stat directory_stat;
  if (::stat(directory.c_str(), &directory_stat) != 0) {
    return OsError(errno, absl::StrCat("stat ", directory));
  }
  struct statfs kind;
  if (::statfs(directory.c_str(), &kind) != 0) {
    return OsError(errno, absl::StrCat("statfs ", directory));
  }
  struct statvfs space;
  if (::statvfs(directory.c_str(), &space) != 0) {
    return OsError(errno, absl::StrCat("statvfs ", directory));
  }
  TmpfsInfo info;
  info.is_tmpfs = kind.f_type == TMPFS_MAGIC;
  info.is_hugetlbfs = kind.f_type == HUGETLBFS_MAGIC;
  info.bytes_total = uint64_t{space.f_blocks} * space.f_frsize;
  info.bytes_left = uint64_t{space.f_bavail} * space.f_frsize;
  info.files_left = space.f_files == 0 ? UINT64_MAX : uint64_t{space.f_favail};
  info.shmem_enabled = SelectedWord(kShmemEnabled);
  const std::string device = absl::StrCat(major(directory_stat.st_dev), ":",
                                          minor(directory_stat.st_dev));
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    ParseMount(line, device, &info);
  }
  return info;
}

absl::Status CheckNotFull(const std::string& directory) {
  // The limits are those of a new job, and a bit more than its small files
  // take.
  constexpr uint64_t kFiles = 24;
  constexpr uint64_t kBytes = 64 << 10;
  const absl::StatusOr<TmpfsInfo> info = InspectDirectory(directory);
  if (!info.ok()) return absl::OkStatus();
  const std::string where =
      absl::StrCat(info->file_system, " on ", info->mount_point);
  if (info->files_left < kFiles) {
    return absl::ResourceExhaustedError(absl::StrCat(
        where, " is out of inodes (", info->files_left,
        " left, however many bytes there are): delete a job or other files "
        "there, or remount it with a larger nr_inodes="));
  }
  if (info->bytes_left < kBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        where, " is full (", info->bytes_left,
        " bytes left): delete a job or other files there, or remount it with a "
        "larger size="));
  }
  return absl::OkStatus();
}

absl::Status ExplainFull(const absl::Status& status,
                         const std::string& directory) {
  if (!absl::IsResourceExhausted(status) ||
      io::HasRoomAdvice(status.message())) {
    return status;
  }
  const absl::Status full = CheckNotFull(directory);
  if (full.ok()) return status;
  return absl::ResourceExhaustedError(
      absl::StrCat(status.message(), ": ", full.message()));
}

std::string DescribePages(const TmpfsInfo& info) {
  if (info.is_hugetlbfs) return "huge pages (hugetlbfs)";
  if (!info.is_tmpfs) {
    return absl::StrCat(
        "page cache of ",
        info.file_system.empty() ? "a disk" : info.file_system,
        ": slower than a tmpfs, and no promise against a power cut "
        "either");
  }
  if (info.shmem_enabled == "deny") {
    return absl::StrCat("4 KiB pages: ", kShmemEnabled, " is deny");
  }
  if (info.huge_pages()) {
    return info.shmem_enabled == "force"
               ? absl::StrCat("huge pages (", kShmemEnabled, " is force)")
               : absl::StrCat(
                     "huge pages where they can be had (tmpfs with "
                     "huge=",
                     info.huge_option, ")");
  }
  return absl::StrCat(
      "4 KiB pages: the tmpfs on ", info.mount_point,
      info.huge_option.empty() ? " has no huge= option"
                               : absl::StrCat(" has huge=", info.huge_option),
      "; huge_pages: mount in the configuration (as root) gives huge ones");
}

absl::Status MountHugeTmpfs(const std::string& directory) {
  OPTSTATE_ASSIGN_OR_RETURN(const TmpfsInfo info, InspectDirectory(directory));
  // The path is made as the kernel tells it, without symbolic links and double
  // slashes.
  std::error_code ignored;
  const std::string canonical = std::filesystem::canonical(directory, ignored);
  if (info.is_tmpfs && info.huge_pages() && info.mount_point == canonical) {
    return absl::OkStatus();
  }
  if (!IsEmpty(directory)) {
    return absl::FailedPreconditionError(absl::StrCat(
        directory,
        " is not empty: mounting a tmpfs on it would hide the jobs in it; "
        "delete them or choose another state_dir"));
  }
  // Half of the memory, the kernel's default, is too little for a machine whose
  // purpose is optimizer state; admission guards the rest.
  if (::mount("optstate", directory.c_str(), "tmpfs",
              MS_NOSUID | MS_NODEV | MS_NOEXEC,
              "huge=within_size,mode=0700,size=100%") != 0) {
    return OsError(errno, absl::StrCat("mount tmpfs with huge=within_size on ",
                                       directory));
  }
  return absl::OkStatus();
}

}  // namespace optstate::storage
