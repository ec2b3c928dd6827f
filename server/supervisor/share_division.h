#ifndef OPTSTATE_SERVER_SUPERVISOR_SHARE_DIVISION_H_
#define OPTSTATE_SERVER_SUPERVISOR_SHARE_DIVISION_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace optstate::supervisor {

// A job that competes for something with others.
struct WeighedJob {
  uid_t owner = 0;
  uint32_t weight = 0;  // among the owner's jobs
};

// Divides something in two levels: between the owners of jobs by `weight_of`
// them, and each owner's part between its jobs by theirs. Returns one weight
// for each job that says the same in one level. Their sum is that of the jobs'
// own weights, so that those of a single owner stay as they are.
std::map<std::string, double> DivideByOwners(
    const std::map<std::string, WeighedJob>& jobs,
    const std::function<uint32_t(uid_t)>& weight_of);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SHARE_DIVISION_H_
