#include "storage/array_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::storage {
namespace {

StateArrayIndex ArrayAt(int index) {
  return static_cast<StateArrayIndex>(index);
}

}  // namespace

uint64_t ArrayFiles::BytesNeeded(const Layout& layout, const ArraySet& wanted) {
  uint64_t bytes = 0;
  for (int i = 0; i < kStateArrayCount; ++i) {
    if (!wanted.test(static_cast<size_t>(i))) continue;
    for (const ByteRange& range : ReservedRanges(ArrayAt(i), layout)) {
      bytes += range.end - range.begin;
    }
  }
  return bytes;
}

std::string ArrayFiles::PathOf(StateArrayIndex array,
                               const Layout& layout) const {
  return absl::StrCat(folder_, "/", FileOf(array, layout).file);
}

absl::Status ArrayFiles::Create(const Layout& layout, const ArraySet& wanted) {
  for (int i = 0; i < kStateArrayCount; ++i) {
    const StateArrayIndex array = ArrayAt(i);
    if (!wanted.test(static_cast<size_t>(i))) continue;
    OPTSTATE_ASSIGN_OR_RETURN(
        files_[i],
        StateFile::Create(PathOf(array, layout), FileBytes(array, layout),
                          ReservedRanges(array, layout)));
  }
  return absl::OkStatus();
}

absl::Status ArrayFiles::Open(const Layout& layout, const ArraySet& wanted) {
  for (int i = 0; i < kStateArrayCount; ++i) {
    const StateArrayIndex array = ArrayAt(i);
    if (!owned_.test(static_cast<size_t>(i))) continue;
    if (!wanted.test(static_cast<size_t>(i))) {
      if (!FileOf(array, layout).file.empty()) {
        ::unlink(PathOf(array, layout).c_str());
      }
      continue;
    }
    OPTSTATE_ASSIGN_OR_RETURN(
        files_[i],
        StateFile::Open(PathOf(array, layout), FileBytes(array, layout),
                        ReservedRanges(array, layout)));
  }
  return absl::OkStatus();
}

absl::Status ArrayFiles::Resize(const Layout& layout, const ArraySet& wanted) {
  for (int i = 0; i < kStateArrayCount; ++i) {
    const StateArrayIndex array = ArrayAt(i);
    if (!wanted.test(static_cast<size_t>(i))) continue;
    const uint64_t bytes = FileBytes(array, layout);
    const std::vector<ByteRange> reserved = ReservedRanges(array, layout);
    if (files_[i].has_value()) {
      OPTSTATE_RETURN_IF_ERROR(files_[i]->Resize(bytes, reserved));
      continue;
    }
    OPTSTATE_ASSIGN_OR_RETURN(
        files_[i], StateFile::Create(PathOf(array, layout), bytes, reserved));
  }
  return absl::OkStatus();
}

void ArrayFiles::RemoveUnwanted(const Layout& layout, const ArraySet& wanted) {
  for (int i = 0; i < kStateArrayCount; ++i) {
    if (!files_[i].has_value() || wanted.test(static_cast<size_t>(i))) continue;
    RestoreOne(ArrayAt(i), {}, layout);
  }
}

void ArrayFiles::LockMemory(MemoryLocker* locker) {
  for (std::optional<StateFile>& file : files_) {
    if (file.has_value()) file->LockMemory(locker);
  }
}

ArrayFiles::Extents ArrayFiles::extents() const {
  Extents extents;
  for (size_t i = 0; i < files_.size(); ++i) {
    if (!files_[i].has_value()) continue;
    extents[i] = {files_[i]->size(), files_[i]->reserved()};
  }
  return extents;
}

void ArrayFiles::Restore(const Extents& extents, const Layout& layout) {
  for (int i = 0; i < kStateArrayCount; ++i) {
    if (!owned_.test(static_cast<size_t>(i))) continue;
    RestoreOne(ArrayAt(i), extents[static_cast<size_t>(i)], layout);
  }
}

void ArrayFiles::RestoreOne(StateArrayIndex array, const Extent& extent,
                            const Layout& layout) {
  if (extent.bytes == 0) {
    files_[array].reset();
    if (FileOf(array, layout).file.empty()) return;
    ::unlink(PathOf(array, layout).c_str());
  } else if (files_[array]->size() > extent.bytes) {
    files_[array]->Resize(extent.bytes, extent.reserved).IgnoreError();
  }
}

absl::StatusOr<UniqueFd> ArrayFiles::OpenToRead(StateArrayIndex array) const {
  const std::string& path = files_[array]->path();
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  return fd;
}

std::optional<ArrayInfo> ArrayFiles::Describe(StateArrayIndex array,
                                              const Layout& layout) const {
  if (!files_[array].has_value()) return std::nullopt;
  StateArrayFile file = FileOf(array, layout);
  return ArrayInfo{std::move(file.name), std::move(file.file),
                   std::move(file.dtype), files_[array]->reserved_bytes()};
}

uint64_t ArrayFiles::bytes() const {
  uint64_t bytes = 0;
  for (const auto& file : files_) {
    if (file.has_value()) bytes += file->reserved_bytes();
  }
  return bytes;
}

}  // namespace optstate::storage
