#include "proto/shm/sealed_segment.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/shm/page_reserve.h"
#include "proto/shm/segment_layout.h"
#include "proto/shm/spread_mapping.h"
#include "proto/types/memory_available.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

// The kernel's ABI, newer than the headers of older systems.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace optstate::shm {
namespace {

constexpr int kSeals =
    F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

absl::Status CheckSize(uint64_t bytes) {
  if (bytes > 0 && bytes <= std::numeric_limits<off_t>::max()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("a segment cannot have ", bytes, " bytes"));
}

absl::Status CheckAvailable(uint64_t bytes) {
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t available, AvailableMemoryBytes());
  if (bytes <= available) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(bytes, " bytes are needed, ", available, " available"));
}

// Below this, starting a thread costs more than it saves.
constexpr uint64_t kPopulateBytesPerThread = 32 << 20;
constexpr uint64_t kPopulateThreadsMax = 8;

// Gives every byte of a writable mapping its page; false when some may have
// none. The kernel clears new pages at 1 to 2 GB/s a thread,
// which is most of the time of an attach.
bool Populate(std::byte* data, uint64_t bytes) {
  const uint64_t threads_max = std::min<uint64_t>(
      {kPopulateThreadsMax, std::max(1u, std::thread::hardware_concurrency()),
       bytes / kPopulateBytesPerThread + 1});
  const uint64_t share =
      (bytes / threads_max + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::atomic<bool> populated = true;
  const auto populate = [&](uint64_t begin, uint64_t end) {
    if (!PopulatePages(data + begin, end - begin).ok()) populated = false;
  };
  std::vector<std::thread> others;
  for (uint64_t begin = share; begin < bytes; begin += share) {
    others.emplace_back(populate, begin, std::min(begin + share, bytes));
  }
  populate(0, std::min(share, bytes));
  for (std::thread& other : others) other.join();
  return populated;
}

// Returns whether the system gives shared memory huge pages where a mapping
// requests them.
bool HugeWhereAdvised() {
  std::string modes;
  std::getline(
      std::ifstream("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
      modes);
  return absl::StrContains(modes, "[advise]");
}

// Maps the writer's view and gives every byte a page, if any.
absl::StatusOr<std::byte*> MapPopulated(int fd, uint64_t bytes,
                                        SealedSegment::Pages pages) {
  void* data = MapSpread(fd, bytes, PROT_READ | PROT_WRITE);
  if (data == MAP_FAILED) return OsError(errno, "mmap");
  // Memory is touched before fallocate: pages that fallocate takes are huge
  // only where shmem_enabled is `always`, those of an advised mapping also
  // where it is `advise`. Both calls are attempts; fallocate takes the
  // remaining pages, or fails.
  madvise(data, bytes, MADV_HUGEPAGE);
  if (pages == SealedSegment::Pages::kNone) {
    return static_cast<std::byte*>(data);
  }
  const bool touch =
      pages == SealedSegment::Pages::kMapped || HugeWhereAdvised();
  if (touch && Populate(static_cast<std::byte*>(data), bytes)) {
    return static_cast<std::byte*>(data);
  }
  int result;
  do {
    result = fallocate(fd, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    const absl::Status status = OsError(errno, "fallocate");
    UnmapSpread(data, bytes);
    return status;
  }
  return static_cast<std::byte*>(data);
}

std::string SealText(int seals) { return absl::StrCat("0x", absl::Hex(seals)); }

// Checks the seals, after which neither size nor population can change any
// more.
absl::Status CheckSealed(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    return absl::InvalidArgumentError(
        OsError(errno, "expected a sealed memfd: fcntl(F_GET_SEALS)")
            .message());
  }
  if ((seals & kSeals) != kSeals) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected seals ", SealText(kSeals), ", found ", SealText(seals)));
  }
  return absl::OkStatus();
}

absl::Status CheckReadOnly(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0) return OsError(errno, "fcntl(F_GETFL)");
  if ((flags & O_ACCMODE) != O_RDONLY) {
    return absl::InvalidArgumentError(
        "expected a file that is open for reading alone");
  }
  struct stat info;
  if (fstat(fd, &info) != 0) return OsError(errno, "fstat");
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a file that its owner alone may write, found "
                     "mode 0",
                     absl::StrFormat("%o", info.st_mode & 07777)));
  }
  return absl::OkStatus();
}

// Returns whether missing blocks of a file are memory that may be unavailable
// when they are read. On disks they are zeros from the page cache, and blocks
// count otherwise.
bool IsInMemory(int fd) {
  struct statfs info;
  return fstatfs(fd, &info) != 0 || info.f_type == TMPFS_MAGIC ||
         info.f_type == HUGETLBFS_MAGIC;
}

absl::Status CheckPopulated(int fd, uint64_t bytes, uint64_t reserved_bytes) {
  struct stat info;
  if (fstat(fd, &info) != 0) return OsError(errno, "fstat");
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        "expected a memfd or a regular file, found another kind");
  }
  if (static_cast<uint64_t>(info.st_size) != bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected ", bytes, " bytes, found ", info.st_size));
  }
  return IsInMemory(fd) ? CheckReserved(fd, reserved_bytes) : absl::OkStatus();
}

