#include "server/access/identities.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "optstate/v1/config.pb.h"
#include "proto/types/status_macros.h"
#include "server/access/granted.h"
#include "server/config/yaml_message.h"

namespace optstate::access {
namespace {

constexpr absl::string_view kKinds[] = {"URI:", "DNS:", "EMAIL:", "IP:"};

absl::Status CheckSan(absl::string_view san) {
  for (const absl::string_view kind : kKinds) {
    if (absl::StartsWith(san, kind) && san.size() > kind.size()) {
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "san \"", san, "\" is no URI:NAME, DNS:NAME, EMAIL:NAME or IP:ADDRESS"));
}

}  // namespace

absl::StatusOr<Identities> Identities::Parse(absl::string_view text,
                                             const std::string& file) {
  v1::Identities message;
  OPTSTATE_RETURN_IF_ERROR(config::MergeYaml(text, file, &message));
  Identities identities;
  for (const v1::Identity& each : message.identities()) {
    const std::string context =
        absl::StrCat(file, ": identity \"", each.san(), "\"");
    const absl::Status san = CheckSan(each.san());
    if (!san.ok()) return Annotate(san, file);
    absl::StatusOr<Granted> granted = GrantedTo(each.user(), each.role());
    if (!granted.ok()) return Annotate(granted.status(), context);
    Entry entry;
    absl::string_view name = each.san();
    entry.is_prefix = absl::ConsumeSuffix(&name, "*");
    entry.name = std::string(name);
    entry.uid = granted->uid;
    entry.role = granted->role;
    identities.entries_.push_back(std::move(entry));
  }
  return identities;
}

absl::StatusOr<Caller> Identities::Find(
    const std::vector<std::string>& names) const {
  for (const Entry& entry : entries_) {
    for (const std::string& name : names) {
      const bool fits = entry.is_prefix ? absl::StartsWith(name, entry.name)
                                        : name == entry.name;
      if (!fits) continue;
      return Caller{.uid = entry.uid,
                    .role = entry.role,
                    .via = Via::kTls,
                    .identity = name};
    }
  }
  if (names.empty()) {
    return absl::UnauthenticatedError(
        "the client's certificate has no name (subjectAltName)");
  }
  return absl::UnauthenticatedError(absl::StrCat(
      "no identity of this daemon fits the client's certificate, which is for ",
      absl::StrJoin(names, ", "),
      ": the operator adds one to access.identities_file"));
}

}  // namespace optstate::access
