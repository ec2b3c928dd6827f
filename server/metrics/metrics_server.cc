#include "server/metrics/metrics_server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/config/listen_address.h"
#include "server/metrics/page.h"

namespace optstate::metrics {
namespace {

constexpr char kPlain[] = "text/plain; charset=utf-8";

absl::StatusOr<std::unique_ptr<HttpServer>> StartHttp(
    const std::string& address, HttpServer::Handler handler) {
  OPTSTATE_ASSIGN_OR_RETURN(const config::ListenAddress parsed,
                            config::ParseListenAddress(address));
  return HttpServer::Start(parsed, std::move(handler), {});
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& address, NodeSource* source) {
  std::unique_ptr<MetricsServer> server(new MetricsServer(source));
  auto http = StartHttp(address, [raw = server.get()](absl::string_view path) {
    return raw->Answer(path);
  });
  if (!http.ok()) {
    return absl::Status(http.status().code(),
                        absl::StrCat("metrics.address (--metrics) \"", address,
                                     "\": ", http.status().message()));
  }
  server->http_ = *std::move(http);
  return server;
}

HttpReply MetricsServer::Answer(absl::string_view path) {
  if (path == "/")
    return {200, "text/html; charset=utf-8", std::string(Page())};
  const bool is_metrics = path == "/metrics";
  if (!is_metrics && path != "/status.json") {
    return {404, kPlain, "there are /, /metrics and /status.json\n"};
  }
  if (!is_open_) return {503, kPlain, "the daemon is starting\n"};
  if (is_metrics) {
    return {200, "text/plain; version=0.0.4; charset=utf-8", ToText(metrics_)};
  }
  return {200, "application/json; charset=utf-8", ToJson(*reports_.Get())};
}

}  // namespace optstate::metrics
