#ifndef OPTSTATE_SERVER_METRICS_NODE_METRICS_H_
#define OPTSTATE_SERVER_METRICS_NODE_METRICS_H_

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <string>
#include <vector>

#include "optstate/v1/admin.pb.h"
#include "server/metrics/node_reports.h"

namespace optstate::metrics {

// All metrics of the daemon: what a report says of the node and of its jobs,
// and what the supervisor has counted (observe/counters.h).
//
// Threads: thread-safe. Collect() blocks as NodeReports::Get() does.
class NodeMetrics final : public prometheus::Collectable {
 public:
  // `reports` outlives the object.
  explicit NodeMetrics(NodeReports* reports) : reports_(reports) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  NodeReports* const reports_;
};

// Writes metrics in Prometheus' text format, version 0.0.4.
std::string ToText(const prometheus::Collectable& metrics);

// Writes a report in the JSON mapping of protobuf, with the names of the .proto
// file and with fields that have their default. Jobs beyond ShownJobs() are
// left out; status.job_count is of all.
std::string ToJson(const v1::NodeReport& report);

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_NODE_METRICS_H_
