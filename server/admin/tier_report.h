#ifndef OPTSTATE_SERVER_ADMIN_TIER_REPORT_H_
#define OPTSTATE_SERVER_ADMIN_TIER_REPORT_H_

#include <vector>

#include "optstate/v1/admin.pb.h"
#include "optstate/v1/config.pb.h"
#include "server/supervisor/supervisor_control.h"

namespace optstate::admin {

// Describes memory and each directory on a disk from files alone: no engine is
// asked, so one that hangs hides nothing. With `request.measure` the
// directories are measured, which takes seconds.
v1::DescribeTiersReply DescribeTiers(
    const v1::DaemonConfig& config,
    const std::vector<supervisor::JobSummary>& jobs,
    const v1::DescribeTiersRequest& request);

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_TIER_REPORT_H_
