#ifndef OPTSTATE_SERVER_METRICS_ADMIN_SOURCE_H_
#define OPTSTATE_SERVER_METRICS_ADMIN_SOURCE_H_

#include "server/admin/admin_service.h"
#include "server/metrics/node_reports.h"

namespace optstate::metrics {

// The daemon's own source: its Admin service.
//
// Threads: thread-safe.
class AdminSource final : public NodeSource {
 public:
  // `service` outlives the object.
  explicit AdminSource(admin::AdminService* service) : service_(service) {}

  v1::NodeReport DescribeNode(absl::Time deadline) override {
    return service_->DescribeNode(deadline);
  }
  bool IsPublic(const v1::Event& event) override {
    return service_->MaySee(event, /*caller=*/nullptr);
  }

 private:
  admin::AdminService* const service_;
};

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_ADMIN_SOURCE_H_
