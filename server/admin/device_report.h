#ifndef OPTSTATE_SERVER_ADMIN_DEVICE_REPORT_H_
#define OPTSTATE_SERVER_ADMIN_DEVICE_REPORT_H_

#include <string>

#include "optstate/v1/admin.pb.h"

namespace optstate::admin {

// Describes the devices of a daemon with this setting (DaemonConfig.devices)
// from what its jobs say. Emulated ones that no job uses are there too. CUDA's
// are not asked for: a driver that hangs or crashes may take an engine with it,
// but not the daemon.
v1::DescribeDevicesReply DescribeDevices(const std::string& setting,
                                         v1::ListJobsReply jobs);

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_DEVICE_REPORT_H_
