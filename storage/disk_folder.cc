#include "storage/disk_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "storage/format/sealed_text.h"
#include "storage/io/file_error.h"
#include "storage/state_folder.h"

namespace optstate::storage {
namespace {

constexpr char kBootIdPath[] = "/proc/sys/kernel/random/boot_id";
constexpr size_t kTextBytesMax = 8192;  // a path and some

// Says what to do about a damaged file.
constexpr char kOwnerRemedy[] = "write the uid of the job's owner to it";
constexpr char kIdentityRemedy[] =
    "if the right disk is mounted there, remove the file: the job's next "
    "engine writes it anew";
constexpr char kExtentRemedy[] =
    "no other file says where on the device the job's records are: put right "
    "what is wrong in its lines, without the white space behind them, or "
    "delete the job";

absl::Status IsNot(const std::string& path, absl::string_view what,
                   absl::string_view remedy) {
  return absl::DataLossError(
      absl::StrCat(path, " holds no ", what, ": ", remedy));
}

// Reads a text that has a seal, unless a former build or a person wrote it.
absl::StatusOr<std::string> ReadSealed(const std::string& path,
                                       absl::string_view remedy) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::string text, ReadDiskText(path));
  const absl::StatusOr<absl::string_view> unsealed = UnsealText(text);
  if (unsealed.ok()) return std::string(*unsealed);
  return absl::DataLossError(absl::StrCat(
      path, " is damaged: ", unsealed.status().message(), ", \"",
      absl::CHexEscape(absl::StripAsciiWhitespace(text)), "\": ", remedy));
}

bool IsLocked(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.ok()) return errno != ENOENT && errno != ENOTDIR;
  return ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0;
}

// An engine, and the writes of one that was killed, have the extent locked.
bool IsLocked(const std::string& device, const io::Extent& extent) {
  const UniqueFd fd(::open(device.c_str(), O_RDWR | O_CLOEXEC));
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(extent.begin_bytes);
  lock.l_len = static_cast<off_t>(extent.bytes);
  return !fd.ok() || ::fcntl(fd.get(), F_OFD_GETLK, &lock) != 0 ||
         lock.l_type != F_UNLCK;
}

// Returns whether an engine may have the folder's records.
bool AreRecordsLocked(const std::string& folder, const std::string& device) {
  for (const uint32_t arrangement : {0, 1}) {
    if (IsLocked(folder +
                 (arrangement == 0 ? kDiskRecordsFile : kDiskOddRecordsFile))) {
      return true;
    }
    const auto extent = ReadDiskExtent(folder, arrangement);
    if (!extent.ok()) return true;
    if (extent->has_value() && IsLocked(device, (*extent)->extent)) return true;
  }
  return false;
}

std::string ParentOf(const std::string& path) {
  return path.substr(0, path.rfind('/'));
}

}  // namespace

std::string DiskFolder(absl::string_view directory, absl::string_view job) {
  return absl::StrCat(directory, kDiskJobsFolder, "/", job);
}

bool MayExist(const std::string& path) {
  return ::access(path.c_str(), F_OK) == 0 ||
         (errno != ENOENT && errno != ENOTDIR);
}

absl::StatusOr<std::string> ReadBootId() { return ReadDiskText(kBootIdPath); }

absl::StatusOr<std::string> ReadDiskText(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.ok()) {
    const bool is_gone = errno == ENOENT || errno == ENOTDIR;
    const absl::Status status =
        io::FileError(errno, absl::StrCat("open ", path), path);
    return is_gone ? absl::NotFoundError(status.message()) : status;
  }
  std::string text(kTextBytesMax, '\0');
  const ssize_t bytes = ::read(fd.get(), text.data(), text.size());
  if (bytes < 0) {
    return io::FileError(errno, absl::StrCat("read ", path), path);
  }
  text.resize(static_cast<size_t>(bytes));
  return text;
}

bool HasRecords(const std::string& folder) {
  return MayExist(folder + kDiskRecordsFile) ||
         MayExist(folder + kDiskOddRecordsFile) ||
         MayExist(folder + kDiskExtentFile) ||
         MayExist(folder + kDiskOddExtentFile);
}

bool IsDurableFolder(const std::string& folder) {
  return MayExist(folder + kDiskDurableFile) ||
         MayExist(folder + kDiskCommitsFile);
}

absl::StatusOr<std::optional<uint32_t>> ReadDiskOwner(
    const std::string& folder) {
  const std::string path = folder + kDiskOwnerFile;
  const absl::StatusOr<std::string> text = ReadSealed(path, kOwnerRemedy);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  OPTSTATE_RETURN_IF_ERROR(text.status());
  uint32_t owner = 0;
  if (absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &owner)) return owner;
  return IsNot(path, "uid", kOwnerRemedy);
}

