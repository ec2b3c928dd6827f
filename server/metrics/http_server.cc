#include "server/metrics/http_server.h"

#include <civetweb.h>
#include <netdb.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/accept/socket_file.h"
#include "server/os/file_lock.h"

namespace optstate::metrics {
namespace {

constexpr size_t kWriteBytes = 64 << 10;

// The page is one file with its own script and style; it asks this server alone
// for data. No other site may show or read any of it.
constexpr absl::string_view kSecurityHeaders =
    "Cache-Control: no-store\r\n"
    "Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "X-Frame-Options: DENY\r\n";

// CivetWeb's own options, as pairs of name and value.
using Options = std::vector<std::string>;

// The first line that CivetWeb logs while this thread starts a server: only
// there does it say why it cannot listen.
thread_local std::string* start_log = nullptr;

HttpReply Error(int code, absl::string_view text) {
  return {code, "text/plain; charset=utf-8", absl::StrCat(text, "\n")};
}

std::string HeadOf(mg_connection* connection, const HttpReply& reply) {
  std::string head = absl::StrCat(
      "HTTP/1.1 ", reply.code, " ",
      mg_get_response_code_text(connection, reply.code), "\r\nDate: ",
      absl::FormatTime("%a, %d %b %Y %H:%M:%S GMT", absl::Now(),
                       absl::UTCTimeZone()),
      "\r\nConnection: close\r\nContent-Type: ", reply.content_type,
      "\r\nContent-Length: ", reply.body.size(), "\r\n", kSecurityHeaders);
  if (reply.code == 405) absl::StrAppend(&head, "Allow: GET, HEAD\r\n");
  return absl::StrCat(head, "\r\n");
}

// Writes within `patience`, or gives up: the connection is closed then.
void Write(mg_connection* connection, absl::string_view bytes,
           absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  while (!bytes.empty() && absl::Now() < deadline) {
    const size_t size = std::min(bytes.size(), kWriteBytes);
    const int written = mg_write(connection, bytes.data(), size);
    if (written <= 0) return;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

// Resolves a host to the numeric address that CivetWeb listens on.
absl::StatusOr<std::string> NumericAddress(
    const config::ListenAddress& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  int error = ::getaddrinfo(address.host.c_str(),
                            absl::StrCat(address.port).c_str(), &hints, &found);
  if (error != 0) return absl::InvalidArgumentError(::gai_strerror(error));
  const absl::Cleanup free_found = [found] { ::freeaddrinfo(found); };
  char host[NI_MAXHOST];
  error = ::getnameinfo(found->ai_addr, found->ai_addrlen, host, sizeof(host),
                        nullptr, 0, NI_NUMERICHOST);
  if (error != 0) return absl::InvalidArgumentError(::gai_strerror(error));
  return found->ai_family == AF_INET6 ? absl::StrCat("[", host, "]")
                                      : std::string(host);
}

class CivetServer final : public HttpServer {
 public:
  CivetServer(Handler handler, const Limits& limits)
      : handler_(std::move(handler)), limits_(limits) {
    mg_init_library(MG_FEATURES_DEFAULT);
  }
  ~CivetServer() override {
    if (context_ != nullptr) mg_stop(context_);
    mg_exit_library();
  }

  absl::Status Listen(const config::ListenAddress& address);
  const std::string& name() const override { return name_; }

 private:
  static int OnRequest(mg_connection* connection);
  static int OnError(mg_connection* connection, int code, const char* text);
  static int OnLog(const mg_connection* connection, const char* text);
  static CivetServer* Of(const mg_connection* connection) {
    return static_cast<CivetServer*>(
        mg_get_user_data(mg_get_context(connection)));
  }

  absl::Status ListenUnix(const std::string& path);
  absl::Status ListenTcp(const config::ListenAddress& address);
  absl::Status StartOn(const std::string& ports);
  void Answer(mg_connection* connection, const mg_request_info& request) const;
  void Send(mg_connection* connection, const HttpReply& reply,
            bool with_body) const;

  const Handler handler_;
  const Limits limits_;
  std::optional<os::FileLock> lock_;  // released after the socket's removal
  std::string name_;
  mg_context* context_ = nullptr;
};

absl::Status CivetServer::Listen(const config::ListenAddress& address) {
  return address.unix_path.empty() ? ListenTcp(address)
                                   : ListenUnix(address.unix_path);
}

absl::Status CivetServer::ListenUnix(const std::string& path) {
  OPTSTATE_RETURN_IF_ERROR(config::CheckHttpSocketPath(path));
  OPTSTATE_RETURN_IF_ERROR(accept::PrepareSocketFolder(path));
  OPTSTATE_ASSIGN_OR_RETURN(
      lock_, os::FileLock::Take(path + ".lock", absl::StrCat("socket ", path)));
  OPTSTATE_RETURN_IF_ERROR(accept::RemoveDeadSocket(path));
  OPTSTATE_RETURN_IF_ERROR(StartOn("x" + path));
  name_ = "unix:" + path;
  // Whoever reaches it may read it: its directory says who that is.
  if (::chmod(path.c_str(), 0666) == 0) return absl::OkStatus();
  return OsError(errno, absl::StrCat("chmod ", path));
}

absl::Status CivetServer::ListenTcp(const config::ListenAddress& address) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::string host, NumericAddress(address));
  OPTSTATE_RETURN_IF_ERROR(StartOn(absl::StrCat(host, ":", address.port)));
  mg_server_port port{};
  if (mg_get_server_ports(context_, 1, &port) != 1) {
    return absl::InternalError("the HTTP server listens on no port");
  }
  name_ = absl::StrCat(host, ":", port.port);
  return absl::OkStatus();
}

absl::Status CivetServer::StartOn(const std::string& ports) {
  const Options options = {
      "listening_ports", ports, "num_threads", absl::StrCat(limits_.threads),
      "connection_queue", absl::StrCat(kWaitingMax), "listen_backlog",
      absl::StrCat(kWaitingMax), "max_request_size",
      absl::StrCat(kRequestBytesMax), "request_timeout_ms",
      absl::StrCat(absl::ToInt64Milliseconds(limits_.patience)),
      "enable_keep_alive", "no", "tcp_nodelay", "1", "decode_url", "no",
      // A name in a request's first line need not be this server's.
      "enable_auth_domain_check", "no"};
  std::vector<const char*> pointers;
  for (const std::string& option : options) pointers.push_back(option.c_str());
  pointers.push_back(nullptr);
  mg_callbacks callbacks{};
  callbacks.begin_request = OnRequest;
  callbacks.http_error = OnError;
  callbacks.log_message = OnLog;
  mg_init_data init{&callbacks, this, pointers.data()};
  char what[512] = {};
  mg_error_data error{nullptr, what, sizeof(what)};
  std::string why;
  start_log = &why;
  context_ = mg_start2(&init, &error);
  start_log = nullptr;
  if (context_ != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(why.empty() ? what : why);
}

int CivetServer::OnRequest(mg_connection* connection) {
  // A body that follows the request's headers is not waited for.
  mg_disable_connection_keep_alive(connection);
  const mg_request_info* const request = mg_get_request_info(connection);
  Of(connection)->Answer(connection, *request);
  // Any code means that CivetWeb does nothing more.
  return 200;
}

void CivetServer::Answer(mg_connection* connection,
                         const mg_request_info& request) const {
  const absl::string_view method = request.request_method;
  if (method != "GET" && method != "HEAD") {
    return Send(connection, Error(405, "GET and HEAD are all there is"), true);
  }
  Send(connection, handler_(request.local_uri_raw), method == "GET");
}

void CivetServer::Send(mg_connection* connection, const HttpReply& reply,
                       bool with_body) const {
  std::string bytes = HeadOf(connection, reply);
  if (with_body) absl::StrAppend(&bytes, reply.body);
  Write(connection, bytes, limits_.patience);
}

int CivetServer::OnError(mg_connection* connection, int code,
                         const char* text) {
  mg_disable_connection_keep_alive(connection);
  Of(connection)->Send(connection, Error(code, text), true);
  return 0;
}

int CivetServer::OnLog(const mg_connection*, const char* text) {
  if (start_log != nullptr && start_log->empty()) *start_log = text;
  // Clients cause these lines at will.
  spdlog::debug("HTTP: {}", text);
  return 1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(
    const config::ListenAddress& address, Handler handler,
    const Limits& limits) {
  auto server = std::make_unique<CivetServer>(std::move(handler), limits);
  OPTSTATE_RETURN_IF_ERROR(server->Listen(address));
  return server;
}

}  // namespace optstate::metrics
