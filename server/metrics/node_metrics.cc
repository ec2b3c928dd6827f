#include "server/metrics/node_metrics.h"

#include <google/protobuf/util/json_util.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <set>
#include <utility>

#include "server/metrics/counter_samples.h"
#include "server/metrics/node_samples.h"
#include "server/metrics/samples.h"
#include "server/metrics/shown_jobs.h"

namespace optstate::metrics {
namespace {

// Leaves the entries of those jobs alone.
template <typename Entries>
void Keep(const std::set<std::string>& jobs, Entries* entries) {
  entries->erase(std::remove_if(entries->begin(), entries->end(),
                                [&jobs](const auto& entry) {
                                  return !jobs.contains(entry.job());
                                }),
                 entries->end());
}

v1::NodeReport WithShownJobs(const v1::NodeReport& report) {
  v1::NodeReport shown = report;
  std::set<std::string> names;
  // The indices ascend: what is moved to the front is not one of those that
  // come.
  int count = 0;
  for (const int i : ShownJobs(report)) {
    names.insert(report.jobs(i).name());
    shown.mutable_jobs()->SwapElements(count++, i);
  }
  shown.mutable_jobs()->DeleteSubrange(count, report.jobs_size() - count);
  Keep(names, shown.mutable_tiers()->mutable_memory()->mutable_jobs());
  for (auto& tier : *shown.mutable_tiers()->mutable_directories()) {
    Keep(names, tier.mutable_jobs());
  }
  for (auto& device : *shown.mutable_devices()->mutable_devices()) {
    Keep(names, device.mutable_jobs());
  }
  auto& unanswered = *shown.mutable_status()->mutable_unanswered();
  unanswered.erase(
      std::remove_if(unanswered.begin(), unanswered.end(),
                     [](const auto& job) { return job.name().empty(); }),
      unanswered.end());
  return shown;
}

}  // namespace

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
  // It fails on messages of google/protobuf/any.proto alone.
  (void)google::protobuf::util::MessageToJsonString(
      static_cast<int>(ShownJobs(report).size()) < report.jobs_size()
          ? WithShownJobs(report)
          : report,
      &json, options);
  return json;
}

}  // namespace optstate::metrics
