#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_RECORD_SYNC_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_RECORD_SYNC_H_

#include <string>

#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"

namespace optstate::supervisor {

// Makes durable what a job without an engine has in nvme.directories and on
// their devices, and notes there that the rest of it is to sleep in
// `sleep_folder`. A record that is on disk as it is in memory may be in the
// disk's cache only, for such a record is synced by commits alone; while the
// job sleeps the machine may lose power. The note keeps a daemon that does not
// find the sleeping job from removing its records, or from beginning it at its
// last durable step.
absl::Status SyncRecords(const v1::NvmeSettings& nvme, const std::string& job,
                         const std::string& sleep_folder);
// Removes the note, for the job is awake; an error is logged, for a note that
// stays does no harm while the job is there.
void ForgetSleep(const v1::NvmeSettings& nvme, const std::string& job);
// Does so in one of the job's folders.
void ForgetSleepIn(const std::string& disk_folder);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_RECORD_SYNC_H_