absl::Status CheckPeer(int fd, uint64_t bytes, uint64_t reserved_bytes) {
  OPTSTATE_RETURN_IF_ERROR(CheckSize(bytes));
  // Seals are checked first: before them, the result of the second check could
  // still change.
  OPTSTATE_RETURN_IF_ERROR(Annotate(CheckSealed(fd), "peer's segment"));
  return Annotate(CheckPopulated(fd, bytes, reserved_bytes), "peer's segment");
}

}  // namespace

absl::Status PopulatePages(std::byte* data, uint64_t bytes) {
  int result;
  do {
    result = madvise(data, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return absl::OkStatus();
  if (errno == EINVAL) {
    return absl::UnimplementedError("MADV_POPULATE_WRITE needs Linux 5.14");
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("no memory for all of ", bytes,
                   " bytes: ", OsError(errno, "madvise").message()));
}

absl::StatusOr<SealedSegment> SealedSegment::Create(const std::string& name,
                                                    uint64_t bytes,
                                                    Pages pages) {
  const std::string what = absl::StrCat("segment ", name);
  OPTSTATE_RETURN_IF_ERROR(Annotate(CheckSize(bytes), what));
  OPTSTATE_RETURN_IF_ERROR(Annotate(CheckAvailable(bytes), what));

  SealedSegment segment;
  segment.fd_.reset(
      memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int fd = segment.fd();
  if (fd < 0) return Annotate(OsError(errno, "memfd_create"), what);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    return Annotate(OsError(errno, "ftruncate"), what);
  }
  absl::StatusOr<std::byte*> data = MapPopulated(fd, bytes, pages);
  if (!data.ok()) return Annotate(data.status(), what);
  segment.data_ = *data;
  segment.size_ = bytes;
  // The seals come last: FUTURE_WRITE refuses new writable mappings, and
  // fallocate.
  if (fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    return Annotate(OsError(errno, "fcntl(F_ADD_SEALS)"), what);
  }
  return segment;
}

SealedSegment::SealedSegment(SealedSegment&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SealedSegment& SealedSegment::operator=(SealedSegment&& other) noexcept {
  SealedSegment taken(std::move(other));
  // `taken` now holds, and frees, the former content of this object.
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  std::swap(fd_, taken.fd_);
  return *this;
}

SealedSegment::~SealedSegment() {
  if (data_ != nullptr) UnmapSpread(data_, size_);
}

absl::Status PeerSegment::Check(int fd, uint64_t bytes) {
  return CheckPeer(fd, bytes, bytes);
}

absl::Status PeerSegment::CheckFile(int fd, uint64_t bytes) {
  OPTSTATE_RETURN_IF_ERROR(CheckSize(bytes));
  OPTSTATE_RETURN_IF_ERROR(Annotate(CheckReadOnly(fd), "peer's file"));
  return Annotate(CheckPopulated(fd, bytes, bytes), "peer's file");
}

absl::StatusOr<PeerSegment> PeerSegment::Map(UniqueFd fd, uint64_t bytes) {
  OPTSTATE_RETURN_IF_ERROR(Check(fd.get(), bytes));
  return MapChecked(fd.get(), bytes);
}

absl::StatusOr<PeerSegment> PeerSegment::MapPartly(UniqueFd fd, uint64_t bytes,
                                                   uint64_t reserved_bytes) {
  OPTSTATE_RETURN_IF_ERROR(
      CheckPeer(fd.get(), bytes, std::min(bytes, reserved_bytes)));
  return MapChecked(fd.get(), bytes);
}

absl::StatusOr<PeerSegment> PeerSegment::MapFile(UniqueFd fd, uint64_t bytes) {
  OPTSTATE_RETURN_IF_ERROR(CheckFile(fd.get(), bytes));
  return MapChecked(fd.get(), bytes);
}

absl::StatusOr<PeerSegment> PeerSegment::MapChecked(int fd, uint64_t bytes) {
  void* data = MapSpread(fd, bytes, PROT_READ);
  if (data == MAP_FAILED) return OsError(errno, "mmap of the peer's segment");
  // The mapping is not populated: pages that the writer has not touched would
  // be cleared here, while the peer waits to be attached. Written pages are
  // mapped sixteen at a fault.
  madvise(data, bytes, MADV_HUGEPAGE);
  PeerSegment segment;
  segment.data_ = static_cast<const std::byte*>(data);
  segment.size_ = bytes;
  return segment;
}

PeerSegment::PeerSegment(PeerSegment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

PeerSegment& PeerSegment::operator=(PeerSegment&& other) noexcept {
  PeerSegment taken(std::move(other));
  // `taken` now holds, and frees, the former content of this object.
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  return *this;
}

PeerSegment::~PeerSegment() {
  if (data_ != nullptr) {
    UnmapSpread(const_cast<std::byte*>(data_), size_);
  }
}

}  // namespace optstate::shm
