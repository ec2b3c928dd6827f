#ifndef OPTSTATE_SERVER_METRICS_SHOWN_JOBS_H_
#define OPTSTATE_SERVER_METRICS_SHOWN_JOBS_H_

#include <vector>

#include "optstate/v1/admin.pb.h"

namespace optstate::metrics {

// The most jobs that have samples of their own and a place in the JSON.
inline constexpr int kJobsMax = 256;

// Returns the indices, ascending, of the jobs of a report that are shown: all
// that have a name, which private ones lack, or else kJobsMax. FAILED ones come
// before those whose engine gives no answer, these before RECOVERING ones,
// these before those with ranks, and all of them before the others; those alike
// in that are taken by name. So whoever looks
// for what is wrong finds it, however many jobs a node has.
std::vector<int> ShownJobs(const v1::NodeReport& report);

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_SHOWN_JOBS_H_
