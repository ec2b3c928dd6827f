#include "storage/io/file_error.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <iterator>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/os_error.h"

namespace optstate::io {
namespace {

constexpr char kFailing[] =
    "look for the drive in the kernel's log (dmesg -T) and in its own "
    "(smartctl -a); a job that runs, or that optctl recover NAME has running "
    "again, is moved to the other directories by optctl set job NAME "
    "directory_weights=, with 0 for this one, if its records can be read";
constexpr char kGone[] =
    "look for it (lsblk, dmesg -T), and mount it again at the same place";
constexpr char kMoreRoom[] =
    "optctl describe tier and optctl get users show what jobs take there; "
    "optctl delete job NAME frees it, and optctl set job NAME "
    "directory_weights=, with 0 for this directory, moves a job to the others";
constexpr char kLetIn[] =
    "namei -l shows what is in the way: change it (chown, chmod), or start "
    "optstated as the owner";

// By number.
constexpr FileFault kFaults[] = {
    {EPERM, "EPERM", "the operation is not permitted",
     "look for attributes of the file (lsattr) and for refusals in the "
     "kernel's log (dmesg -T), or start optstated as the owner"},
    {EIO, "EIO", "the disk has failed to do this", kFailing},
    {ENXIO, "ENXIO", "the device is gone", kGone},
    {EACCES, "EACCES", "access is not permitted", kLetIn},
    {ENODEV, "ENODEV", "the device is gone", kGone},
    {ENFILE, "ENFILE",
     "the machine has as many files open as it may (fs.file-max)",
     "raise that (sysctl -w fs.file-max=), or end the process that has so many "
     "(lsof)"},
    {EMFILE, "EMFILE", "this process has as many files open as it may",
     "raise LimitNOFILE= of optstated's unit, or ulimit -n where it is "
     "started, and start it again"},
    {EFBIG, "EFBIG", "the file is larger than this file system or process may",
     "take another file system, or raise LimitFSIZE= of optstated's unit "
     "(ulimit -f)"},
    {ENOSPC, "ENOSPC", "the file system is full", kMoreRoom},
    {EROFS, "EROFS",
     "the file system is read-only: mounted so, or since the disk has failed",
     "look for the cause in the kernel's log (dmesg -T), check the file system "
     "(fsck), and mount it for writing (mount -o remount,rw)"},
    {ENODATA, "ENODATA", "the disk cannot read this any more", kFailing},
    {ENOLINK, "ENOLINK", "the link to the device is cut", kGone},
    {EBADMSG, "EBADMSG", "the file system has found a wrong checksum",
     kFailing},
    {EILSEQ, "EILSEQ", "the disk has found wrong protection information",
     kFailing},
    {ESHUTDOWN, "ESHUTDOWN",
     "the file system has shut itself down after an error",
     "look for the error in the kernel's log (dmesg -T), check the file system "
     "(fsck), and mount it again"},
    {ETIMEDOUT, "ETIMEDOUT", "the disk does not answer", kFailing},
    {EUCLEAN, "EUCLEAN", "the file system has found itself damaged",
     "look for the error in the kernel's log (dmesg -T), unmount the file "
     "system and check it (fsck, xfs_repair)"},
    {EREMOTEIO, "EREMOTEIO", "the device has failed to do this", kFailing},
    {EDQUOT, "EDQUOT", "a disk quota is used up", kMoreRoom},
};

struct Text {
  std::string what;
  std::string advice;
};

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string FullText(const FileSurroundings& surroundings) {
  const std::string file_system =
      absl::StrCat("the file system of ", FolderOf(surroundings.path));
  // A file system that makes inodes of free blocks has neither when it is full.
  const bool lacks_bytes = surroundings.bytes_left.has_value() &&
                           surroundings.bytes_needed > *surroundings.bytes_left;
  if (surroundings.files_left == uint64_t{0} && !lacks_bytes) {
    return absl::StrCat(file_system, " has no inodes left");
  }
  if (!surroundings.bytes_left.has_value()) {
    return absl::StrCat(file_system, " is full");
  }
  const uint64_t left = *surroundings.bytes_left;
  const uint64_t needed = surroundings.bytes_needed;
  return absl::StrCat(
      file_system, " has ", left, " bytes left",
      needed > left ? absl::StrCat(", ", needed - left, " too few") : "");
}

std::string OwnerText(const FileSurroundings& surroundings) {
  std::string process =
      absl::StrCat("this process runs as uid ", surroundings.uid);
  if (!surroundings.owner.has_value()) return process;
  const FileSurroundings::Owner& owner = *surroundings.owner;
  return absl::StrFormat("%s belongs to uid %d, gid %d (mode %04o), and %s",
                         owner.path, owner.uid, owner.gid, owner.mode, process);
}

Text TextOf(const FileFault& fault, const FileSurroundings& surroundings) {
  switch (fault.error) {
    case EPERM:
    case EACCES:
      return {OwnerText(surroundings), fault.advice};
    case EMFILE:
      if (!surroundings.open_files_max.has_value()) break;
      return {absl::StrCat(fault.what, ", ", *surroundings.open_files_max,
                           " files"),
              fault.advice};
    case ENOSPC:
      return {FullText(surroundings), fault.advice};
    case EROFS:
      return {fault.what,
              absl::StrCat(fault.advice, "; findmnt -T ",
                           FolderOf(surroundings.path), " says which it is")};
    case EDQUOT:
      return {absl::StrCat("a disk quota of uid ", surroundings.uid,
                           ", as which this process runs, of its group or of "
                           "the project of ",
                           FolderOf(surroundings.path), " is used up"),
              absl::StrCat("repquota -a lists them, setquota and xfs_quota "
                           "raise them; ",
                           fault.advice)};
    default:
      break;
  }
  return {fault.what, fault.advice};
}

void LookForRoom(FileSurroundings* surroundings) {
  struct statvfs info;
  if (::statvfs(surroundings->path.c_str(), &info) != 0 &&
      ::statvfs(FolderOf(surroundings->path).c_str(), &info) != 0) {
    return;
  }
  // Some file systems do not say.
  if (info.f_blocks != 0) {
    surroundings->bytes_left = uint64_t{info.f_bavail} * info.f_frsize;
  }
  if (info.f_files != 0) surroundings->files_left = info.f_favail;
}

void LookForOwner(FileSurroundings* surroundings) {
  for (const std::string& path :
       {surroundings->path, FolderOf(surroundings->path)}) {
    struct stat info;
    if (::stat(path.c_str(), &info) != 0) continue;
    surroundings->owner = {.path = path,
                           .uid = info.st_uid,
                           .gid = info.st_gid,
                           .mode = info.st_mode & 07777};
    return;
  }
}

}  // namespace

absl::Span<const FileFault> FileFaults() { return kFaults; }

FileSurroundings LookAround(int error, const std::string& path,
                            uint64_t bytes_needed) {
  FileSurroundings surroundings = {.path = path,
                                   .bytes_needed = bytes_needed,
                                   .bytes_left = std::nullopt,
                                   .files_left = std::nullopt,
                                   .owner = std::nullopt,
                                   .uid = ::geteuid(),
                                   .open_files_max = std::nullopt};
  if (error == ENOSPC) LookForRoom(&surroundings);
  if (error == EPERM || error == EACCES) LookForOwner(&surroundings);
  struct rlimit limit;
  if (error == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    surroundings.open_files_max = limit.rlim_cur;
  }
  return surroundings;
}

std::string FileAdvice(int error, const FileSurroundings& surroundings) {
  const auto known = absl::c_find_if(
      kFaults, [error](const FileFault& each) { return each.error == error; });
  if (known == std::end(kFaults)) return "";
  const Text text = TextOf(*known, surroundings);
  return absl::StrCat(": ", text.what, "; ", text.advice);
}

bool HasRoomAdvice(absl::string_view message) {
  return absl::StrContains(message, kMoreRoom);
}

absl::Status FileError(int error, absl::string_view call,
                       const std::string& path, uint64_t bytes_needed) {
  const absl::Status status = OsError(error, call);
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(),
                   FileAdvice(error, LookAround(error, path, bytes_needed))));
}

}  // namespace optstate::io
