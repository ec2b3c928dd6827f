#include "storage/state_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::storage {
namespace {

uint64_t SumOf(absl::Span<const ByteRange> ranges) {
  uint64_t sum = 0;
  for (const ByteRange& range : ranges) sum += range.end - range.begin;
  return sum;
}

// Reserves a range. Where the file system has no fallocate, glibc touches every
// block, keeping what is there.
absl::Status ReserveRange(int fd, ByteRange range) {
  if (range.begin == range.end) return absl::OkStatus();
  int error;
  do {
    error = ::posix_fallocate(fd, static_cast<off_t>(range.begin),
                              static_cast<off_t>(range.end - range.begin));
  } while (error == EINTR);
  if (error == 0) return absl::OkStatus();
  return OsError(
      error, absl::StrCat("fallocate of ", range.end - range.begin, " bytes"));
}

absl::StatusOr<uint64_t> SizeOf(int fd, uint64_t* allocated_bytes) {
  struct stat file_stat;
  if (::fstat(fd, &file_stat) != 0) return OsError(errno, "fstat");
  *allocated_bytes = static_cast<uint64_t>(file_stat.st_blocks) * 512;
  return static_cast<uint64_t>(file_stat.st_size);
}

absl::Status Truncate(int fd, uint64_t bytes) {
  if (::ftruncate(fd, static_cast<off_t>(bytes)) == 0) return absl::OkStatus();
  return OsError(errno, absl::StrCat("ftruncate to ", bytes, " bytes"));
}

}  // namespace

StateFile::StateFile(std::string path, UniqueFd fd)
    : path_(std::move(path)), fd_(std::move(fd)) {}

uint64_t StateFile::reserved_bytes() const { return SumOf(reserved_); }

absl::Status StateFile::Reserve(absl::Span<const ByteRange> ranges) {
  for (const ByteRange& range : ranges) {
    OPTSTATE_RETURN_IF_ERROR(Annotate(ReserveRange(fd_.get(), range), path_));
  }
  return absl::OkStatus();
}

absl::Status StateFile::Map(uint64_t bytes) {
  absl::StatusOr<MemoryRegion> region =
      MemoryRegion::MapShared(fd_.get(), bytes);
  if (!region.ok()) return Annotate(region.status(), path_);
  region_ = *std::move(region);
  return absl::OkStatus();
}

absl::StatusOr<StateFile> StateFile::Create(
    std::string path, uint64_t bytes, absl::Span<const ByteRange> reserved) {
  UniqueFd fd(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  StateFile file(std::move(path), std::move(fd));
  OPTSTATE_RETURN_IF_ERROR(Annotate(Truncate(file.fd(), bytes), file.path()));
  OPTSTATE_RETURN_IF_ERROR(file.Reserve(reserved));
  OPTSTATE_RETURN_IF_ERROR(file.Map(bytes));
  file.reserved_.assign(reserved.begin(), reserved.end());
  return file;
}

absl::StatusOr<StateFile> StateFile::Open(
    std::string path, uint64_t bytes, absl::Span<const ByteRange> reserved) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.ok() && errno == ENOENT) {
    return absl::DataLossError(absl::StrCat(path, " is missing"));
  }
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  StateFile file(std::move(path), std::move(fd));
  uint64_t allocated_bytes = 0;
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t size,
                            SizeOf(file.fd(), &allocated_bytes));
  if (size < bytes) {
    return absl::DataLossError(absl::StrCat(
        file.path(), " has ", size, " bytes, the layout needs ", bytes));
  }
  if (size > bytes) {
    OPTSTATE_RETURN_IF_ERROR(Annotate(Truncate(file.fd(), bytes), file.path()));
  }
  // Blocks are missing when the file was copied sparsely. Asking costs a walk
  // over all pages, so only then.
  if (allocated_bytes < SumOf(reserved)) {
    OPTSTATE_RETURN_IF_ERROR(file.Reserve(reserved));
  }
  OPTSTATE_RETURN_IF_ERROR(file.Map(bytes));
  file.reserved_.assign(reserved.begin(), reserved.end());
  return file;
}

absl::Status StateFile::Resize(uint64_t bytes,
                               absl::Span<const ByteRange> reserved) {
  const uint64_t size_before = size();
  absl::Status status;
  if (bytes >= size_before) {
    status = Annotate(Truncate(fd(), bytes), path_);
    if (status.ok()) status = Reserve(reserved);
  }
  if (status.ok()) status = Map(bytes);
  if (!status.ok()) {
    // This frees what was reserved; if even that fails, Open cuts the file.
    Truncate(fd(), size_before).IgnoreError();
    return status;
  }
  reserved_.assign(reserved.begin(), reserved.end());
  if (bytes < size_before) return Annotate(Truncate(fd(), bytes), path_);
  return absl::OkStatus();
}

absl::Status StateFile::ReserveAhead(uint64_t end) const {
  const absl::Status reserved = ReserveRange(fd(), {size(), end});
  if (reserved.ok()) return reserved;
  Truncate(fd(), size()).IgnoreError();  // frees what was reserved
  return Annotate(reserved, path_);
}

void StateFile::LockMemory(MemoryLocker* locker) {
  if (region_.is_locked()) return;
  for (const ByteRange& range : reserved_) {
    if (range.begin != range.end) {
      region_.Lock(range.begin, range.end, locker);
    }
  }
}

absl::Status StateFile::ReserveTo(uint64_t end) {
  const uint64_t begin = reserved_bytes();
  if (end <= begin) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(Annotate(ReserveRange(fd(), {begin, end}), path_));
  reserved_ = {{0, end}};
  return absl::OkStatus();
}

}  // namespace optstate::storage
