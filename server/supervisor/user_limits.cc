#include "server/supervisor/user_limits.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace optstate::supervisor {
namespace {

struct Limit {
  absl::string_view things;  // "jobs"
  uint32_t max = 0;
  uint32_t user_max = 0;  // 0: half of max
  uint32_t (v1::Quota::*of_quota)() const = nullptr;
  absl::string_view advice;
};

// Returns the places reserved for operators: one of two, when any are reserved.
uint32_t KeptForOperators(const v1::Limits& limits, uint32_t max) {
  if (limits.operator_reserve_percent() == 0 || max < 2) return 0;
  const uint64_t share =
      uint64_t{max} * limits.operator_reserve_percent() / 100;
  return static_cast<uint32_t>(std::max<uint64_t>(share, 1));
}

std::string QuotaText(const v1::Quota& quota, const Limit& limit) {
  return access::QuotaText(quota, absl::StrCat(limit.things, "_max"),
                           (quota.*limit.of_quota)());
}

// Checks the quota of the job's owner, or else the limit of all users.
absl::Status CheckUser(uid_t owner, const Counts& counts, const Limit& limit,
                       const v1::Quota& own) {
  const uint32_t quota_max = (own.*limit.of_quota)();
  if (quota_max != 0) {
    if (counts.of_user < quota_max) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat(
        QuotaText(own, limit), ", and uid ", owner, " already has ",
        counts.of_user, " ", limit.things, " on this node: ", limit.advice));
  }
  const uint32_t of_user =
      limit.user_max != 0 ? limit.user_max : std::max(limit.max / 2, 1u);
  if (counts.of_user < of_user) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "uid ", owner, " already has ", counts.of_user, " ", limit.things,
      " on this node (limits.user_", limit.things, "_max): ", limit.advice));
}

absl::Status CheckGroups(const Counts& counts, const Limit& limit,
                         const std::vector<access::GroupQuota>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const v1::Quota& quota = groups[i].quota;
    const uint32_t max = (quota.*limit.of_quota)();
    const uint64_t taken =
        i < counts.of_groups.size() ? counts.of_groups[i] : 0;
    if (max == 0 || taken < max) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        QuotaText(quota, limit), ", and its members together already have ",
        taken, " ", limit.things, " on this node: ", limit.advice));
  }
  return absl::OkStatus();
}

absl::Status Check(const v1::Limits& limits,
                   const accept::PeerCredentials& peer, const Counts& counts,
                   const Limit& limit, const access::UserBounds& bounds) {
  if (counts.all >= limit.max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the node already has ", counts.all, " ", limit.things,
                     " (limits.", limit.things, "_max): ", limit.advice));
  }
  if (HasNoQuota(peer)) return absl::OkStatus();
  absl::Status status = CheckUser(bounds.uid.value_or(peer.caller.uid), counts,
                                  limit, bounds.own);
  if (status.ok()) status = CheckGroups(counts, limit, bounds.groups);
  if (!status.ok()) return status;
  const uint32_t kept = KeptForOperators(limits, limit.max);
  if (counts.all < limit.max - kept) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the node already has ", counts.all, " of ", limit.max, " ",
                   limit.things, ", and the last ", kept,
                   " are operators' (root's, the daemon's user's; "
                   "limits.operator_reserve_percent): ",
                   limit.advice));
}

}  // namespace

// A peer over TCP without TLS has the daemon's number, and is nobody known.
bool HasNoQuota(const accept::PeerCredentials& peer) {
  return peer.is_operator() && access::IsOperator(peer.caller.uid);
}

absl::Status CheckJobCount(const v1::Limits& limits,
                           const accept::PeerCredentials& peer,
                           const Counts& jobs,
                           const access::UserBounds& bounds) {
  return Check(limits, peer, jobs,
               {.things = "jobs",
                .max = limits.jobs_max(),
                .user_max = limits.user_jobs_max(),
                .of_quota = &v1::Quota::jobs_max,
                .advice = "delete one with `optctl delete job NAME`"},
               bounds);
}

absl::Status CheckSessionCount(const v1::Limits& limits,
                               const accept::PeerCredentials& peer,
                               const Counts& sessions,
                               const access::UserBounds& bounds) {
  return Check(limits, peer, sessions,
               {.things = "sessions",
                .max = limits.sessions_max(),
                .user_max = limits.user_sessions_max(),
                .of_quota = &v1::Quota::sessions_max,
                .advice = "end a rank, or raise the limit"},
               bounds);
}

}  // namespace optstate::supervisor
