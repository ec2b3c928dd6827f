#include "server/supervisor/permissions.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace optstate::supervisor {

absl::Status CheckMayJoinJob(absl::string_view job, uid_t owner, uid_t uid) {
  if (uid == owner || uid == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("job \"", job, "\" belongs to uid ", owner,
                   " and the request comes from uid ", uid,
                   ": choose another job name, or act as its owner"));
}

absl::Status CheckMayChangeJob(absl::string_view job, uid_t owner, uid_t uid) {
  if (uid == ::geteuid()) return absl::OkStatus();
  return CheckMayJoinJob(job, owner, uid);
}

absl::Status CheckOperator(uid_t uid) {
  if (uid == 0 || uid == ::geteuid()) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("this concerns every job: only root and the daemon's uid ",
                   ::geteuid(), " may do it, not uid ", uid));
}

}  // namespace optstate::supervisor
