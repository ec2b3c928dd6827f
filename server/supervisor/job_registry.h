#ifndef OPTSTATE_SERVER_SUPERVISOR_JOB_REGISTRY_H_
#define OPTSTATE_SERVER_SUPERVISOR_JOB_REGISTRY_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/types.pb.h"
#include "server/supervisor/disk_directories.h"
#include "server/supervisor/job_access_file.h"
#include "server/supervisor/sleep/job_sleeper.h"
#include "server/supervisor/sleep/sleep_directory.h"

namespace optstate::supervisor {

// The names and owners of the jobs of a state directory, on disk:
//
//   JOBS/NAME/          the job's directory; its engine's files lie here
//   JOBS/NAME/owner     the owner's uid, in decimal
//   JOBS/NAME/access    who else may use it, if anything was said of that: see
//                       storage/access_file.h, also for its copies on disks
//   JOBS/NAME/asleep    of a sleeping job, see sleep/job_sleeper.h
//   JOBS/.new-NAME/     being created: renamed to NAME when complete
//   JOBS/.deleted-N/    being removed: renamed first, so that half a job never
//                       has a job's name
//
// Threads: one at a time.
class JobRegistry {
 public:
  // Creates `directory` when needed, removes what a crash left half done and
  // reads every job. A directory that is no job is left alone and logged.
  static absl::StatusOr<JobRegistry> Open(const std::string& directory);

  // Puts jobs to sleep here: finds out which jobs are asleep, and adds those
  // that have no directory, as after a reboot. Called before UseDisks(), which
  // would begin such a job at its last durable step.
  void UseSleepDirectory(SleepDirectory sleep);
  // Returns where a sleeping job is; empty: it is awake.
  std::string SleepFolder(const std::string& name) const;
  SleepPlace SleepPlaceOf(const std::string& name) const;
  // Returns where a job that is awake can be put to sleep. FAILED_PRECONDITION:
  // nowhere, and why.
  absl::StatusOr<SleepPlace> FindSleepPlace(const std::string& name);

  // Keeps jobs' files on these disks as well: adds each job that has a durable
  // step there and no directory here, as after a reboot, and removes what is
  // there of jobs that are no more. A job whose directory cannot be made is
  // added without one, and logged.
  void UseDisks(DiskDirectories disks);
  // Makes the directory of a durable job that has none. OK also for another
  // job.
  absl::Status MakeMissingDirectory(const std::string& name);
  // FAILED_PRECONDITION: the job has files on disks, and these are not where
  // they were when the daemon started.
  absl::Status CheckDisksOf(const std::string& name) const;

  // Returns the jobs' owners by job name.
  const std::map<std::string, uid_t, std::less<>>& jobs() const {
    return jobs_;
  }
  std::string JobDirectory(absl::string_view name) const;

  // Returns who may use a job. Of a name without a job: nobody.
  const KnownAccess& AccessOf(const std::string& name) const;
  // Changes that, durably, also on disks. FAILED_PRECONDITION: a disk that has
  // a part of the job is not where it was. On an error it is as it was.
  absl::Status SetAccess(const std::string& name, const v1::JobAccess& access);

  // Creates a job; `name` is valid (CheckJobName), and `access` one that it can
  // have. ALREADY_EXISTS; or the disks do not have it
  // (DiskDirectories::CheckMayCreate).
  absl::Status Create(const std::string& name, uid_t owner,
                      const v1::JobAccess& access = {});
  // Frees the name of a job, also on disks. Returns the new paths of its
  // directories, for the caller to remove, which takes time in proportion to
  // what is freed. NOT_FOUND. On an error the job is as it was.
  absl::StatusOr<std::vector<std::string>> Discard(const std::string& name);

 private:
  explicit JobRegistry(std::string directory)
      : directory_(std::move(directory)) {}

  absl::Status Load();
  void LoadEntry(const std::string& name);
  // `sleep_folder`: where the job is asleep; empty: it is awake.
  absl::Status MakeDirectory(const std::string& name, uid_t owner,
                             const std::string& sleep_folder = "",
                             const v1::JobAccess& access = {}) const;
  bool UsesDisk(const std::string& name) const;
  // Reads who may use the job. A directory that does not say gets the first
  // file that one of `copies` has.
  void LoadAccess(const std::string& name,
                  const std::vector<std::string>& copies = {});
  // Returns the job's folder on a disk with a file of its own, and not of
  // another user's job; empty: it has none.
  std::string DiskAccessFolder(const std::string& name) const;
  // Brings the files in memory and on the disk in line, as the daemon starts.
  void SettleAccess(const std::string& name);

  std::string directory_;
  std::map<std::string, uid_t, std::less<>> jobs_;
  std::map<std::string, KnownAccess> access_;  // of each of jobs_
  uint64_t discarded_ = 0;
  DiskDirectories disks_;
  SleepDirectory sleep_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_JOB_REGISTRY_H_
