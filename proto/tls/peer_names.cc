#include "proto/tls/peer_names.h"

#include <arpa/inet.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace optstate::tls {
namespace {

// A certificate may have any number of names.
constexpr int kNamesMax = 64;
constexpr size_t kNameBytesMax = 2048;

// Returns "" when the text cannot be compared safely.
std::string TextName(absl::string_view kind, const ASN1_STRING* value) {
  const absl::string_view text(
      reinterpret_cast<const char*>(ASN1_STRING_get0_data(value)),
      static_cast<size_t>(ASN1_STRING_length(value)));
  const bool is_plain =
      !text.empty() && text.size() <= kNameBytesMax &&
      std::all_of(text.begin(), text.end(),
                  [](unsigned char c) { return absl::ascii_isgraph(c); });
  return is_plain ? absl::StrCat(kind, text) : "";
}

std::string AddressName(const ASN1_OCTET_STRING* value) {
  char text[INET6_ADDRSTRLEN];
  const int size = ASN1_STRING_length(value);
  if (size != 4 && size != 16) return "";
  const bool written =
      ::inet_ntop(size == 4 ? AF_INET : AF_INET6, ASN1_STRING_get0_data(value),
                  text, sizeof(text)) != nullptr;
  return written ? absl::StrCat("IP:", text) : "";
}

std::string NameOf(const GENERAL_NAME& name) {
  switch (name.type) {
    case GEN_URI:
      return TextName("URI:", name.d.uniformResourceIdentifier);
    case GEN_DNS:
      return TextName("DNS:", name.d.dNSName);
    case GEN_EMAIL:
      return TextName("EMAIL:", name.d.rfc822Name);
    case GEN_IPADD:
      return AddressName(name.d.iPAddress);
    default:
      return "";
  }
}

}  // namespace

std::vector<std::string> PeerNames(const X509* certificate) {
  std::vector<std::string> names;
  if (certificate == nullptr) return names;
  const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> found(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(
          certificate, NID_subject_alt_name, nullptr, nullptr)),
      &GENERAL_NAMES_free);
  if (found == nullptr) return names;
  const int count = std::min(sk_GENERAL_NAME_num(found.get()), kNamesMax);
  for (int i = 0; i < count; ++i) {
    std::string name = NameOf(*sk_GENERAL_NAME_value(found.get(), i));
    if (!name.empty()) names.push_back(std::move(name));
  }
  return names;
}

}  // namespace optstate::tls
