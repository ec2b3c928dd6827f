#include "server/supervisor/sleep/file_copier.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "storage/format/checksum.h"

namespace optstate::supervisor {
namespace {

// Bytes of one read and write, and of the cancellation's delay.
constexpr uint64_t kChunkBytes = uint64_t{4} << 20;
// Bytes whose pages are being written to the disk while others are copied; so
// few of the copy's pages are in memory, and the sync at the end is short.
constexpr uint64_t kWindowBytes = uint64_t{32} << 20;

absl::StatusOr<UniqueFd> Open(const std::string& path, int flags,
                              mode_t mode = 0) {
  UniqueFd fd(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  return fd;
}

absl::Status ReadAll(int fd, std::byte* to, uint64_t begin, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t count = ::pread(fd, to, bytes, static_cast<off_t>(begin));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return OsError(errno, "read");
    if (count == 0) {
      return absl::DataLossError(absl::StrCat("it ends at byte ", begin));
    }
    to += count;
    begin += static_cast<uint64_t>(count);
    bytes -= static_cast<uint64_t>(count);
  }
  return absl::OkStatus();
}

absl::Status WriteAll(int fd, const std::byte* from, uint64_t begin,
                      uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t count = ::pwrite(fd, from, bytes, static_cast<off_t>(begin));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return OsError(errno, "write");
    from += count;
    begin += static_cast<uint64_t>(count);
    bytes -= static_cast<uint64_t>(count);
  }
  return absl::OkStatus();
}

// Keeps the pages of a file on a disk from staying in memory.
class Window {
 public:
  // `is_written`: the pages are written to the disk first.
  Window(int fd, bool is_written) : fd_(fd), is_written_(is_written) {}
  ~Window() { DropUntil(end_); }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  void Advance(uint64_t end) {
    end_ = end;
    if (end_ < begin_ + kWindowBytes) return;
    // Errors are those of the sync at the end.
    if (is_written_) Sync(begin_, end_, SYNC_FILE_RANGE_WRITE);
    DropUntil(begin_);
    begin_ = end_;
  }

 private:
  void Sync(uint64_t begin, uint64_t end, unsigned flags) const {
    (void)::sync_file_range(fd_, static_cast<off_t>(begin),
                            static_cast<off_t>(end - begin), flags);
  }
  void DropUntil(uint64_t end) {
    if (end == dropped_) return;
    if (is_written_) {
      Sync(dropped_, end,
           SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
               SYNC_FILE_RANGE_WAIT_AFTER);
    }
    (void)::posix_fadvise(fd_, static_cast<off_t>(dropped_),
                          static_cast<off_t>(end - dropped_),
                          POSIX_FADV_DONTNEED);
    dropped_ = end;
  }

