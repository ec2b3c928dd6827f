#include "storage/io/disk_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "storage/io/disk_bytes.h"
#include "storage/io/file_error.h"
#include "storage/io/request_rules.h"

namespace optstate::io {
namespace {

constexpr absl::Duration kLockPeriod = absl::Milliseconds(5);
constexpr uint64_t kZerosBytes = uint64_t{1} << 20;

// Calls again while a signal interrupts.
template <typename Call>
int Retry(const Call& call) {
  int result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Makes the names in a file's folder durable.
absl::Status SyncFolderOf(const std::string& path) {
  const std::string folder = FolderOf(path);
  const UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.ok()) return FileError(errno, absl::StrCat("open ", folder), folder);
  if (::fsync(fd.get()) == 0) return absl::OkStatus();
  return IoError(errno, absl::StrCat("fsync of ", folder), folder);
}

absl::Status WriteZeros(int fd, const std::string& path, uint64_t bytes) {
  const std::vector<char> zeros(std::min(bytes, kZerosBytes));
  uint64_t done = 0;
  while (done < bytes) {
    const size_t size = std::min<uint64_t>(bytes - done, zeros.size());
    const ssize_t result =
        ::pwrite(fd, zeros.data(), size, static_cast<off_t>(done));
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) {
      return IoError(errno, absl::StrCat("write of zeros to ", path), path,
                     bytes - done);
    }
    done += static_cast<uint64_t>(result);
  }
  return absl::OkStatus();
}

// Gives an empty file all of its blocks.
absl::Status Reserve(int fd, const std::string& path, uint64_t bytes) {
  // Without this look, a file that is too large would for a moment take all the
  // space there is, also from others.
  const FileSurroundings around = LookAround(ENOSPC, path, bytes);
  if (around.bytes_left.has_value() && *around.bytes_left < bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        path, " needs ", bytes, " bytes", FileAdvice(ENOSPC, around)));
  }
  if (bytes == 0) return absl::OkStatus();
  if (Retry([&] { return ::fallocate(fd, 0, 0, static_cast<off_t>(bytes)); }) ==
      0) {
    return absl::OkStatus();
  }
  if (errno == EOPNOTSUPP) return WriteZeros(fd, path, bytes);
  return IoError(errno,
                 absl::StrCat("fallocate of ", bytes, " bytes for ", path),
                 path, bytes);
}

absl::Status MakeDurable(int fd, const std::string& path) {
  if (::fsync(fd) != 0) {
    return IoError(errno, absl::StrCat("fsync of ", path), path);
  }
  return SyncFolderOf(path);
}

// Locks or unlocks an extent. The lock belongs to the opening, as that of
// flock(): it lasts until the last request of a killed process is over.
int LockExtent(const DiskFile& file, int16_t type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(file.range.begin_bytes);
  lock.l_len = static_cast<off_t>(file.range.bytes);
  return ::fcntl(file.fd.get(), F_OFD_SETLK, &lock);
}

int TryLock(const DiskFile& file) {
  return file.is_extent ? LockExtent(file, F_WRLCK)
                        : ::flock(file.fd.get(), LOCK_EX | LOCK_NB);
}

// Ends the lock of a file that no request names. Without it the lock would last
// as long as any descriptor of this opening, and the ring of io_uring lets go
// of its own some time later.
void Unlock(const DiskFile& file) {
  if (file.is_extent) {
    LockExtent(file, F_UNLCK);
  } else {
    ::flock(file.fd.get(), LOCK_UN);
  }
}

std::string NameOf(const DiskFile& file) {
  if (!file.is_extent) return file.path;
  return absl::StrCat(file.path, ", bytes ", file.range.begin_bytes, " to ",
                      file.range.end_bytes(), ",");
}

}  // namespace

DiskFiles::DiskFiles(absl::Duration lock_wait,
                     std::function<void(const std::string&)> log)
    : lock_wait_(lock_wait), log_(std::move(log)) {}

DiskFiles::~DiskFiles() {
  const absl::MutexLock lock(&mutex_);
  for (const auto& file : files_) {
    if (file != nullptr) Unlock(*file);
  }
}

const DiskFile& DiskFiles::Get(FileId file) const {
  const absl::MutexLock lock(&mutex_);
  CheckOrDie(file.index >= 0 &&
                 static_cast<size_t>(file.index) < files_.size() &&
                 files_[file.index] != nullptr,
             "a file is not open");
  return *files_[file.index];
}

FileId DiskFiles::Insert(std::unique_ptr<DiskFile> file) {
  const absl::MutexLock lock(&mutex_);
  const auto place = std::find(files_.begin(), files_.end(), nullptr);
  const FileId id{static_cast<int>(place - files_.begin())};
  if (place == files_.end()) {
    files_.push_back(std::move(file));
  } else {
    *place = std::move(file);
  }
  return id;
}

