#ifndef OPTSTATE_SERVER_SCHEDULER_AVAILABLE_CORES_H_
#define OPTSTATE_SERVER_SCHEDULER_AVAILABLE_CORES_H_

#include <string>

namespace optstate {

// Cores that this process may use: the affinity mask, and no more than the CPU
// quotas of its cgroups (v1 or v2, up to the root) allow, rounded up. At
// least 1.
int AvailableCores();

// The quota part below another root than "/", so that tests can supply the
// files; `limit` when there is none.
int CgroupCoresBelow(const std::string& root, int limit);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SCHEDULER_AVAILABLE_CORES_H_
