#ifndef OPTSTATE_SERVER_SCHEDULER_WORKERS_AVAILABLE_CORES_H_
#define OPTSTATE_SERVER_SCHEDULER_WORKERS_AVAILABLE_CORES_H_

#include <string>

namespace optstate::scheduler {

// Returns the number of cores that this process may use: those of the affinity
// mask, and no more than the CPU quotas of its cgroups (v1 or v2, up to the
// root) allow, rounded up. At least 1.
int AvailableCores();

// Returns the quota part below another root than "/", so that tests can supply
// the files; `limit` when there is no quota.
int CgroupCoresBelow(const std::string& root, int limit);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_WORKERS_AVAILABLE_CORES_H_
