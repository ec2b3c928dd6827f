#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEP_DIRECTORY_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEP_DIRECTORY_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/sleep.pb.h"
#include "server/os/file_lock.h"

namespace optstate::supervisor {

// The daemon's directory on a disk for sleeping jobs, locked for this daemon
// alone.
//
//   DIR/lock     the daemon's lock, with its pid
//   DIR/jobs/    the sleeping jobs: SLEEP_DIR of job_sleeper.h
//
// Threads: one at a time.
class SleepDirectory {
 public:
  // A daemon without a directory, which puts no job to sleep.
  SleepDirectory() = default;

  // Takes the directory of the configuration, if there is one, and removes what
  // a crash left half done. FAILED_PRECONDITION: sleep_directory is not there,
  // as when its disk is not mounted, another daemon has it, or other users
  // could write to it. The default directory is made by CheckUsable().
  static absl::StatusOr<SleepDirectory> Open(const v1::DaemonConfig& config);

  // Checks that jobs can be put to sleep here, and makes the directory when it
  // is the default one. FAILED_PRECONDITION: there is none, it is in memory
  // itself, or another disk has been mounted there since the daemon started.
  absl::Status CheckUsable();

  // Returns the manifests of all jobs that sleep here; logs what it cannot
  // read.
  std::vector<v1::SleepManifest> Jobs() const;
  // Returns where a job is put to sleep; empty: nowhere.
  std::string FolderOf(absl::string_view job) const;

 private:
  explicit SleepDirectory(std::string path) : path_(std::move(path)) {}
  absl::Status Take();

  std::string path_;
  std::optional<os::FileLock> lock_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEP_DIRECTORY_H_
