#include "client/views/written_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::client {
namespace {

// The struct from linux/fs.h of Linux 6.7; Debian 12's headers are older.
struct PageRegion {
  uint64_t start;
  uint64_t end;
  uint64_t categories;
};

struct ScanArguments {
  uint64_t size;
  uint64_t flags;
  uint64_t start;
  uint64_t end;
  uint64_t walk_end;
  uint64_t vec;
  uint64_t vec_len;
  uint64_t max_pages;
  uint64_t category_inverted;
  uint64_t category_mask;
  uint64_t category_anyof_mask;
  uint64_t return_mask;
};

constexpr uint64_t kIsFile = 1 << 2;
constexpr uint64_t kIsPresent = 1 << 3;
constexpr uint64_t kIsSwapped = 1 << 4;
constexpr unsigned long kScan = _IOWR('f', 16, ScanArguments);  // NOLINT

// Documentation/admin-guide/mm/pagemap.rst
constexpr uint64_t kEntryIsFile = uint64_t{1} << 61;
constexpr uint64_t kEntryIsSwapped = uint64_t{1} << 62;
constexpr uint64_t kEntryIsPresent = uint64_t{1} << 63;

constexpr size_t kPartEntries = 4096;

void Append(std::byte* begin, std::byte* end,
            std::vector<absl::Span<std::byte>>* ranges) {
  if (!ranges->empty() && ranges->back().end() == begin) {
    begin = ranges->back().data();
    ranges->pop_back();
  }
  ranges->push_back(absl::MakeSpan(begin, end));
}

}  // namespace

absl::Status WrittenPages::Open(WrittenPages* pages) {
  UniqueFd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!pagemap.ok()) {
    return absl::UnimplementedError(
        OsError(errno, "open of /proc/self/pagemap").message());
  }
  pages->pagemap_ = std::move(pagemap);
  return absl::OkStatus();
}

absl::Status WrittenPages::Find(absl::Span<std::byte> mapping,
                                std::vector<absl::Span<std::byte>>* ranges) {
  ranges->clear();
  if (scans_) {
    absl::Status scanned = Scan(mapping, ranges);
    if (!absl::IsUnimplemented(scanned)) return scanned;
    scans_ = false;
    ranges->clear();
  }
  return ReadEntries(mapping, ranges);
}

absl::Status WrittenPages::Scan(absl::Span<std::byte> mapping,
                                std::vector<absl::Span<std::byte>>* ranges) {
  std::array<PageRegion, 256> regions;
  ScanArguments scan = {};
  scan.size = sizeof(scan);
  scan.start = reinterpret_cast<uintptr_t>(mapping.data());
  scan.end = scan.start + mapping.size();
  scan.vec = reinterpret_cast<uintptr_t>(regions.data());
  scan.vec_len = regions.size();
  // Pages that no process has written belong to the file.
  scan.category_inverted = kIsFile;
  scan.category_mask = kIsFile;
  scan.category_anyof_mask = kIsPresent | kIsSwapped;
  scan.return_mask = kIsPresent;
  while (scan.start < scan.end) {
    const int found = ioctl(pagemap_.get(), kScan, &scan);
    if (found < 0) {
      if (errno == EINTR) continue;
      if (errno == ENOTTY || errno == EINVAL || errno == EPERM) {
        return absl::UnimplementedError("no PAGEMAP_SCAN");
      }
      return OsError(errno, "PAGEMAP_SCAN of the parameters");
    }
    for (int i = 0; i < found; ++i) {
      std::byte* const begin =
          mapping.data() +
          (regions[i].start - reinterpret_cast<uintptr_t>(mapping.data()));
      Append(begin, begin + (regions[i].end - regions[i].start), ranges);
    }
    scan.start = scan.walk_end;
  }
  return absl::OkStatus();
}

absl::Status WrittenPages::ReadEntries(
    absl::Span<std::byte> mapping, std::vector<absl::Span<std::byte>>* ranges) {
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first =
      reinterpret_cast<uintptr_t>(mapping.data()) / page_bytes;
  const uint64_t count = mapping.size() / page_bytes;
  std::vector<uint64_t> entries(std::min<uint64_t>(count, kPartEntries));
  for (uint64_t at = 0; at < count; at += entries.size()) {
    const uint64_t wanted = std::min<uint64_t>(count - at, entries.size());
    const ssize_t bytes =
        ::pread(pagemap_.get(), entries.data(), wanted * sizeof(uint64_t),
                static_cast<off_t>((first + at) * sizeof(uint64_t)));
    if (bytes < 0) return OsError(errno, "read of /proc/self/pagemap");
    if (static_cast<uint64_t>(bytes) != wanted * sizeof(uint64_t)) {
      return absl::InternalError(absl::StrCat(
          "/proc/self/pagemap gave ", bytes, " bytes of ", wanted, " entries"));
    }
    for (uint64_t i = 0; i < wanted; ++i) {
      const bool is_written = (entries[i] & kEntryIsSwapped) != 0 ||
                              ((entries[i] & kEntryIsPresent) != 0 &&
                               (entries[i] & kEntryIsFile) == 0);
      if (!is_written) continue;
      std::byte* const page = mapping.data() + (at + i) * page_bytes;
      Append(page, page + page_bytes, ranges);
    }
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
