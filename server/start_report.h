#ifndef OPTSTATE_SERVER_START_REPORT_H_
#define OPTSTATE_SERVER_START_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "optstate/v1/config.pb.h"
#include "server/accept/configured_listeners.h"
#include "server/admin/server_info.h"

namespace optstate::server {

// Returns the workers that each engine gets.
uint32_t WorkersOf(const v1::DaemonConfig& config);

// Describes the daemon, which has just started. `pages` is a sentence on the
// page size of the jobs' files.
admin::ServerInfo DescribeServer(const v1::DaemonConfig& config,
                                 const std::string& pages,
                                 const accept::Listeners& listeners);

// Logs a line on each of state directory, addresses, groups with a role,
// workers.
void LogStart(const admin::ServerInfo& info);

// Warns when the limit of open files is below what `config.limits` may need. An
// engine takes three fds: its control socket, its process and its gRPC
// connection.
void WarnOfFewFds(const v1::DaemonConfig& config);

}  // namespace optstate::server

#endif  // OPTSTATE_SERVER_START_REPORT_H_
