#include "client/endpoint/endpoint.h"

#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/endpoint/dial.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr absl::string_view kForms =
    "expected unix:PATH, grpc:HOST:PORT, grpcs:HOST:PORT, grpc:unix:PATH or "
    "embedded";
constexpr absl::string_view kSystemSocket = "/run/optstate/optstated.sock";
constexpr absl::string_view kUserSocket = "/optstate/optstated.sock";
// The socket of a live daemon accepts at once.
constexpr absl::Duration kProbeTimeout = absl::Seconds(1);

absl::Status BadEndpoint(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("endpoint \"", text, "\": ", why));
}

absl::StatusOr<Endpoint> UnixEndpoint(Endpoint::Kind kind,
                                      absl::string_view path,
                                      absl::string_view text) {
  if (path.empty()) return BadEndpoint(text, "the path is empty");
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return BadEndpoint(text, absl::StrCat("the path has ", path.size(),
                                          " bytes; a unix "
                                          "socket's has at most ",
                                          sizeof(sockaddr_un::sun_path) - 1));
  }
  Endpoint endpoint;
  endpoint.kind = kind;
  endpoint.path = std::string(path);
  return endpoint;
}

absl::StatusOr<Endpoint> TcpEndpoint(Endpoint::Kind kind,
                                     absl::string_view address,
                                     absl::string_view text) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) {
    return BadEndpoint(text, kind == Endpoint::Kind::kGrpcTls
                                 ? "expected grpcs:HOST:PORT"
                                 : "expected grpc:HOST:PORT");
  }
  absl::string_view host = address.substr(0, colon);
  const absl::string_view port = address.substr(colon + 1);
  const bool bracketed =
      absl::ConsumePrefix(&host, "[") && absl::ConsumeSuffix(&host, "]");
  if (!bracketed && absl::StrContains(host, ':')) {
    return BadEndpoint(text, "an IPv6 address needs brackets: [::1]:PORT");
  }
  uint32_t number = 0;
  if (!absl::SimpleAtoi(port, &number) || number < 1 || number > 65535) {
    return BadEndpoint(text, absl::StrCat("\"", port, "\" is not a port"));
  }
  if (host.empty()) return BadEndpoint(text, "the host is empty");
  if (text.find_first_of("/ \t") != text.npos) {
    return BadEndpoint(text, "a host has no slash and no space");
  }
  Endpoint endpoint;
  endpoint.kind = kind;
  endpoint.host = std::string(host);
  endpoint.port = std::string(port);
  return endpoint;
}

bool Exists(const std::string& path) {
  return ::access(path.c_str(), F_OK) == 0;
}

bool IsSocket(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode);
}

// Returns whether only this user can change the directory: in /tmp any user can
// make a directory of any name.
bool IsOursAlone(const std::string& directory) {
  struct stat info;
  return ::lstat(directory.c_str(), &info) == 0 && S_ISDIR(info.st_mode) &&
         info.st_uid == ::geteuid() && (info.st_mode & 022) == 0;
}

std::string OwnDirectory() {
  return absl::StrCat("/tmp/optstate-", ::geteuid());
}

std::vector<std::string> NodeSockets() {
  std::vector<std::string> paths = {std::string(kSystemSocket)};
  const char* runtime_dir = std::getenv("XDG_RUNTIME_DIR");
  if (runtime_dir != nullptr && *runtime_dir != '\0') {
    paths.push_back(absl::StrCat(runtime_dir, kUserSocket));
  }
  const std::string own = OwnDirectory();
  if (IsOursAlone(own)) paths.push_back(own + "/optstated.sock");
  return paths;
}

Endpoint NodeEndpoint(AwayDaemon away) {
  std::optional<Endpoint> waits;
  for (std::string& path : NodeSockets()) {
    Endpoint endpoint;
    endpoint.kind = Endpoint::Kind::kShm;
    endpoint.path = std::move(path);
    const absl::Status dialled =
        Dial(endpoint, absl::Now() + kProbeTimeout).status();
    if (dialled.ok()) return endpoint;
    // A stopped daemon removes its socket; a socket that this user may not use
    // does not count.
    if (!waits && !absl::IsPermissionDenied(dialled) &&
        IsSocket(endpoint.path)) {
      waits = std::move(endpoint);
    }
  }
  return away == AwayDaemon::kCounts && waits ? *waits : Endpoint();
}

}  // namespace

