#ifndef OPTSTATE_SERVER_CONFIG_SLEEP_DIRECTORY_H_
#define OPTSTATE_SERVER_CONFIG_SLEEP_DIRECTORY_H_

#include <string>

#include "optstate/v1/config.pb.h"

namespace optstate::config {

// Returns where jobs that are put to sleep lie: sleep_directory, else `asleep`
// below the first of nvme.directories; empty: nowhere.
std::string SleepDirectoryOf(const v1::DaemonConfig& config);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_SLEEP_DIRECTORY_H_
