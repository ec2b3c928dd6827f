#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_RECORD_SYNC_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_RECORD_SYNC_H_

#include <string>

#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"

namespace optstate::supervisor {

// Makes durable what a job without an engine has in nvme.directories and on
// their devices. A record that is on disk as it is in memory may be in the
// disk's cache only, for such a record is synced by commits alone; while the
// job sleeps the machine may lose power.
absl::Status SyncRecords(const v1::NvmeSettings& nvme, const std::string& job);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_RECORD_SYNC_H_
