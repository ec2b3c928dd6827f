#ifndef OPTSTATE_SERVER_CONFIG_LISTEN_ADDRESS_H_
#define OPTSTATE_SERVER_CONFIG_LISTEN_ADDRESS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::config {

// An address that the daemon listens on: a unix socket or a TCP address.
struct ListenAddress {
  std::string unix_path;  // empty: TCP
  std::string host;
  uint16_t port = 0;  // 0: the kernel chooses
};

// Parses "unix:/PATH", "HOST:PORT" or "[IPV6]:PORT". INVALID_ARGUMENT says what
// is wrong with the text.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text);

// Returns INVALID_ARGUMENT unless `path` is absolute and fits a socket address.
absl::Status CheckUnixSocketPath(absl::string_view path);

// Returns INVALID_ARGUMENT unless the HTTP server of metrics, which takes a
// list of addresses as one text, can listen on such a path.
absl::Status CheckHttpSocketPath(absl::string_view path);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_LISTEN_ADDRESS_H_