absl::StatusOr<std::optional<DiskIdentity>> ReadDiskIdentity(
    const std::string& folder) {
  const std::string path = folder + kDiskIdentityFile;
  const absl::StatusOr<std::string> text = ReadSealed(path, kIdentityRemedy);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  OPTSTATE_RETURN_IF_ERROR(text.status());
  const std::vector<absl::string_view> words =
      absl::StrSplit(*text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  DiskIdentity identity;
  uint32_t number = 0;
  if (words.size() != 6 || words[0] != "incarnation" ||
      !absl::SimpleHexAtoi(words[1], &identity.incarnation) ||
      words[2] != "directory" || !absl::SimpleAtoi(words[3], &number) ||
      words[4] != "of" || !absl::SimpleAtoi(words[5], &identity.count) ||
      number == 0 || number > identity.count) {
    return IsNot(path, "\"incarnation X directory i of n\"", kIdentityRemedy);
  }
  identity.index = number - 1;
  return identity;
}

absl::Status WriteDiskIdentity(const std::string& folder,
                               const DiskIdentity& identity) {
  return WriteDurably(
      folder + kDiskIdentityFile,
      SealText(absl::StrCat(
          "incarnation ", absl::Hex(identity.incarnation, absl::kZeroPad16),
          "\ndirectory ", identity.index + 1, " of ", identity.count, "\n")));
}

std::string DiskExtentPath(const std::string& folder, uint32_t arrangement) {
  return folder + (arrangement % 2 == 0 ? kDiskExtentFile : kDiskOddExtentFile);
}

absl::Status RemoveDiskExtent(const std::string& folder, uint32_t arrangement) {
  const std::string path = DiskExtentPath(folder, arrangement);
  if (::unlink(path.c_str()) == 0) return SyncFolder(folder);
  if (errno == ENOENT) return absl::OkStatus();
  return io::FileError(errno, absl::StrCat("unlink ", path), path);
}

absl::StatusOr<std::optional<DiskExtent>> ReadDiskExtent(
    const std::string& folder, uint32_t arrangement) {
  const std::string path = DiskExtentPath(folder, arrangement);
  const absl::StatusOr<std::string> text = ReadSealed(path, kExtentRemedy);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  OPTSTATE_RETURN_IF_ERROR(text.status());
  const std::vector<std::string> words =
      absl::StrSplit(*text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  DiskExtent found;
  uint64_t& begin = found.extent.begin_bytes;
  uint64_t& bytes = found.extent.bytes;
  if (words.size() != 6 || words[0] != "device" || words[2] != "begin" ||
      !absl::SimpleAtoi(words[3], &begin) || words[4] != "bytes" ||
      !absl::SimpleAtoi(words[5], &bytes) || bytes == 0 ||
      begin % io::kSectorBytes != 0 || bytes % io::kSectorBytes != 0 ||
      begin + bytes < begin) {
    return IsNot(path, "\"device X begin B bytes N\"", kExtentRemedy);
  }
  found.device_id = words[1];
  return found;
}

absl::Status WriteDiskExtent(const std::string& folder,
                             const DiskExtent& extent, uint32_t arrangement) {
  return WriteDurably(
      DiskExtentPath(folder, arrangement),
      SealText(absl::StrCat("device ", extent.device_id, "\nbegin ",
                            extent.extent.begin_bytes, "\nbytes ",
                            extent.extent.bytes, "\n")));
}

absl::Status WriteDiskMemory(const std::string& folder,
                             absl::string_view job_directory) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::string boot, ReadBootId());
  return WriteDurably(folder + kDiskMemoryFile,
                      absl::StrCat(boot, job_directory, "\n"));
}

bool IsDiskFolderInUse(const std::string& folder, absl::string_view except,
                       const std::string& device) {
  if (AreRecordsLocked(folder, device)) return true;
  const absl::StatusOr<std::string> text =
      ReadDiskText(folder + kDiskMemoryFile);
  if (absl::IsNotFound(text.status())) return false;
  const absl::StatusOr<std::string> boot = ReadBootId();
  if (!text.ok() || !boot.ok()) return true;
  const std::vector<std::string> lines = absl::StrSplit(*text, '\n');
  if (lines.size() < 2) return true;
  if (lines[1] == except) return false;
  // The files of a state directory that is not mounted just now are in the
  // memory of this boot all the same.
  return absl::StripAsciiWhitespace(*boot) == lines[0] ||
         MayExist(lines[1] + kStateFolder);
}

absl::Status WriteDurably(const std::string& path, absl::string_view text) {
  const std::string unfinished = path + ".new";
  const UniqueFd fd(::open(unfinished.c_str(),
                           O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!fd.ok()) {
    return io::FileError(errno, absl::StrCat("create ", unfinished), unfinished,
                         text.size());
  }
  const ssize_t written = ::write(fd.get(), text.data(), text.size());
  const bool is_short =
      written >= 0 && written < static_cast<ssize_t>(text.size());
  if (written < 0 || is_short || ::fsync(fd.get()) != 0) {
    // The call that is short has no errno; the next one would have it.
    return io::FileError(is_short ? ENOSPC : errno,
                         absl::StrCat("write ", unfinished), unfinished,
                         text.size());
  }
  if (::rename(unfinished.c_str(), path.c_str()) != 0) {
    return io::FileError(errno, absl::StrCat("rename to ", path), path);
  }
  return SyncFolder(ParentOf(path));
}

absl::Status SyncFolder(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.ok()) return io::FileError(errno, absl::StrCat("open ", path), path);
  if (::fsync(fd.get()) == 0) return absl::OkStatus();
  return io::FileError(errno, absl::StrCat("fsync ", path), path);
}

absl::Status MakeFolder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0) return SyncFolder(ParentOf(path));
  if (errno == EEXIST) return absl::OkStatus();
  return io::FileError(errno, absl::StrCat("mkdir ", path), path);
}

}  // namespace optstate::storage
