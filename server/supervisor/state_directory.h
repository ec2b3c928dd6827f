#ifndef OPTSTATE_SERVER_SUPERVISOR_STATE_DIRECTORY_H_
#define OPTSTATE_SERVER_SUPERVISOR_STATE_DIRECTORY_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/config.pb.h"
#include "proto/types/unique_fd.h"
#include "server/os/file_lock.h"
#include "server/supervisor/job_registry.h"
#include "storage/tmpfs_info.h"

namespace optstate::supervisor {

// Returns one sentence on the page size in use and its reason; the setting
// decides only where the mount leaves the choice to the daemon.
std::string DescribeStatePages(v1::HugePages setting,
                               const storage::TmpfsInfo& info);

// A daemon's directory of jobs, locked for that daemon alone.
//
//   STATE_DIR/lock   the daemon's lock, with its pid
//   STATE_DIR/jobs/  see job_registry.h
//   STATE_DIR/draining  see drain_marker.h
//   STATE_DIR/memory_bandwidth  see scheduler/memory_bandwidth_record.h
class StateDirectory {
 public:
  // Creates and, with huge_pages: mount, mounts it when needed.
  // FAILED_PRECONDITION: another daemon has the directory (the error names its
  // pid), other users could write to it, or a tmpfs cannot be mounted over its
  // content. `inherited_lock`: from the process that executed this one in its
  // place.
  static absl::StatusOr<StateDirectory> Open(const v1::DaemonConfig& config,
                                             UniqueFd inherited_lock = {});

  int lock_fd() const { return lock_.fd(); }
  // Returns FAILED_PRECONDITION when the directory, or jobs/, was removed or
  // replaced.
  absl::Status CheckInPlace() const;

  JobRegistry TakeRegistry() { return std::move(registry_); }
  // One sentence on the page size of jobs' files and how to get larger pages.
  const std::string& pages() const { return pages_; }

 private:
  StateDirectory(std::string path, os::FileLock lock, JobRegistry registry,
                 std::string pages)
      : path_(std::move(path)),
        lock_(std::move(lock)),
        registry_(std::move(registry)),
        pages_(std::move(pages)) {}

  std::string path_;
  os::FileLock lock_;
  JobRegistry registry_;
  std::string pages_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_STATE_DIRECTORY_H_
