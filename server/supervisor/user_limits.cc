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
  absl::string_view advice;
};

// Returns the places reserved for operators: one of two, when any are reserved.
uint32_t KeptForOperators(const v1::Limits& limits, uint32_t max) {
  if (limits.operator_reserve_percent() == 0 || max < 2) return 0;
  const uint64_t share =
      uint64_t{max} * limits.operator_reserve_percent() / 100;
  return static_cast<uint32_t>(std::max<uint64_t>(share, 1));
}

absl::Status Check(const v1::Limits& limits,
                   const accept::PeerCredentials& peer, const Counts& counts,
                   const Limit& limit) {
  if (counts.all >= limit.max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the node already has ", counts.all, " ", limit.things,
                     " (limits.", limit.things, "_max): ", limit.advice));
  }
  if (peer.is_operator()) return absl::OkStatus();
  const uint32_t of_user =
      limit.user_max != 0 ? limit.user_max : std::max(limit.max / 2, 1u);
  if (counts.of_user >= of_user) {
    return absl::ResourceExhaustedError(
        absl::StrCat("uid ", peer.caller.uid, " already has ", counts.of_user,
                     " ", limit.things, " on this node (limits.user_",
                     limit.things, "_max): ", limit.advice));
  }
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

absl::Status CheckJobCount(const v1::Limits& limits,
                           const accept::PeerCredentials& peer,
                           const Counts& jobs) {
  return Check(limits, peer, jobs,
               {.things = "jobs",
                .max = limits.jobs_max(),
                .user_max = limits.user_jobs_max(),
                .advice = "delete one with `optctl delete job NAME`"});
}

absl::Status CheckSessionCount(const v1::Limits& limits,
                               const accept::PeerCredentials& peer,
                               const Counts& sessions) {
  return Check(limits, peer, sessions,
               {.things = "sessions",
                .max = limits.sessions_max(),
                .user_max = limits.user_sessions_max(),
                .advice = "end a rank, or raise the limit"});
}

}  // namespace optstate::supervisor
