#ifndef OPTSTATE_SERVER_SUPERVISOR_DISK_DIRECTORIES_H_
#define OPTSTATE_SERVER_SUPERVISOR_DISK_DIRECTORIES_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/config.pb.h"
#include "server/os/file_lock.h"
#include "storage/block_device/device.h"

namespace optstate::supervisor {

// The daemon's directories on disks (nvme.directories), locked for this daemon
// alone.
//
//   DIR/lock                the daemon's lock, with its pid
//   DIR/device, extents.lock  of a directory whose records are on a device:
//                           see storage/block_device
//   DIR/jobs/NAME/          a job's folder, which its engine makes: see
//                           storage/disk_folder.h
//   DIR/jobs/.deleted-N/    being removed: renamed first, so that half a job
//                           never has a job's name
//
// A folder with `durable` or `commits` in it is removed on request alone, also
// when the disk with the job's other files is not mounted. Nothing is made or
// renamed below a path that names another directory than the locked one, as
// after a disk was mounted on it.
//
// Threads: one at a time.
class DiskDirectories {
 public:
  DiskDirectories() = default;
  // Takes the directories and their devices, logs what each has, and removes
  // what a former daemon had renamed for that. FAILED_PRECONDITION: one is not
  // there, as when its disk is not mounted, another daemon has it, or other
  // users could write to it; or a device cannot be used (OpenDeviceOf).
  static absl::StatusOr<DiskDirectories> Open(const v1::NvmeSettings& nvme);

  // FAILED_PRECONDITION: a path names another directory than when the daemon
  // started.
  absl::Status CheckInPlace() const;
  // Returns where the first folder of a job of this name is, if it has any;
  // empty: there are no directories.
  std::string FirstFolder(const std::string& name) const;
  // Returns whether a folder of this name may be there.
  bool HasFolder(const std::string& name) const;
  bool IsDurable(const std::string& name) const;
  // FAILED_PRECONDITION: the job's folder says that the rest of the job is
  // asleep (sleep/record_sync.h), and where.
  absl::Status CheckNotAsleep(const std::string& name) const;
  // Removes what a crash has left that says so, of a job that is awake.
  void ForgetSleep(const std::string& name) const;
  // Checks that a user may have a job of this name made. PERMISSION_DENIED: it
  // has a durable job of another user; of a private one no more is said than
  // that the name is taken. FAILED_PRECONDITION: of one that is not
  // known, or as CheckInPlace and CheckNotAsleep.
  absl::Status CheckMayCreate(const std::string& name, uid_t owner) const;

  // Returns the owners, by name, of the jobs that may have a durable step.
  std::map<std::string, uid_t, std::less<>> DurableJobs() const;
  // Removes the folders of jobs that are neither durable nor asleep, unless
  // `is_known` or the rest of their state may be somewhere.
  void RemoveEnded(const std::function<bool(const std::string&)>& is_known);

  // Frees the name of a job, durably: returns the new paths of its folders, for
  // the caller to remove. On an error the folders keep their names.
  absl::StatusOr<std::vector<std::string>> Discard(const std::string& name);

 private:
  std::set<std::string> Jobs() const;
  absl::Status DescribeAndClean(const std::string& path) const;
  absl::Status TakeDevice(const std::string& directory,
                          const std::string& device);

  std::vector<std::string> paths_;
  std::vector<std::string> devices_;    // by path; empty: none
  std::vector<storage::Device> owned_;  // kept from other programs
  std::vector<os::FileLock> locks_;
  uint64_t discarded_ = 0;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_DISK_DIRECTORIES_H_
