#include "server/access/quotas.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/access/unix_names.h"

namespace optstate::access {
namespace {

// Names whom the quota is of: "user ada" or "group research".
std::string HolderOf(const v1::Quota& quota) {
  return quota.group().empty() ? absl::StrCat("user ", quota.user())
                               : absl::StrCat("group ", quota.group());
}

// Returns a limit of all users for which 0 stands for half of what the node
// has.
uint32_t OrHalf(uint32_t user_max, uint32_t max) {
  return user_max != 0 ? user_max : std::max(max / 2, 1u);
}

// Sets what a user's own quota leaves to the limits of all users.
void Complete(const v1::Limits& limits, v1::Quota* quota) {
  if (quota->jobs_max() == 0) {
    quota->set_jobs_max(OrHalf(limits.user_jobs_max(), limits.jobs_max()));
  }
  if (quota->sessions_max() == 0) {
    quota->set_sessions_max(
        OrHalf(limits.user_sessions_max(), limits.sessions_max()));
  }
  if (quota->state_bytes_max() == 0) {
    quota->set_state_bytes_max(limits.user_state_bytes_max());
  }
}

}  // namespace

bool IsOperator(uid_t uid) { return uid == 0 || uid == ::geteuid(); }

std::string QuotaText(const v1::Quota& quota, absl::string_view field,
                      uint64_t max) {
  return absl::StrCat("quota of ", HolderOf(quota), ": ", field, " is ", max);
}

Quotas::Quotas(v1::Limits limits, const All& quotas,
               Memberships::LookUp groups_of)
    : limits_(std::move(limits)),
      memberships_(Memberships::Tables{.groups_of = std::move(groups_of)}) {
  const absl::MutexLock lock(&mutex_);
  for (const v1::Quota& quota : quotas) {
    entries_.push_back({.quota = quota, .id = std::nullopt});
  }
  // A question finds it out again, and says it to the one who asks.
  FindNumbers().IgnoreError();
}

absl::Status Quotas::FindNumbers() {
  for (Entry& entry : entries_) {
    if (entry.id.has_value() || entry.is_absent) continue;
    const v1::Quota& quota = entry.quota;
    const absl::StatusOr<uint32_t> found = quota.group().empty()
                                               ? FindUser(quota.user())
                                               : FindGroup(quota.group());
    if (found.ok()) {
      entry.id = *found;
    } else if (absl::IsNotFound(found.status())) {
      entry.is_absent = true;
      spdlog::warn("the quota of {} concerns nobody: {}", HolderOf(quota),
                   found.status().ToString());
    } else {
      return absl::UnavailableError(absl::StrCat(
          "the quota of ", HolderOf(quota), " cannot be applied just now: ",
          found.status().message(), ". Try again"));
    }
  }
  return absl::OkStatus();
}

v1::Quota Quotas::OwnQuotaOf(uid_t uid) const {
  for (const Entry& entry : entries_) {
    if (entry.quota.group().empty() && entry.id == uid) return entry.quota;
  }
  return {};
}

// A name that this process did not find may be there when an engine looks for
// it.
Quotas::All Quotas::ThatMayConcern(uid_t uid) const {
  const absl::MutexLock lock(&mutex_);
  All found;
  for (const Entry& entry : entries_) {
    const bool is_others =
        entry.quota.group().empty() && entry.id.has_value() && *entry.id != uid;
    if (!is_others) *found.Add() = entry.quota;
  }
  return found;
}

absl::StatusOr<UserBounds> Quotas::BoundsOf(uid_t uid) {
  UserBounds bounds;
  bounds.uid = uid;
  if (IsOperator(uid)) return bounds;
  {
    const absl::MutexLock lock(&mutex_);
    OPTSTATE_RETURN_IF_ERROR(FindNumbers());
    bounds.own = OwnQuotaOf(uid);
  }
  bounds.in_force = bounds.own;
  Complete(limits_, &bounds.in_force);
  OPTSTATE_ASSIGN_OR_RETURN(bounds.groups, GroupsOf(uid));
  return bounds;
}

const GroupQuota* Heaviest(const std::vector<GroupQuota>& groups) {
  const auto found =
      std::max_element(groups.begin(), groups.end(),
                       [](const GroupQuota& one, const GroupQuota& other) {
                         return one.quota.weight() < other.quota.weight();
                       });
  return found == groups.end() || found->quota.weight() == 0 ? nullptr
                                                             : &*found;
}

absl::StatusOr<std::vector<GroupQuota>> Quotas::OfGroups() {
  const absl::MutexLock lock(&mutex_);
  OPTSTATE_RETURN_IF_ERROR(FindNumbers());
  std::vector<GroupQuota> groups;
  for (const Entry& entry : entries_) {
    if (entry.quota.group().empty() || !entry.id.has_value()) continue;
    groups.push_back({*entry.id, entry.quota});
  }
  return groups;
}

absl::StatusOr<std::map<uid_t, v1::Quota>> Quotas::OfUsers() {
  const absl::MutexLock lock(&mutex_);
  OPTSTATE_RETURN_IF_ERROR(FindNumbers());
  std::map<uid_t, v1::Quota> users;
  for (const Entry& entry : entries_) {
    if (!entry.quota.group().empty() || !entry.id.has_value()) continue;
    users.emplace(*entry.id, entry.quota);
  }
  return users;
}

absl::StatusOr<std::vector<GroupQuota>> Quotas::GroupsOf(uid_t uid) {
  std::vector<GroupQuota> groups;
  if (IsOperator(uid)) return groups;
  OPTSTATE_ASSIGN_OR_RETURN(groups, OfGroups());
  // Without a quota of a group nobody's groups need to be looked up.
  if (groups.empty()) return groups;
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<gid_t> all,
                            memberships_.GroupsOf(uid));
  std::erase_if(groups, [&all](const GroupQuota& each) {
    return !std::binary_search(all.begin(), all.end(), each.gid);
  });
  return groups;
}

