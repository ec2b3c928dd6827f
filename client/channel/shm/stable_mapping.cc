#include "client/channel/shm/stable_mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/shm/sealed_segment.h"
#include "proto/shm/spread_mapping.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::client {

StableMapping::~StableMapping() {
  guard_ = FaultGuard();
  if (data_ != nullptr) shm::UnmapSpread(data_, size_);
}

absl::Status StableMapping::Replace(UniqueFd fd, uint64_t bytes) {
  if (data_ != nullptr && bytes != size_) {
    return absl::InternalError(
        absl::StrCat("a mapping of ", size_, " bytes cannot become ", bytes));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckNotCutShort(fd.get(), bytes));
  OPTSTATE_RETURN_IF_ERROR(shm::PeerSegment::CheckFile(fd.get(), bytes));
  void* const data =
      data_ == nullptr
          ? shm::MapSpread(fd.get(), bytes, PROT_READ)
          : mmap(data_, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd.get(), 0);
  if (data == MAP_FAILED) return OsError(errno, "mmap of the peer's file");
  // The calls are hints; see SealedSegment. The first read maps missing pages.
  madvise(data, bytes, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(data);
  size_ = bytes;
  file_ = std::move(fd);
  guard_ = FaultGuard({data_, size_}, PROT_READ);
  return absl::OkStatus();
}

absl::Status StableMapping::CheckWhole() const {
  return data_ == nullptr ? absl::OkStatus()
                          : CheckNotCutShort(file_.get(), size_, guard_);
}

}  // namespace optstate::client
