// Prints the metrics of a node that has everything a node may have.

#include <iostream>

#include "server/metrics/node_metrics.h"
#include "server/metrics/node_reports.h"
#include "server/metrics/testing_reports.h"

namespace {

class FullNode : public optstate::metrics::NodeSource {
 public:
  optstate::v1::NodeReport DescribeNode(absl::Time) override {
    return optstate::metrics::FullReport();
  }
  bool IsPublic(const optstate::v1::Event&) override { return true; }
};

}  // namespace

int main() {
  FullNode node;
  optstate::metrics::NodeReports reports(&node);
  std::cout << ToText(optstate::metrics::NodeMetrics(&reports));
  return 0;
}
