#include "server/session/admission.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "proto/types/memory_available.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "storage/allocated_bytes.h"
#include "storage/tmpfs_info.h"

namespace optstate {
namespace {

std::string Bytes(uint64_t bytes) {
  return absl::StrFormat("%d bytes (%.1f MiB)", bytes,
                         static_cast<double>(bytes) / (1 << 20));
}

absl::Status Exhausted(absl::string_view what, uint64_t needed, uint64_t left,
                       absl::string_view advice) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": the job needs ", Bytes(needed), ", ", Bytes(left),
                   " are left; ", advice));
}

uint64_t Minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

absl::Status CheckLimits(const AdmissionRequest& request) {
  const uint64_t job_max = request.limits.job_state_bytes_max();
  if (job_max != 0 && request.job_state_bytes > job_max) {
    return Exhausted("limit of one job", request.job_state_bytes, job_max,
                     "raise limits.job_state_bytes_max");
  }
  const uint64_t all_max = request.limits.state_bytes_max();
  if (all_max == 0) return absl::OkStatus();
  const uint64_t left =
      Minus(all_max,
            AllocatedBytesBelow(request.state_dir.empty() ? request.directory
                                                          : request.state_dir));
  if (request.new_state_bytes > left) {
    return Exhausted("limit of all jobs", request.new_state_bytes, left,
                     "delete a job or raise limits.state_bytes_max");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AdmissionLock> AdmissionLock::Take(
    const std::string& state_dir) {
  const std::string path = state_dir + "/admission.lock";
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  int failed;
  do {
    failed = ::flock(fd.get(), LOCK_EX);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0) return OsError(errno, absl::StrCat("flock ", path));
  return AdmissionLock(std::move(fd));
}

absl::Status Admit(const AdmissionRequest& request) {
  OPTSTATE_RETURN_IF_ERROR(CheckLimits(request));
  OPTSTATE_ASSIGN_OR_RETURN(const TmpfsInfo info,
                            InspectDirectory(request.directory));
  if (info.is_hugetlbfs) {
    return absl::FailedPreconditionError(absl::StrCat(
        request.directory,
        " is on hugetlbfs, which cannot hold the small files of a job; use a "
        "tmpfs with huge=within_size (huge_pages: mount)"));
  }
  if (request.new_state_bytes > info.bytes_left) {
    return Exhausted(absl::StrCat(info.file_system, " on ", info.mount_point),
                     request.new_state_bytes, info.bytes_left,
                     "delete a job, or remount it with a larger size=");
  }
  // On a disk the files are page cache, which the kernel can write out.
  const uint64_t memory_bytes = info.is_tmpfs ? request.new_state_bytes : 0;
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t available, AvailableMemoryBytes());
  const uint64_t left = Minus(available, request.limits.memory_reserve_bytes());
  if (memory_bytes > left) {
    return Exhausted("memory", memory_bytes, left,
                     absl::StrCat("delete a job, or lower "
                                  "limits.memory_reserve_bytes (",
                                  request.limits.memory_reserve_bytes(), ")"));
  }
  return absl::OkStatus();
}

}  // namespace optstate