  const int fd_;
  const bool is_written_;
  uint64_t dropped_ = 0;
  uint64_t begin_ = 0;  // of what is not being written yet
  uint64_t end_ = 0;
};

// Copies the parts with data, and returns their checksum.
absl::StatusOr<uint32_t> CopyData(int from, int to, const v1::SleepFile& file,
                                  Window* window, CopyControl* control) {
  const auto buffer = std::make_unique_for_overwrite<std::byte[]>(
      std::min(kChunkBytes, std::max<uint64_t>(DataBytes(file), 1)));
  uint32_t crc = 0;
  for (const v1::SleepExtent& extent : file.extents()) {
    const uint64_t end = extent.begin() + extent.bytes();
    for (uint64_t at = extent.begin(); at < end;) {
      OPTSTATE_RETURN_IF_ERROR(control->CheckGoesOn());
      const uint64_t bytes = std::min(kChunkBytes, end - at);
      OPTSTATE_RETURN_IF_ERROR(ReadAll(from, buffer.get(), at, bytes));
      crc = storage::ExtendCrc32c(crc, buffer.get(), bytes);
      OPTSTATE_RETURN_IF_ERROR(WriteAll(to, buffer.get(), at, bytes));
      at += bytes;
      control->bytes += bytes;
      window->Advance(at);
    }
  }
  return crc;
}

absl::Status SetSize(int fd, uint64_t size) {
  if (::ftruncate(fd, static_cast<off_t>(size)) == 0) return absl::OkStatus();
  return OsError(errno, absl::StrCat("ftruncate to ", size, " bytes"));
}

absl::Status Reserve(int fd, uint64_t begin, uint64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  int error;
  do {
    error = ::posix_fallocate(fd, static_cast<off_t>(begin),
                              static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error == 0) return absl::OkStatus();
  return OsError(error, absl::StrCat("fallocate of ", bytes, " bytes"));
}

bool IsWhole(const v1::SleepFile& file) {
  return file.allocated_bytes() >= file.size();
}

absl::Status CopyOpened(int from, int to, v1::SleepFile* file,
                        CopyControl* control) {
  OPTSTATE_RETURN_IF_ERROR(SetSize(to, file->size()));
  {
    Window window(to, /*is_written=*/true);
    OPTSTATE_ASSIGN_OR_RETURN(const uint32_t crc,
                              CopyData(from, to, *file, &window, control));
    file->set_crc32c(crc);
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t DataBytes(const v1::SleepFile& file) {
  uint64_t bytes = 0;
  for (const v1::SleepExtent& extent : file.extents()) bytes += extent.bytes();
  return bytes;
}

absl::StatusOr<v1::SleepFile> DescribeFile(const std::string& path) {
  OPTSTATE_ASSIGN_OR_RETURN(const UniqueFd fd, Open(path, O_RDONLY));
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) {
    return OsError(errno, absl::StrCat("fstat of ", path));
  }
  v1::SleepFile file;
  file.set_size(static_cast<uint64_t>(info.st_size));
  file.set_mode(info.st_mode & 07777);
  file.set_allocated_bytes(static_cast<uint64_t>(info.st_blocks) * 512);
  off_t at = 0;
  while (at < info.st_size) {
    const off_t begin = ::lseek(fd.get(), at, SEEK_DATA);
    if (begin < 0 && errno == ENXIO) break;  // holes up to the end
    const off_t end = begin < 0 ? begin : ::lseek(fd.get(), begin, SEEK_HOLE);
    if (end < 0) {
      return OsError(errno, absl::StrCat("lseek to the data of ", path));
    }
    v1::SleepExtent* extent = file.add_extents();
    extent->set_begin(static_cast<uint64_t>(begin));
    extent->set_bytes(static_cast<uint64_t>(end - begin));
    at = end;
  }
  return file;
}

absl::Status CopyToDisk(const std::string& from, const std::string& to,
                        v1::SleepFile* file, CopyControl* control) {
  OPTSTATE_ASSIGN_OR_RETURN(const UniqueFd source, Open(from, O_RDONLY));
  OPTSTATE_RETURN_IF_ERROR(control->Before("create", to));
  OPTSTATE_ASSIGN_OR_RETURN(const UniqueFd target,
                            Open(to, O_WRONLY | O_CREAT | O_EXCL, 0600));
  OPTSTATE_RETURN_IF_ERROR(control->Before("write", to));
  OPTSTATE_RETURN_IF_ERROR(
      Annotate(CopyOpened(source.get(), target.get(), file, control), to));
  OPTSTATE_RETURN_IF_ERROR(control->Before("fsync", to));
  if (::fsync(target.get()) == 0) return absl::OkStatus();
  return OsError(errno, absl::StrCat("fsync of ", to));
}

absl::StatusOr<UniqueFd> MakeFile(const std::string& path,
                                  const v1::SleepFile& file,
                                  CopyControl* control) {
  OPTSTATE_RETURN_IF_ERROR(control->Before("create", path));
  OPTSTATE_ASSIGN_OR_RETURN(
      UniqueFd fd, Open(path, O_WRONLY | O_CREAT | O_EXCL, file.mode()));
  OPTSTATE_RETURN_IF_ERROR(Annotate(SetSize(fd.get(), file.size()), path));
  OPTSTATE_RETURN_IF_ERROR(control->Before("reserve", path));
  if (IsWhole(file)) {
    OPTSTATE_RETURN_IF_ERROR(Annotate(Reserve(fd.get(), 0, file.size()), path));
    return fd;
  }
  // The engine reserves what has no data.
  for (const v1::SleepExtent& extent : file.extents()) {
    OPTSTATE_RETURN_IF_ERROR(
        Annotate(Reserve(fd.get(), extent.begin(), extent.bytes()), path));
  }
  return fd;
}

absl::Status CopyBack(const std::string& from, const v1::SleepFile& file,
                      int to, CopyControl* control) {
  absl::StatusOr<UniqueFd> source = Open(from, O_RDONLY);
  if (absl::IsNotFound(source.status())) {
    return absl::DataLossError(absl::StrCat(from, " is missing"));
  }
  OPTSTATE_RETURN_IF_ERROR(source.status());
  struct stat info;
  if (::fstat(source->get(), &info) != 0) {
    return OsError(errno, absl::StrCat("fstat of ", from));
  }
  if (static_cast<uint64_t>(info.st_size) != file.size()) {
    return absl::DataLossError(absl::StrCat(from, " has ", info.st_size,
                                            " bytes, it was written with ",
                                            file.size()));
  }
  OPTSTATE_RETURN_IF_ERROR(control->Before("copy back", from));
  Window window(source->get(), /*is_written=*/false);
  const absl::StatusOr<uint32_t> crc =
      CopyData(source->get(), to, file, &window, control);
  if (!crc.ok()) return Annotate(crc.status(), from);
  if (*crc == file.crc32c()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      from,
      " is damaged: its checksum differs from the one that was taken "
      "when the job was put to sleep"));
}

}  // namespace optstate::supervisor
