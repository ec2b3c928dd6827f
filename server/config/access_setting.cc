#include "server/config/access_setting.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/config/listen_address.h"

namespace optstate::config {
namespace {

using Faults = std::vector<std::pair<std::string, std::string>>;

// Returns whether only this machine reaches the host's addresses, as its text
// says: nothing is looked up.
bool IsLoopback(const std::string& host) {
  in_addr ipv4;
  if (::inet_pton(AF_INET, host.c_str(), &ipv4) == 1) {
    return (ntohl(ipv4.s_addr) >> IN_CLASSA_NSHIFT) == IN_LOOPBACKNET;
  }
  in6_addr ipv6;
  if (::inet_pton(AF_INET6, host.c_str(), &ipv6) == 1) {
    return IN6_IS_ADDR_LOOPBACK(&ipv6);
  }
  return host == "localhost";
}

void CheckPath(const char* field, const std::string& path, Faults* faults) {
  if (path.empty() || absl::StartsWith(path, "/")) return;
  faults->emplace_back(field, "must be an absolute path");
}

void CheckFiles(const v1::DaemonConfig& config, Faults* faults) {
  const v1::TlsSettings& tls = config.tls();
  const v1::AccessSettings& access = config.access();
  CheckPath("tls.certificate_file", tls.certificate_file(), faults);
  CheckPath("tls.key_file", tls.key_file(), faults);
  CheckPath("tls.client_ca_file", tls.client_ca_file(), faults);
  CheckPath("access.identities_file", access.identities_file(), faults);
  CheckPath("access.tokens_file", access.tokens_file(), faults);
  if (tls.certificate_file().empty() != tls.key_file().empty()) {
    faults->emplace_back("tls.key_file",
                         "certificate_file and key_file go together");
  }
  if (tls.certificate_file().empty() && !tls.client_ca_file().empty()) {
    faults->emplace_back("tls.client_ca_file",
                         "needs certificate_file and key_file");
  }
  if (tls.client_ca_file().empty() != access.identities_file().empty()) {
    faults->emplace_back(
        "access.identities_file",
        "goes together with tls.client_ca_file: that says which certificates "
        "are believed, and this who their holders are");
  }
  if (!access.tokens_file().empty() &&
      (!tls.client_ca_file().empty() || tls.certificate_file().empty())) {
    faults->emplace_back(
        "access.tokens_file",
        "is for TLS (tls.certificate_file) without client certificates "
        "(tls.client_ca_file)");
  }
  if (!tls.certificate_file().empty() && tls.client_ca_file().empty() &&
      access.tokens_file().empty()) {
    faults->emplace_back(
        "tls.certificate_file",
        "with neither tls.client_ca_file nor access.tokens_file no client "
        "could say who it is, and none would be let in");
  }
}

}  // namespace

Faults CheckAccess(const v1::DaemonConfig& config) {
  Faults faults;
  CheckFiles(config, &faults);
  const bool has_tls = !config.tls().certificate_file().empty();
  if (has_tls && config.insecure_tcp()) {
    faults.emplace_back("insecure_tcp",
                        "cannot be had together with tls: every TCP address "
                        "speaks TLS");
  }
  if (config.insecure_tcp() && (!config.access().trainer_groups().empty() ||
                                !config.access().viewer_groups().empty())) {
    faults.emplace_back("insecure_tcp",
                        "would let every local user act as the daemon's user, "
                        "also those whom access.trainer_groups and "
                        "access.viewer_groups give no role: leave one out");
  }
  for (const std::string& text : config.listen()) {
    const auto address = ParseListenAddress(text);
    if (has_tls || !address.ok() || !address->unix_path.empty()) continue;
    if (!IsLoopback(address->host)) {
      faults.emplace_back(
          "listen",
          absl::StrCat(text,
                       " would let everybody who reaches it act as the "
                       "daemon's user: give the daemon a certificate (tls), or "
                       "listen on loopback (127.0.0.1) with insecure_tcp: true "
                       "(--insecure)"));
    } else if (!config.insecure_tcp()) {
      faults.emplace_back(
          "listen",
          absl::StrCat(text,
                       " would let every local user act as the daemon's user: "
                       "give the daemon a certificate (tls), or say "
                       "insecure_tcp: true (--insecure)"));
    }
  }
  return faults;
}

}  // namespace optstate::config
