#ifndef OPTSTATE_SERVER_METRICS_NODE_SAMPLES_H_
#define OPTSTATE_SERVER_METRICS_NODE_SAMPLES_H_

#include "optstate/v1/admin.pb.h"
#include "server/metrics/samples.h"

namespace optstate::metrics {

// Adds what a report says: of the node, of its tiers, and of each job of
// ShownJobs().
void AddNode(const v1::NodeReport& report, Samples* samples);

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_NODE_SAMPLES_H_
