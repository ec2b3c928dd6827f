#ifndef OPTSTATE_SERVER_CONFIG_ACCESS_SETTING_H_
#define OPTSTATE_SERVER_CONFIG_ACCESS_SETTING_H_

#include <string>
#include <utility>
#include <vector>

#include "optstate/v1/config.pb.h"

namespace optstate::config {

// Checks `tls`, `access` and `insecure_tcp` with the TCP addresses of `listen`,
// without looking at files. Returns pairs of a field and what is wrong with it.
std::vector<std::pair<std::string, std::string>> CheckAccess(
    const v1::DaemonConfig& config);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_ACCESS_SETTING_H_
