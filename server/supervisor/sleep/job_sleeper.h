#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_JOB_SLEEPER_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_JOB_SLEEPER_H_

#include <sys/types.h>

#include <functional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/sleep.pb.h"
#include "server/supervisor/sleep/copy_control.h"

// Moves the files of a job without an engine between its directory in memory
// and a folder on a disk.
//
//   JOBS/NAME/asleep     the marker: holds the path of the folder. While it is
//                        there the folder is the job, and whatever else is in
//                        the directory is not, but for `owner` and `access`
//   SLEEP_DIR/NAME/      the folder: `manifest`, the files below `files`, and a
//                        copy of `access`
//   SLEEP_DIR/.new-NAME/ being written: renamed to NAME when it is complete
//                        and durable
//   SLEEP_DIR/.old-NAME/ no longer the job: to be removed
//
// Invariant: while SLEEP_DIR/NAME exists no engine has run since it was
// written. So the folder is never older than the memory, and whichever of the
// two is there is the job. Where both are, they are equal, and SettleSleep()
// takes the memory unless the marker is there or the machine has started again
// since.
//
// What a crash of the daemon leaves, and a reboot, which also loses the memory:
//
//   going to sleep              after a crash      after a reboot
//   1 writing .new-NAME         awake              gone, as any job in memory
//   2 NAME is there, no marker  awake, NAME goes   asleep
//   3 the marker is there       asleep             asleep
//   4 removing the files        asleep             asleep
//
//   waking
//   5 writing the files         asleep             asleep
//   6 all are there and right   asleep             asleep
//   7 the marker is gone        awake, NAME goes   asleep
//   8 NAME is .old-NAME         awake              gone, as any job in memory
//   9 the engine runs           awake              gone, as any job in memory
//
// Errors leave the job as it was before the call, awake or asleep: IsAsleep()
// says which, also in the rare case that what an error left could not be
// removed.
//
// Threads: one at a time for each job.
namespace optstate::supervisor {

inline constexpr char kAsleepFile[] = "/asleep";
inline constexpr absl::string_view kNewSleepPrefix = ".new-";
inline constexpr absl::string_view kOldSleepPrefix = ".old-";

// A job, and its places.
struct SleepPlace {
  std::string job;
  uid_t uid = 0;              // the owner
  std::string job_directory;  // in memory
  std::string folder;         // SLEEP_DIR/NAME
};

// Copies the job's files to the folder and gives their memory back. Calls
// `sync_records` before the copy counts: it makes durable what the job has on
// disks already. RESOURCE_EXHAUSTED: the disk has too little room;
// FAILED_PRECONDITION: the folder is there, and is another job's.
absl::StatusOr<v1::SleepManifest> PutToSleep(
    const SleepPlace& place, const std::function<absl::Status()>& sync_records,
    CopyControl* control);

// Checks that there is memory for the files, and calls `reserve`, which takes
// it, before any other job can.
using AdmitWaking =
    std::function<absl::Status(const v1::SleepManifest& manifest,
                               absl::FunctionRef<absl::Status()> reserve)>;

// Copies the files back, compares them with their checksums and has them be the
// job. Afterwards the folder is OldFolder(), which the caller removes.
// FAILED_PRECONDITION: the folder is not there, or another job's; DATA_LOSS: a
// file in it is damaged; the errors of `admit`.
absl::Status Wake(const SleepPlace& place, const AdmitWaking& admit,
                  CopyControl* control);
std::string OldFolder(const std::string& folder);

// Finds out at a start of the daemon whether the job with this directory is
// asleep, and finishes what a crash has interrupted. `place.folder` is where
// the job would be put now; empty: nowhere. Returns where it is; empty: the job
// is awake.
absl::StatusOr<std::string> SettleSleep(const SleepPlace& place,
                                        CopyControl* control);
// Returns whether the job's folder is the job, or equal to it.
bool IsAsleep(const SleepPlace& place);

// Puts the marker into the directory of a job.
absl::Status MarkAsleep(const std::string& job_directory,
                        const std::string& folder);
// Has the folder be no job's any more, durably; returns its new path, for the
// caller to remove.
absl::StatusOr<std::string> DiscardFolder(const std::string& folder);
// Undoes that: the folder is the job's again.
absl::Status TakeBackFolder(const std::string& folder);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_JOB_SLEEPER_H_
