#ifndef OPTSTATE_SERVER_CONFIG_QUOTA_SETTING_H_
#define OPTSTATE_SERVER_CONFIG_QUOTA_SETTING_H_

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "optstate/v1/config.pb.h"

namespace optstate::config {

// Checks `quotas`, and looks their users and groups up. `daemon_uid`: the user
// of the daemon, who can have none. Returns pairs of a field, e.g. "quotas[1]",
// and what is wrong with it.
std::vector<std::pair<std::string, std::string>> CheckQuotas(
    const v1::DaemonConfig& config, uid_t daemon_uid);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_QUOTA_SETTING_H_