std::string Endpoint::ToString() const {
  switch (kind) {
    case Kind::kShm:
      return absl::StrCat("unix:", path);
    case Kind::kGrpcUnix:
      return absl::StrCat("grpc:unix:", path);
    case Kind::kGrpcTcp:
    case Kind::kGrpcTls: {
      const bool ipv6 = absl::StrContains(host, ':');
      return absl::StrCat(kind == Kind::kGrpcTls ? "grpcs:" : "grpc:",
                          ipv6 ? "[" : "", host, ipv6 ? "]:" : ":", port);
    }
    case Kind::kEmbedded:
      break;
  }
  return "embedded";
}

absl::StatusOr<Endpoint> ParseEndpoint(absl::string_view text) {
  absl::string_view rest = text;
  if (rest == "embedded") return Endpoint();
  if (absl::ConsumePrefix(&rest, "unix:")) {
    return UnixEndpoint(Endpoint::Kind::kShm, rest, text);
  }
  if (absl::ConsumePrefix(&rest, "grpc:unix:")) {
    return UnixEndpoint(Endpoint::Kind::kGrpcUnix, rest, text);
  }
  if (absl::ConsumePrefix(&rest, "grpc:")) {
    return TcpEndpoint(Endpoint::Kind::kGrpcTcp, rest, text);
  }
  if (absl::StartsWith(rest, "grpcs:unix:")) {
    return BadEndpoint(text, "a unix socket has no TLS: use grpc:unix:PATH");
  }
  if (absl::ConsumePrefix(&rest, "grpcs:")) {
    return TcpEndpoint(Endpoint::Kind::kGrpcTls, rest, text);
  }
  return BadEndpoint(text, kForms);
}

std::string TokenFor(const Endpoint& endpoint) {
  const char* const token = std::getenv("OPTSTATE_TOKEN");
  const bool is_hidden = endpoint.kind == Endpoint::Kind::kGrpcTls;
  return is_hidden && token != nullptr ? token : "";
}

std::string DescribeNodeSockets() {
  std::vector<std::string> found;
  for (std::string& path : NodeSockets()) {
    Endpoint endpoint;
    endpoint.kind = Endpoint::Kind::kShm;
    endpoint.path = path;
    const absl::Status dialled =
        Dial(endpoint, absl::Now() + kProbeTimeout).status();
    absl::string_view what = "a daemon that accepts";
    if (!Exists(path)) {
      what = "no such file";
    } else if (absl::IsPermissionDenied(dialled)) {
      what = "you may not connect to it";
    } else if (!dialled.ok()) {
      what = "nobody accepts there: its daemon is gone";
    }
    found.push_back(absl::StrCat(path, " (", what, ")"));
  }
  const std::string own = OwnDirectory();
  if (Exists(own) && !IsOursAlone(own)) {
    found.push_back(absl::StrCat(own, " (left alone: others can write there)"));
  }
  return absl::StrJoin(found, ", ");
}

bool HadDaemon(const Endpoint& endpoint) {
  if (endpoint.path.empty()) return false;
  return IsSocket(endpoint.path) || Exists(endpoint.path + ".lock");
}

absl::StatusOr<Endpoint> ResolveEndpoint(absl::string_view text,
                                         AwayDaemon away) {
  if (!text.empty()) return ParseEndpoint(text);
  const char* variable = std::getenv("OPTSTATE_ENDPOINT");
  if (variable == nullptr || *variable == '\0') return NodeEndpoint(away);
  absl::StatusOr<Endpoint> endpoint = ParseEndpoint(variable);
  if (endpoint.ok()) return endpoint;
  return Annotate(endpoint.status(), "$OPTSTATE_ENDPOINT");
}

}  // namespace optstate::client
