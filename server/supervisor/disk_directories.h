#ifndef OPTSTATE_SERVER_SUPERVISOR_DISK_DIRECTORIES_H_
#define OPTSTATE_SERVER_SUPERVISOR_DISK_DIRECTORIES_H_

#include <sys/types.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/os/file_lock.h"

namespace optstate::supervisor {

// The daemon's directories on disks (nvme.directories), locked for this daemon
// alone.
//
//   DIR/lock                the daemon's lock, with its pid
//   DIR/jobs/NAME/owner     in the first directory: the owner's uid, in decimal
//   DIR/jobs/NAME/commits   likewise: what is durable of the job
//   DIR/jobs/NAME/records   the job's records
//   DIR/jobs/NAME/durable   of a durable job: what is here is never removed
//                           unless the job is deleted, also when the disk with
//                           its commits is not mounted
//
// Threads: one at a time.
class DiskDirectories {
 public:
  DiskDirectories() = default;
  // Makes the directories when needed. FAILED_PRECONDITION: another daemon has
  // one, or other users could write to it.
  static absl::StatusOr<DiskDirectories> Open(std::vector<std::string> paths);

  // Returns the owners, by name, of the jobs that may have a durable step.
  std::map<std::string, uid_t, std::less<>> DurableJobs() const;
  // Returns the names of the jobs that have files and are not durable.
  std::vector<std::string> JobsWithoutCommit() const;
  // Removes a job's files. What cannot be removed is logged.
  void RemoveJob(const std::string& name) const;

 private:
  std::vector<std::string> Jobs() const;
  bool HasCommit(const std::string& name) const;
  bool IsDurable(const std::string& name) const;

  std::vector<std::string> paths_;
  std::vector<os::FileLock> locks_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_DISK_DIRECTORIES_H_
