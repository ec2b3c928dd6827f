#include "server/access/tokens.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "optstate/v1/config.pb.h"
#include "proto/types/status_macros.h"
#include "server/access/granted.h"
#include "server/config/yaml_message.h"

namespace optstate::access {

absl::StatusOr<Tokens> Tokens::Parse(absl::string_view text,
                                     const std::string& file) {
  v1::Tokens message;
  OPTSTATE_RETURN_IF_ERROR(config::MergeYaml(text, file, &message));
  Tokens tokens;
  for (const v1::Token& each : message.tokens()) {
    const std::string context =
        absl::StrCat(file, ": token \"", each.name(), "\"");
    if (each.name().empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, ": a token has no name"));
    }
    Entry entry;
    const bool is_digest =
        each.sha256().size() == 2 * entry.digest.size() &&
        std::all_of(each.sha256().begin(), each.sha256().end(),
                    [](unsigned char c) { return absl::ascii_isxdigit(c); });
    if (!is_digest) {
      return absl::InvalidArgumentError(absl::StrCat(
          context,
          ": sha256 has to be the 64 hexadecimal digits of `printf %s TOKEN | "
          "sha256sum`"));
    }
    const std::string bytes = absl::HexStringToBytes(each.sha256());
    std::copy(bytes.begin(), bytes.end(), entry.digest.begin());
    absl::StatusOr<Granted> granted = GrantedTo(each.user(), each.role());
    if (!granted.ok()) return Annotate(granted.status(), context);
    entry.caller = {.uid = granted->uid,
                    .role = granted->role,
                    .via = Via::kTls,
                    .identity = absl::StrCat("token:", each.name())};
    tokens.entries_.push_back(std::move(entry));
  }
  return tokens;
}

absl::StatusOr<Caller> Tokens::Find(absl::string_view token) const {
  const absl::Status refused = absl::UnauthenticatedError(
      "the token is none of this daemon's: the operator adds its digest to "
      "access.tokens_file");
  if (token.empty() || token.size() > kBytesMax) return refused;
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(),
         digest.data());
  const Entry* found = nullptr;
  for (const Entry& entry : entries_) {
    if (CRYPTO_memcmp(entry.digest.data(), digest.data(), digest.size()) == 0) {
      found = &entry;
    }
  }
  if (found == nullptr) return refused;
  return found->caller;
}

}  // namespace optstate::access
