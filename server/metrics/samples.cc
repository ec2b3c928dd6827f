#include "server/metrics/samples.h"

namespace optstate::metrics {

Samples::Samples() {
  for (const MetricInfo& info : AllMetrics()) {
    prometheus::MetricFamily& family =
        families_[static_cast<size_t>(info.metric)];
    family.name = info.name;
    family.help = info.help;
    family.type = info.type;
  }
}

void Samples::Add(Metric metric, double value, Labels labels) {
  prometheus::MetricFamily& family = families_[static_cast<size_t>(metric)];
  prometheus::ClientMetric& sample = family.metric.emplace_back();
  sample.label = std::move(labels);
  if (family.type == prometheus::MetricType::Counter) {
    sample.counter.value = value;
  } else {
    sample.gauge.value = value;
  }
}

void Samples::AddHistogram(Metric metric,
                           prometheus::ClientMetric::Histogram value,
                           Labels labels) {
  prometheus::ClientMetric& sample =
      families_[static_cast<size_t>(metric)].metric.emplace_back();
  sample.label = std::move(labels);
  sample.histogram = std::move(value);
}

std::vector<prometheus::MetricFamily> Samples::Take() && {
  std::vector<prometheus::MetricFamily> taken;
  for (prometheus::MetricFamily& family : families_) {
    if (!family.metric.empty()) taken.push_back(std::move(family));
  }
  return taken;
}

}  // namespace optstate::metrics
