#include "server/config/listen_address.h"

#include <sys/un.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/types/status_macros.h"

namespace optstate::config {
namespace {

absl::Status BadAddress(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("listen address \"", text, "\": ", why,
                   " (expected HOST:PORT, [IPV6]:PORT or unix:/PATH)"));
}

}  // namespace

absl::Status CheckUnixSocketPath(absl::string_view path) {
  if (!absl::StartsWith(path, "/")) {
    return absl::InvalidArgumentError(
        absl::StrCat("socket path \"", path, "\" must be absolute"));
  }
  constexpr size_t kPathBytesMax = sizeof(sockaddr_un::sun_path) - 1;
  if (path.size() > kPathBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "socket path \"", path, "\" has ", path.size(),
        " bytes, the kernel takes ", kPathBytesMax, ": use a shorter one"));
  }
  return absl::OkStatus();
}

absl::Status CheckHttpSocketPath(absl::string_view path) {
  if (!absl::StrContains(path, ",") && !absl::StrContains(path, ":") &&
      !absl::EndsWith(path, " ") && !absl::EndsWith(path, "\t")) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "socket path \"", path,
      "\" has a comma or a colon, or ends with a space: the HTTP server cannot "
      "listen there"));
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text) {
  ListenAddress address;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    OPTSTATE_RETURN_IF_ERROR(CheckUnixSocketPath(rest));
    address.unix_path = std::string(rest);
    return address;
  }
  const size_t colon = rest.rfind(':');
  if (colon == absl::string_view::npos) return BadAddress(text, "has no port");
  absl::string_view host = rest.substr(0, colon);
  uint32_t port = 0;
  if (!absl::SimpleAtoi(rest.substr(colon + 1), &port) || port > 65535) {
    return BadAddress(text, "the port must be a number from 0 to 65535");
  }
  if (absl::ConsumePrefix(&host, "[")) {
    if (!absl::ConsumeSuffix(&host, "]")) return BadAddress(text, "no ']'");
  } else if (absl::StrContains(host, ":")) {
    return BadAddress(text, "an IPv6 address needs brackets");
  }
  if (host.empty()) return BadAddress(text, "has no host");
  address.host = std::string(host);
  address.port = static_cast<uint16_t>(port);
  return address;
}

}  // namespace optstate::config
