#include "server/accept/peer_credentials.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::accept {
namespace {

constexpr size_t kIpv6NetworkBytes = 8;

// Returns the peer's address; "unknown" when the peer has gone already.
std::string AddressOf(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return "unknown";
  }
  char text[INET6_ADDRSTRLEN] = "unknown";
  if (address.ss_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &ipv4.sin_addr, text, sizeof(text));
    return text;
  }
  if (address.ss_family != AF_INET6) return text;
  in6_addr ipv6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&ipv6)) {
    ::inet_ntop(AF_INET, &ipv6.s6_addr[12], text, sizeof(text));
    return text;
  }
  if (!IN6_IS_ADDR_LOOPBACK(&ipv6)) {
    std::memset(&ipv6.s6_addr[kIpv6NetworkBytes], 0,
                sizeof(ipv6) - kIpv6NetworkBytes);
  }
  ::inet_ntop(AF_INET6, &ipv6, text, sizeof(text));
  return text;
}

}  // namespace

std::string PeerCredentials::quota_name() const {
  const bool is_named = is_unix() || !caller.identity.empty();
  return is_named ? caller.name() : absl::StrCat("address ", address);
}

absl::StatusOr<PeerCredentials> GetPeerCredentials(
    int fd, bool is_unix, const access::UnixRoles& roles) {
  if (!is_unix) {
    return PeerCredentials{.caller = {.via = access::Via::kInsecureTcp},
                           .address = AddressOf(fd)};
  }
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return OsError(errno, "getsockopt SO_PEERCRED");
  }
  return PeerCredentials{
      .caller = access::UnixCaller(credentials.uid,
                                   roles.OfPeer(fd, credentials.gid)),
      .pid = credentials.pid};
}

}  // namespace optstate::accept
