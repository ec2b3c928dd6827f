#include "client/views/parameter_views.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/dtype.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14
#endif

namespace optstate::client {
namespace {

uint64_t PageBytes() {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// The memory that is moved out of the file at once, and that is there twice
// meanwhile.
constexpr uint64_t kMovedBytesMax = uint64_t{32} << 20;

absl::Status MoveOutOfFile(absl::Span<std::byte> range) {
  void* const data = mmap(nullptr, range.size(), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no memory to move parameters to: ", OsError(errno, "mmap").message()));
  }
  std::memcpy(data, range.data(), range.size());
  // One call replaces the mapping, so that a reader never finds a hole.
  if (mremap(data, range.size(), range.size(), MREMAP_MAYMOVE | MREMAP_FIXED,
             range.data()) == MAP_FAILED) {
    absl::Status status = OsError(errno, "mremap over the parameters");
    munmap(data, range.size());
    return status;
  }
  return absl::OkStatus();
}

absl::Status GiveBack(absl::Span<std::byte> range) {
  if (madvise(range.data(), range.size(), MADV_DONTNEED) == 0) {
    return absl::OkStatus();
  }
  return OsError(errno, "madvise(MADV_DONTNEED) of parameters");
}

}  // namespace

absl::StatusOr<std::unique_ptr<ParameterViews>> ParameterViews::Map(
    int file, const Layout& layout) {
  std::unique_ptr<ParameterViews> views(new ParameterViews(layout));
  OPTSTATE_RETURN_IF_ERROR(WrittenPages::Open(&views->pages_));
  views->file_bytes_ =
      shm::ParameterSegmentBytes(layout.parameter_area_bytes());
  const uint64_t bytes =
      (views->file_bytes_ + PageBytes() - 1) / PageBytes() * PageBytes();
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_NORESERVE, file, 0);
  if (data == MAP_FAILED) return OsError(errno, "mmap of the parameters");
  views->area_ = absl::MakeSpan(static_cast<std::byte*>(data), bytes);
  // In a process that locks all its memory (mlockall), locked pages cannot be
  // given back and are private copies already.
  if (munlock(data, bytes) != 0) {
    return OsError(errno, "munlock of the parameters");
  }
  views->guard_ = FaultGuard(views->area_, PROT_READ | PROT_WRITE);
  struct stat info;
  if (fstat(file, &info) != 0) return OsError(errno, "fstat of the parameters");
  views->file_name_ = NameOfFile(file);
  views->device_ = info.st_dev;
  views->inode_ = info.st_ino;
  OPTSTATE_RETURN_IF_ERROR(views->Release());
  return views;
}

ParameterViews::~ParameterViews() {
  guard_ = FaultGuard();
  if (!area_.empty()) munmap(area_.data(), area_.size());
}

absl::Span<std::byte> ParameterViews::parameter(uint32_t parameter) const {
  if (parameter >= layout_.parameters().size()) return {};
  const ParameterSpec& spec = layout_.parameters()[parameter];
  return area_.subspan(
      layout_.parameter_offset_bytes(parameter),
      static_cast<uint64_t>(spec.numel) * SizeInBytes(spec.dtype));
}

absl::Status ParameterViews::FindWritten(int file,
                                         absl::Span<const std::byte> committed,
                                         std::vector<uint32_t>* parameters) {
  parameters->clear();
  OPTSTATE_RETURN_IF_ERROR(CheckHasFile());
  OPTSTATE_RETURN_IF_ERROR(CheckFile(file));
  OPTSTATE_RETURN_IF_ERROR(pages_.Find(area_, &ranges_));
  for (const absl::Span<std::byte> range : ranges_) {
    OPTSTATE_RETURN_IF_ERROR(Compare(range, committed, parameters));
  }
  return absl::OkStatus();
}

// Without the file's pages below it, a page that is given back would be zeros.
absl::Status ParameterViews::CheckHasFile() const {
  if (left_bytes_ == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the views have left the parameter file, and are the process's own");
}

absl::Status ParameterViews::CheckFile(int file) {
  OPTSTATE_RETURN_IF_ERROR(CheckNotCutShort(file, file_bytes_, guard_));
  struct stat info;
  if (fstat(file, &info) != 0) return OsError(errno, "fstat of the parameters");
  if (info.st_dev == device_ && info.st_ino == inode_) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(Follow(file));
  file_name_ = NameOfFile(file);
  device_ = info.st_dev;
  inode_ = info.st_ino;
  return absl::OkStatus();
}

absl::Status ParameterViews::Follow(int file) {
  OPTSTATE_RETURN_IF_ERROR(pages_.Find(area_, &ranges_));
  std::vector<std::string> written;
  for (const absl::Span<std::byte> range : ranges_) {
    written.emplace_back(reinterpret_cast<const char*>(range.data()),
                         range.size());
  }
  if (mmap(area_.data(), area_.size(), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, file, 0) == MAP_FAILED) {
    return OsError(errno, "mmap of the parameters over the former file");
  }
  for (size_t i = 0; i < written.size(); ++i) {
    std::memcpy(ranges_[i].data(), written[i].data(), written[i].size());
  }
  return absl::OkStatus();
}

absl::Status ParameterViews::Compare(absl::Span<std::byte> range,
                                     absl::Span<const std::byte> committed,
                                     std::vector<uint32_t>* parameters) {
  const auto begin = static_cast<uint64_t>(range.data() - area_.data());
  const uint64_t end = begin + range.size();
  // Bytes behind the parameters belong to no parameter.
  const auto differs = [&](uint64_t page) {
    if (page >= committed.size()) return false;
    const uint64_t bytes = std::min(PageBytes(), committed.size() - page);
    return std::memcmp(area_.data() + page, committed.data() + page, bytes) !=
           0;
  };
  for (uint64_t page = begin; page < end;) {
    const bool is_different = differs(page);
    uint64_t next = page + PageBytes();
    while (next < end && differs(next) == is_different) next += PageBytes();
    if (is_different) {
      NoteParameters(page, next, committed, parameters);
    } else {
      OPTSTATE_RETURN_IF_ERROR(GiveBack(area_.subspan(page, next - page)));
    }
    page = next;
  }
  return absl::OkStatus();
}

void ParameterViews::NoteParameters(uint64_t begin, uint64_t end,
                                    absl::Span<const std::byte> committed,
                                    std::vector<uint32_t>* parameters) const {
  const auto specs = layout_.parameters();
  // Finds the last parameter that begins at or before `begin` and may reach
  // into the pages.
  uint32_t low = 0;
  auto high = static_cast<uint32_t>(specs.size());
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    (layout_.parameter_offset_bytes(middle) <= begin ? low : high) = middle;
  }
  // Parameters without elements share the offset of the next one.
  while (low > 0 && layout_.parameter_offset_bytes(low - 1) ==
                        layout_.parameter_offset_bytes(low)) {
    --low;
  }
  for (uint32_t p = low; p < specs.size(); ++p) {
    const uint64_t first = layout_.parameter_offset_bytes(p);
    if (first >= end) break;
    if (!parameters->empty() && parameters->back() >= p) continue;
    const uint64_t last = first + static_cast<uint64_t>(specs[p].numel) *
                                      SizeInBytes(specs[p].dtype);
    const uint64_t from = std::max(first, begin);
    const uint64_t to = std::min(last, end);
    if (from < to && std::memcmp(area_.data() + from, committed.data() + from,
                                 to - from) != 0) {
      parameters->push_back(p);
    }
  }
}

absl::Status ParameterViews::Release() {
  OPTSTATE_RETURN_IF_ERROR(CheckHasFile());
  OPTSTATE_RETURN_IF_ERROR(pages_.Find(area_, &ranges_));
  for (const absl::Span<std::byte> range : ranges_) {
    OPTSTATE_RETURN_IF_ERROR(GiveBack(range));
  }
  return absl::OkStatus();
}

absl::Status ParameterViews::Keep() {
  while (madvise(area_.data(), area_.size(), MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == ENOMEM) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "no memory for a copy of ", area_.size(), " bytes of parameters"));
    }
    if (errno != EINVAL && errno != EFAULT) {
      return OsError(errno, "copying of the parameters");
    }
    // An older kernel lacks the call, or the file was cut short: writing the
    // present value copies a page too, and puts zeros where there is none.
    for (uint64_t at = 0; at < area_.size(); at += PageBytes()) {
      auto* const byte = reinterpret_cast<volatile std::byte*>(&area_[at]);
      *byte = *byte;
    }
    break;
  }
  return guard_.lost() ? CutShort(file_name_) : absl::OkStatus();
}

absl::Status ParameterViews::Leave() {
  // Copies first: then no value depends on the file, however far this comes.
  const absl::Status kept = Keep();
  if (!kept.ok() && !absl::IsDataLoss(kept)) return kept;
  while (left_bytes_ < area_.size()) {
    const absl::Span<std::byte> next =
        area_.subspan(left_bytes_, kMovedBytesMax);
    OPTSTATE_RETURN_IF_ERROR(MoveOutOfFile(next));
    left_bytes_ += next.size();
  }
  return guard_.lost() ? CutShort(file_name_) : absl::OkStatus();
}

}  // namespace optstate::client
