#include "server/metrics/node_metrics.h"

#include <google/protobuf/util/json_util.h>
#include <prometheus/text_serializer.h>

#include <utility>

#include "server/metrics/counter_samples.h"
#include "server/metrics/node_samples.h"
#include "server/metrics/samples.h"

namespace optstate::metrics {

std::vector<prometheus::MetricFamily> NodeMetrics::Collect() const {
  Samples samples;
  AddNode(*reports_->Get(), &samples);
  AddCounters(&samples);
  return std::move(samples).Take();
}

std::string ToText(const prometheus::Collectable& metrics) {
  return prometheus::TextSerializer().Serialize(metrics.Collect());
}

std::string ToJson(const v1::NodeReport& report) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string json;
  const auto write = [&](const v1::NodeReport& whole) {
    // It fails on messages of google/protobuf/any.proto alone.
    (void)google::protobuf::util::MessageToJsonString(whole, &json, options);
  };
  if (report.jobs_size() <= kJobsMax) {
    write(report);
    return json;
  }
  v1::NodeReport first = report;
  first.mutable_jobs()->DeleteSubrange(kJobsMax, report.jobs_size() - kJobsMax);
  write(first);
  return json;
}

}  // namespace optstate::metrics
