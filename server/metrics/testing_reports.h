#ifndef OPTSTATE_SERVER_METRICS_TESTING_REPORTS_H_
#define OPTSTATE_SERVER_METRICS_TESTING_REPORTS_H_

#include <string>

#include "optstate/v1/admin.pb.h"

namespace optstate::metrics {

// A job in host memory that has taken steps.
v1::Job HostJob(const std::string& name);
// A job that has everything that a job may have: records on two directories,
// parameters on disk, two devices of which one is lost, speculation.
v1::Job FullJob(const std::string& name);
// A job whose engine hangs, as the Admin service lists it.
v1::Job HangingJob(const std::string& name);

// A node with one job of each kind, disks and devices: every metric has
// samples.
v1::NodeReport FullReport();

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_TESTING_REPORTS_H_
