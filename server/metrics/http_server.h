#ifndef OPTSTATE_SERVER_METRICS_HTTP_SERVER_H_
#define OPTSTATE_SERVER_METRICS_HTTP_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/config/listen_address.h"

namespace optstate::metrics {

struct HttpReply {
  int code = 200;
  std::string content_type;
  std::string body;
};

// An HTTP server that answers GET and HEAD with what a handler says, and all
// else with an error: it reads no file, takes no body and keeps no connection.
//
// Its threads, the connections that wait for one, the size of a request and the
// time that it may take are limited. A client that sends or reads slowly has a
// thread for that time; as many of them as there are threads keep others
// waiting.
//
// Threads: the handler is called from several threads at once.
class HttpServer {
 public:
  using Handler = std::function<HttpReply(absl::string_view path)>;
  struct Limits {
    int threads = 4;
    // Limits reading the request, and again writing the answer.
    absl::Duration patience = absl::Seconds(5);
  };
  // Limit of a request, with its headers.
  static constexpr int kRequestBytesMax = 8192;
  // Connections that wait for a thread, beside those in the socket's backlog.
  static constexpr int kWaitingMax = 16;

  // Listens on a TCP address. Errors name the address.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(
      const config::ListenAddress& address, Handler handler,
      const Limits& limits);
  // Closes all connections, when the handler's calls have returned.
  virtual ~HttpServer() = default;

  // The address that it listens on: "unix:PATH", or "HOST:PORT" with the port
  // that the kernel chose.
  virtual const std::string& name() const = 0;
};

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_HTTP_SERVER_H_
