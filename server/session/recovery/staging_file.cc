#include "server/session/recovery/staging_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/types/memory_available.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::session {
namespace {

constexpr absl::string_view kPrefix = "gradients.";

}  // namespace

std::string StagingFilePath(absl::string_view job_directory, uint32_t rank,
                            uint64_t client_instance) {
  return absl::StrCat(job_directory, "/", kPrefix, rank, ".",
                      absl::Hex(client_instance));
}

bool IsStagingFile(absl::string_view name) {
  return absl::StartsWith(name, kPrefix);
}

absl::StatusOr<storage::StateFile> OpenStagingFile(
    const std::string& path, uint64_t gradient_area_bytes) {
  const storage::ByteRange whole = {0,
                                    std::max<uint64_t>(gradient_area_bytes, 1)};
  return storage::StateFile::Open(path, whole.end, {&whole, 1});
}

absl::StatusOr<storage::StateFile> MakeStagingFile(const std::string& path,
                                                   uint64_t gradient_area_bytes,
                                                   bool* present) {
  absl::StatusOr<storage::StateFile> there =
      OpenStagingFile(path, gradient_area_bytes);
  *present = there.ok();
  if (!absl::IsDataLoss(there.status())) return there;
  ::unlink(path.c_str());
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t available, AvailableMemoryBytes());
  if (gradient_area_bytes > available) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path, " needs ", gradient_area_bytes, " bytes, ",
                     available, " bytes of memory are left"));
  }
  const storage::ByteRange whole = {0,
                                    std::max<uint64_t>(gradient_area_bytes, 1)};
  absl::StatusOr<storage::StateFile> made =
      storage::StateFile::Create(path, whole.end, {&whole, 1});
  if (!made.ok()) ::unlink(path.c_str());
  return made;
}

absl::StatusOr<shm::PeerSegment> MapKeptGradients(KeptGradients kept,
                                                  uint64_t gradient_area_bytes,
                                                  uint64_t needed_bytes) {
  struct stat segment_stat;
  if (::fstat(kept.segment.get(), &segment_stat) != 0) {
    return OsError(errno, "fstat of kept gradients");
  }
  const auto bytes = static_cast<uint64_t>(segment_stat.st_size);
  if (kept.gradient_offset_bytes > bytes ||
      gradient_area_bytes > bytes - kept.gradient_offset_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("kept gradients: ", gradient_area_bytes, " bytes from ",
                     kept.gradient_offset_bytes, " of a segment of ", bytes));
  }
  return shm::PeerSegment::MapPartly(std::move(kept.segment), bytes,
                                     kept.gradient_offset_bytes + needed_bytes);
}

}  // namespace optstate::session