absl::Status DiskFiles::Lock(const DiskFile& file) const {
  const absl::Time deadline = absl::Now() + lock_wait_;
  while (Retry([&] { return TryLock(file); }) != 0) {
    if (errno != EWOULDBLOCK && errno != EACCES) {
      return FileError(errno, absl::StrCat("lock of ", file.path), file.path);
    }
    if (absl::Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat(NameOf(file), " is locked by another process, after ",
                       absl::FormatDuration(lock_wait_)));
    }
    // A blocking flock() has no time limit.
    absl::SleepFor(kLockPeriod);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DiskFile>> DiskFiles::Create(
    const std::string& path, uint64_t bytes) const {
  // O_DIRECT comes later: a file system that lacks it would create the file all
  // the same.
  UniqueFd fd(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.ok()) return IoError(errno, absl::StrCat("open ", path), path);
  auto file = std::make_unique<DiskFile>(
      DiskFile{.fd = std::move(fd), .path = path, .range = {0, bytes}});
  absl::Status status = Lock(*file);
  if (status.ok()) status = Reserve(file->fd.get(), path, bytes);
  if (status.ok()) status = MakeDurable(file->fd.get(), path);
  if (status.ok()) return file;
  ::unlink(path.c_str());
  return status;
}

absl::StatusOr<std::unique_ptr<DiskFile>> DiskFiles::OpenExisting(
    const std::string& path, uint64_t bytes) const {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.ok()) return IoError(errno, absl::StrCat("open ", path), path);
  auto file = std::make_unique<DiskFile>(
      DiskFile{.fd = std::move(fd), .path = path, .range = {}});
  OPTSTATE_RETURN_IF_ERROR(Lock(*file));
  struct stat info;
  if (::fstat(file->fd.get(), &info) != 0) {
    return IoError(errno, absl::StrCat("fstat of ", path), path);
  }
  // The process that had the lock may have removed the file.
  if (info.st_nlink == 0) {
    return absl::NotFoundError(absl::StrCat(path, " was removed"));
  }
  file->range.bytes = static_cast<uint64_t>(info.st_size);
  if (file->range.bytes < bytes) {
    return absl::DataLossError(absl::StrCat(path, " has ", file->range.bytes,
                                            " bytes, expected ", bytes));
  }
  return file;
}

absl::Status DiskFiles::BypassPageCache(const DiskFile& file) {
  const int flags = ::fcntl(file.fd.get(), F_GETFL);
  if (flags >= 0 && ::fcntl(file.fd.get(), F_SETFL, flags | O_DIRECT) == 0) {
    return absl::OkStatus();
  }
  if (errno != EINVAL) {
    return FileError(errno, absl::StrCat("fcntl of ", file.path), file.path);
  }
  if (log_) {
    log_(
        absl::StrCat("reads and writes go through the page cache: the file "
                     "system of ",
                     file.path, " has no O_DIRECT"));
    log_ = nullptr;
  }
  return absl::OkStatus();
}

absl::StatusOr<FileId> DiskFiles::Open(const std::string& path, uint64_t bytes,
                                       IoEngine::OpenMode mode) {
  const bool create = mode == IoEngine::OpenMode::kCreate;
  CheckOrDie(!create || bytes % kSectorBytes == 0,
             "a file's size is not a multiple of kSectorBytes");
  OPTSTATE_ASSIGN_OR_RETURN(
      std::unique_ptr<DiskFile> file,
      create ? Create(path, bytes) : OpenExisting(path, bytes));
  const absl::Status status = BypassPageCache(*file);
  if (!status.ok()) {
    if (create) ::unlink(path.c_str());
    return status;
  }
  return Insert(std::move(file));
}

absl::StatusOr<FileId> DiskFiles::OpenExtent(const std::string& device,
                                             const Extent& extent) {
  CheckOrDie(extent.bytes > 0 && extent.bytes % kSectorBytes == 0 &&
                 extent.begin_bytes % kSectorBytes == 0,
             "an extent is not whole sectors");
  UniqueFd fd(::open(device.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.ok()) return IoError(errno, absl::StrCat("open ", device), device);
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t bytes, DiskBytes(fd.get(), device));
  if (bytes < extent.end_bytes()) {
    return absl::DataLossError(
        absl::StrCat(device, " has ", bytes, " bytes, and an extent from ",
                     extent.begin_bytes, " to ", extent.end_bytes()));
  }
  auto file = std::make_unique<DiskFile>(DiskFile{
      .fd = std::move(fd), .path = device, .range = extent, .is_extent = true});
  OPTSTATE_RETURN_IF_ERROR(Lock(*file));
  OPTSTATE_RETURN_IF_ERROR(BypassPageCache(*file));
  return Insert(std::move(file));
}

void DiskFiles::Close(FileId file) {
  Unlock(Get(file));
  const absl::MutexLock lock(&mutex_);
  files_[file.index] = nullptr;
}

absl::Status DiskFiles::Remove(const std::string& path) {
  if (::unlink(path.c_str()) != 0) {
    return IoError(errno, absl::StrCat("unlink of ", path), path);
  }
  return SyncFolderOf(path);
}

absl::Status DiskFiles::Rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    return IoError(errno, absl::StrCat("rename of ", from, " to ", to), to);
  }
  return SyncFolderOf(to);
}

}  // namespace optstate::io
