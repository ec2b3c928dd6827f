#include "server/config/quota_setting.h"

#include <cstdint>
#include <map>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/access/unix_names.h"
#include "server/config/job_weight.h"

namespace optstate::config {
namespace {

// The entries that were checked already, by number of their user or group.
using Known = std::map<uint32_t, int>;

// Returns what is wrong with one entry; "": nothing.
std::string WhatIsWrong(const v1::Quota& quota, uid_t daemon_uid, int index,
                        Known* users, Known* groups) {
  if (quota.user().empty() == quota.group().empty()) {
    return "names one user or one group, by name or number";
  }
  const bool is_user = !quota.user().empty();
  const std::string holder = is_user ? absl::StrCat("user ", quota.user())
                                     : absl::StrCat("group ", quota.group());
  const absl::StatusOr<uint32_t> id = is_user
                                          ? access::FindUser(quota.user())
                                          : access::FindGroup(quota.group());
  if (!id.ok()) return absl::StrCat(holder, ": ", id.status().message());
  const auto [known, is_first] =
      (is_user ? users : groups)->emplace(*id, index);
  if (!is_first) {
    return absl::StrCat(holder, " (number ", *id,
                        ") has a quota already, in quotas[", known->second,
                        "]: put both into one");
  }
  if (is_user && (*id == 0 || *id == daemon_uid)) {
    return absl::StrCat(holder,
                        " is an operator: root and the daemon's own user have "
                        "no quota. Remove it");
  }
  if (quota.weight() > kWeightMax) {
    return absl::StrCat(holder, ": weight must be from 1 to ", kWeightMax);
  }
  return "";
}

}  // namespace

std::vector<std::pair<std::string, std::string>> CheckQuotas(
    const v1::DaemonConfig& config, uid_t daemon_uid) {
  std::vector<std::pair<std::string, std::string>> faults;
  Known users;
  Known groups;
  for (int i = 0; i < config.quotas_size(); ++i) {
    std::string wrong =
        WhatIsWrong(config.quotas(i), daemon_uid, i, &users, &groups);
    if (wrong.empty()) continue;
    faults.emplace_back(absl::StrCat("quotas[", i, "]"), std::move(wrong));
  }
  return faults;
}

}  // namespace optstate::config
