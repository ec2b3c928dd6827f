#ifndef OPTSTATE_SERVER_METRICS_METRICS_SERVER_H_
#define OPTSTATE_SERVER_METRICS_METRICS_SERVER_H_

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/metrics/http_server.h"
#include "server/metrics/node_metrics.h"
#include "server/metrics/node_reports.h"

namespace optstate::metrics {

// The daemon's HTTP server, read-only: /metrics for Prometheus, a page for
// people at /, and /status.json, from which the page lives.
//
// Threads: Open() and the destructor are the owner's. The destructor waits for
// answers that are being made, and so for the source.
class MetricsServer {
 public:
  // Listens on DaemonConfig.metrics.address. Until Open() it answers that the
  // daemon starts, because a source may have to wait for a loop that does not
  // run yet. Errors name the setting and the address. `source` outlives the
  // object.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& address, NodeSource* source);
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  void Open() { is_open_ = true; }
  // The address that it listens on, see HttpServer.
  const std::string& name() const { return http_->name(); }

 private:
  explicit MetricsServer(NodeSource* source)
      : reports_(source), metrics_(&reports_) {}

  HttpReply Answer(absl::string_view path);

  NodeReports reports_;
  const NodeMetrics metrics_;
  std::atomic<bool> is_open_ = false;
  std::unique_ptr<HttpServer> http_;  // last: its threads use all the others
};

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_METRICS_SERVER_H_