absl::StatusOr<std::vector<uint64_t>> Quotas::SumOverMembers(
    const std::vector<GroupQuota>& groups,
    const std::map<uid_t, uint64_t>& by_user) {
  std::vector<uint64_t> sums(groups.size(), 0);
  if (groups.empty()) return sums;
  for (const auto& [uid, amount] : by_user) {
    if (amount == 0) continue;
    OPTSTATE_ASSIGN_OR_RETURN(const std::vector<GroupQuota> of_user,
                              GroupsOf(uid));
    for (size_t i = 0; i < groups.size(); ++i) {
      const bool is_in =
          std::any_of(of_user.begin(), of_user.end(),
                      [gid = groups[i].gid](const GroupQuota& each) {
                        return each.gid == gid;
                      });
      if (is_in) sums[i] += amount;
    }
  }
  return sums;
}

uint32_t Quotas::WeightOf(uid_t uid) {
  {
    const absl::MutexLock lock(&mutex_);
    FindNumbers().IgnoreError();  // logged, or said to those who ask for limits
    const uint32_t own = OwnQuotaOf(uid).weight();
    if (own != 0) return own;
    // Without a weight of a group nobody's groups need to be looked up.
    if (std::all_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
          return entry.quota.group().empty() || entry.quota.weight() == 0;
        })) {
      return kDefaultWeight;
    }
  }
  const auto groups = GroupsOf(uid);
  const GroupQuota* const heaviest = groups.ok() ? Heaviest(*groups) : nullptr;
  return heaviest != nullptr ? heaviest->quota.weight() : kDefaultWeight;
}

uint32_t Quotas::LargestWeight() const {
  const absl::MutexLock lock(&mutex_);
  uint32_t largest = kDefaultWeight;
  for (const Entry& entry : entries_) {
    largest = std::max(largest, entry.quota.weight());
  }
  return largest;
}

}  // namespace optstate::access
