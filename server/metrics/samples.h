#ifndef OPTSTATE_SERVER_METRICS_SAMPLES_H_
#define OPTSTATE_SERVER_METRICS_SAMPLES_H_

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "server/metrics/metric_table.h"

namespace optstate::metrics {

using Label = prometheus::ClientMetric::Label;
using Labels = std::vector<Label>;

// The samples of one scrape, by metric.
//
// Threads: not thread-safe.
class Samples {
 public:
  Samples();

  // Adds a sample of a counter or a gauge.
  void Add(Metric metric, double value, Labels labels = {});
  void AddHistogram(Metric metric, prometheus::ClientMetric::Histogram value,
                    Labels labels);

  // Returns the metrics that have samples, in the table's order.
  std::vector<prometheus::MetricFamily> Take() &&;

 private:
  std::array<prometheus::MetricFamily, static_cast<size_t>(Metric::kEnd)>
      families_;
};

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_SAMPLES_H_
