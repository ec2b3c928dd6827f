#include "server/session/admission.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "proto/types/memory_available.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/session/tiers/quota_rooms.h"
#include "storage/allocated_bytes.h"
#include "storage/tmpfs_info.h"

namespace optstate::session {
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

// Files of a new job, folders included, for all optimizers and formats; some
// exist only while the job is made.
constexpr uint64_t kJobFiles = 24;

absl::Status CheckFilesLeft(const storage::TmpfsInfo& info) {
  if (info.files_left >= kJobFiles) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      info.file_system, " on ", info.mount_point, ": a new job needs up to ",
      kJobFiles, " files, ", info.files_left,
      " more are possible; delete a job, or remount it with a larger "
      "nr_inodes="));
}

uint64_t Minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

// The remainder of one of the resources that the state takes.
struct Room {
  std::string what;
  uint64_t bytes_left = 0;
  std::string advice;
  bool holds_state = true;
  bool holds_tables = false;
};

// Subtracts from a room the part kept for root and the daemon's user.
void KeepForOperators(const v1::Limits& limits, uint64_t taken, Room* room) {
  const uint64_t percent = limits.operator_reserve_percent();
  if (percent == 0) return;
  const uint64_t kept = (room->bytes_left / 100 + taken / 100) * percent;
  room->bytes_left = Minus(room->bytes_left, kept);
  absl::StrAppend(&room->advice, "; ", percent,
                  "% are kept for root and the daemon's user "
                  "(limits.operator_reserve_percent)");
}

absl::StatusOr<std::vector<Room>> RoomsOf(const std::string& directory,
                                          const std::string& state_dir,
                                          const v1::Limits& limits) {
  std::vector<Room> rooms;
  if (limits.state_bytes_max() != 0) {
    rooms.push_back({"limit of all jobs",
                     Minus(limits.state_bytes_max(),
                           storage::AllocatedBytesBelow(state_dir)),
                     "delete a job or raise limits.state_bytes_max"});
  }
  OPTSTATE_ASSIGN_OR_RETURN(const storage::TmpfsInfo info,
                            storage::InspectDirectory(directory));
  if (info.is_hugetlbfs) {
    return absl::FailedPreconditionError(absl::StrCat(
        directory,
        " is on hugetlbfs, which cannot hold the small files of a job; use a "
        "tmpfs with huge=within_size (huge_pages: mount)"));
  }
  rooms.push_back({absl::StrCat(info.file_system, " on ", info.mount_point),
                   info.bytes_left,
                   "delete a job, or remount it with a larger size="});
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t available, AvailableMemoryBytes());
  rooms.push_back(
      {.what = "memory",
       .bytes_left = Minus(available, limits.memory_reserve_bytes()),
       .advice =
           absl::StrCat("delete a job, or lower limits.memory_reserve_bytes (",
                        limits.memory_reserve_bytes(), ")"),
       // On a disk the files are page cache, which the kernel can write out.
       .holds_state = info.is_tmpfs,
       .holds_tables = true});
  return rooms;
}

}  // namespace

absl::StatusOr<AdmissionLock> AdmissionLock::Take(
    const std::string& state_dir) {
  const std::string path = state_dir + "/admission.lock";
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd.ok()) {
    return storage::ExplainFull(OsError(errno, absl::StrCat("open ", path)),
                                state_dir);
  }
  int failed;
  do {
    failed = ::flock(fd.get(), LOCK_EX);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0) return OsError(errno, absl::StrCat("flock ", path));
  return AdmissionLock(std::move(fd));
}

absl::Status Admit(const AdmissionRequest& request) {
  const uint64_t job_max = request.limits.job_state_bytes_max();
  if (job_max != 0 && request.job_state_bytes > job_max) {
    return Exhausted("limit of one job", request.job_state_bytes, job_max,
                     "raise limits.job_state_bytes_max");
  }
  const std::string& state_dir =
      request.state_dir.empty() ? request.directory : request.state_dir;
  OPTSTATE_ASSIGN_OR_RETURN(
      std::vector<Room> rooms,
      RoomsOf(request.directory, state_dir, request.limits));
  if (!access::IsOperator(request.uid)) {
    const uint64_t taken = storage::AllocatedBytesBelow(state_dir);
    for (Room& room : rooms) KeepForOperators(request.limits, taken, &room);
    OPTSTATE_ASSIGN_OR_RETURN(
        std::vector<QuotaRoom> of_owner,
        StateRooms(request.limits, request.quotas, state_dir, request.uid));
    for (QuotaRoom& room : of_owner) {
      rooms.push_back(
          {std::move(room.what), room.bytes_left, std::move(room.advice)});
    }
  }
  // An existing job has its files already.
  if (request.new_state_bytes != 0 &&
      request.new_state_bytes == request.job_state_bytes) {
    OPTSTATE_ASSIGN_OR_RETURN(const storage::TmpfsInfo info,
                              storage::InspectDirectory(request.directory));
    OPTSTATE_RETURN_IF_ERROR(CheckFilesLeft(info));
  }
  for (const Room& room : rooms) {
    const uint64_t needed = (room.holds_state ? request.new_state_bytes : 0) +
                            (room.holds_tables ? request.table_bytes : 0);
    if (needed > room.bytes_left) {
      return Exhausted(room.what, needed, room.bytes_left, room.advice);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> StateBytesLeft(const std::string& state_dir,
                                        const v1::Limits& limits) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<Room> rooms,
                            RoomsOf(state_dir, state_dir, limits));
  uint64_t left = UINT64_MAX;
  for (const Room& room : rooms) {
    if (room.holds_state) left = std::min(left, room.bytes_left);
  }
  return left;
}

}  // namespace optstate::session
